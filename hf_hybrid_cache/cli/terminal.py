"""Text that is printed: tokens as they come, without control characters."""

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, TextStreamer

from .console import write as write


class TokenStream:
    """Writes tokens as they come: words if there is a tokenizer, token ids if not."""

    def __init__(self, out: Console, tokenizer: PreTrainedTokenizerBase | None):
        self._out = out
        self._words = _Words(out, tokenizer) if tokenizer else None

    def put(self, token: int) -> None:
        if self._words:
            self._words.put(torch.tensor([token]))
        else:
            write(self._out, f"{token} ")

    def end(self) -> None:
        if self._words:
            self._words.end()
        write(self._out, "\n")


class _Words(TextStreamer):
    """Writes a text as soon as its words are complete."""

    def __init__(self, out: Console, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_special_tokens=True)
        self._out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        write(self._out, text)


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can encode a text; it cannot encode what a terminal passed on in another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
