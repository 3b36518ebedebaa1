"""The prompts that a cache is continued with: longer than it, with its tokens first, for a model that uses it."""

import warnings
from typing import NoReturn

import torch

from ...cache_argument import CACHE_ARGUMENT
from ...saving import first_difference
from ..contents.contents import Contents
from .callers import border_that_drops_the_cache, length_of_whole_prompt, stack_level
from .forward_passes import ForwardPasses


class Prompts:
    """
    Refuses prompts that do not continue what is stored, and warns of models that do not use it.

    Attributes:
        token_ids: of the stored tokens and perhaps some after them, `[batch, tokens]`; `None` if they are not known.
    """

    def __init__(self, contents: Contents, passes: ForwardPasses):
        self._contents, self._passes = contents, passes
        self.token_ids: torch.Tensor | None = None
        # Such models have two forms of rotary embedding, one for short and one for long contexts.
        self._may_leave_border = hasattr(contents.stores.config, "original_max_position_embeddings")
        self._has_left_border = False

    def check(self, num_tokens: int) -> None:
        """Refuse a prompt of `generate` that is not longer than what is stored; warn if the model leaves the cache."""
        prompt = length_of_whole_prompt("_prefill") if num_tokens else None
        if prompt is not None and prompt <= num_tokens:
            self._passes.require_complete()
            self.refuse(f"the prompt of {prompt:,} tokens")
        border = border_that_drops_the_cache(num_tokens) if self._may_leave_border else None
        if border is not None:
            self._may_leave_border, self._has_left_border = False, True
            warnings.warn(
                f"The model goes on without this cache, which stays at {num_tokens:,} tokens: beyond {border:,} tokens "
                "its rotary embedding is another one, and transformers computes all tokens again, into a DynamicCache "
                f"of its own. Keep prompt and answer within {border:,} tokens, or fill the cache beyond them in one "
                f"call of the model before generate: model(ids, {CACHE_ARGUMENT}=cache, logits_to_keep=1).",
                stacklevel=2,
            )

    def refuse(self, prompt: str) -> NoReturn:
        """Raise a `ValueError` about a prompt without new tokens."""
        raise ValueError(
            f"There are no tokens to compute: {prompt} is not longer than the {self._contents.num_tokens:,} tokens "
            "that the cache holds already. A cache goes on with the text that is in it: pass the whole conversation as "
            "the prompt, or for another text use a new cache, or cache.reset()."
        )

    def refuse_assistant(self) -> None:
        """Raise a `ValueError` if assisted decoding is about to compute a whole prompt, and something is stored."""
        num_tokens = self._contents.num_tokens
        if num_tokens and length_of_whole_prompt("_assisted_decoding") is not None:
            raise ValueError(
                f"Assisted decoding and prompt lookup compute the whole prompt, and the cache holds {num_tokens:,} "
                "tokens already: those of the prompt would be in it twice. Use a new cache, or generate without an "
                "assistant and prompt_lookup_num_tokens."
            )

    def require_prefix(self, given: torch.Tensor) -> None:
        """Raise a `ValueError` if a prompt, `[batch, tokens]`, does not begin with the stored tokens that are known."""
        if self.token_ids is None:
            return
        num_tokens, given = self._contents.num_tokens, given.to("cpu", torch.long)
        known = self.token_ids[:, : min(num_tokens, given.shape[1])]
        if known.shape[0] == 1:
            known = known.expand(given.shape[0], -1)
        if given.shape[0] != known.shape[0]:
            return  # another batch, which the layers refuse
        different = first_difference(known, given[:, : known.shape[1]])
        if different is not None:
            sequence, position = different
            raise ValueError(
                f"The prompt does not go on with the {num_tokens:,} tokens that the cache holds: token {position:,} of "
                f"sequence {sequence} is {int(given[different])}, and the cache holds {int(known[different])} there "
                "(counted from 0). Pass the whole conversation as the prompt, or use a new cache, or cache.reset()."
            )

    def keep_stored(self) -> None:
        """Forget the tokens after those that are stored, which others may follow."""
        if self.token_ids is not None:
            self.token_ids = self.token_ids[:, : self._contents.num_tokens]

    def note_tokens(self, token_ids: torch.Tensor | None) -> None:
        """Note which tokens a generation has computed; warn if it left the cache empty, and no warning told why."""
        self.token_ids = None if token_ids is None else token_ids.detach().to("cpu", torch.long, copy=True)
        if self._contents.of_text and not self._contents.num_tokens and not self._has_left_border:
            warnings.warn(
                "The model has not used the cache that it was passed, which is empty: it keeps none, or one of its "
                "own.",
                stacklevel=stack_level(),
            )
