"""The report of what a prompt found in a store."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reuse:
    """
    A report of the tokens of a prompt that came from a store.

    Attributes:
        folder: of the store.
        num_tokens: tokens of the prompt that came from it.
        common_tokens: tokens that the prompt has in common with what is stored, which may be more: states go on only
            from where a forward pass ended before, or leave the next one long enough.
        prompt_tokens: of the prompt.
        stored_token: token id that is stored where the prompt first differs; `None` if nothing is.
        given_token: token id of the prompt there; `None` if it ends there.
    """

    folder: Path
    num_tokens: int
    common_tokens: int
    prompt_tokens: int
    stored_token: int | None
    given_token: int | None

    def __str__(self) -> str:
        return self.text()

    def text(self, token_text: Callable[[int], str] = str) -> str:
        """
        Return the report in one line.

        Args:
            token_text: the text of a token id.
        """
        text = f"{self.num_tokens:,} of {self.prompt_tokens:,} tokens from {self.folder}"
        if self.stored_token is None or self.given_token is None:
            return text
        return (
            f"{text}, the first difference at token {self.common_tokens:,}: {token_text(self.given_token)} instead of "
            f"{token_text(self.stored_token)}"
        )
