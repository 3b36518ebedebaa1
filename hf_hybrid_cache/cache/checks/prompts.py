"""The prompts that a cache is continued with: longer than it, with its tokens first, for a model that uses it."""

import warnings
from typing import NoReturn

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...cache_argument import CACHE_ARGUMENT
from ...layers import num_sequences_of
from ...token_ids import first_difference
from ..contents.contents import Contents
from .callers import WholePrompt, border_that_drops_the_cache, is_computing, stack_level, whole_prompt
from .forward_passes import ForwardPasses


class Prompts:
    """
    Refuses prompts that do not continue what is stored, and warns of models that do not use it.

    Attributes:
        token_ids: of the first stored tokens, and perhaps some after them, `[batch, tokens]`, one row if they are those
            of all sequences; `None` if they are not known.
        asked: token ids of the prompt that `generate` is about to compute, until the first of it is stored.
    """

    def __init__(self, contents: Contents, passes: ForwardPasses):
        self._contents, self._passes = contents, passes
        self.token_ids: torch.Tensor | None = None
        self.asked: torch.Tensor | None = None
        self._are_reordered = False
        # Such models have two forms of rotary embedding, one for short and one for long contexts.
        self._may_leave_border = hasattr(contents.stores.config, "original_max_position_embeddings")
        self._has_left_border = False

    def check(self, num_tokens: int) -> None:
        """Refuse a prompt of `generate` that does not continue what is stored; warn if the model leaves the cache."""
        prompt = whole_prompt("_prefill")
        if prompt is not None:
            if num_tokens and prompt.length <= num_tokens:
                self._passes.require_complete()
                self.refuse(f"the prompt of {prompt.length:,} tokens")
            if num_tokens:
                self._require_sequences(prompt)
            self._ask(prompt)
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
        num_tokens, prompt = self._contents.num_tokens, whole_prompt("_assisted_decoding")
        if prompt is not None and num_tokens:
            raise ValueError(
                f"Assisted decoding and prompt lookup compute the whole prompt, and the cache holds {num_tokens:,} "
                "tokens already: those of the prompt would be in it twice. Use a new cache, or generate without an "
                "assistant and prompt_lookup_num_tokens."
            )
        if prompt is not None:
            self._ask(prompt)

    def _require_sequences(self, prompt: WholePrompt) -> None:
        """Refuse more sequences than recurrent states have: these are read before attention would repeat them."""
        rows = 0 if prompt.token_ids is None else len(prompt.token_ids)
        recurrent = (each for each in self._contents.theirs if isinstance(each, LinearAttentionCacheLayerMixin))
        held = next((number for each in recurrent if (number := num_sequences_of(each)) is not None), rows)
        if held != rows:
            raise ValueError(
                f"generate computes {rows} sequences, and recurrent states are stored of {held}. Call "
                f"cache.batch_repeat_interleave({rows}) before, if all of them go on from one."
            )

    def _ask(self, prompt: WholePrompt) -> None:
        """Refuse a prompt that begins with other tokens than those that are known to be stored; remember it."""
        self.asked = None
        if prompt.token_ids is None or prompt.token_ids.dim() != 2:
            return
        self.require_prefix(prompt.token_ids, prompt.mask)
        # Of states whose tokens are not known, nobody says that a prompt has them.
        if self.token_ids is not None or not self._contents.num_tokens:
            self.asked = prompt.token_ids

    def note_stored(self) -> None:
        """Note the prompt that was asked for, once the first of it is stored: an error may have ended it before."""
        asked, self.asked = self.asked, None
        if asked is not None and is_computing(asked):
            self._keep(asked)

    def require_prefix(self, given: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """
        Raise a `ValueError` if a prompt, `[batch, tokens]`, does not begin with the stored tokens that are known.

        Tokens that `mask` hides may be any.
        """
        self._settle_order()
        if self.token_ids is None:
            return
        num_tokens = self._contents.num_tokens
        known = self.token_ids[:, : min(num_tokens, given.shape[1])]
        if known.shape[0] == 1:
            known = known.expand(given.shape[0], -1)
        if given.shape[0] != known.shape[0]:
            return  # another batch, which the layers refuse
        given = given[:, : known.shape[1]].to("cpu", torch.long)
        if mask is not None:
            given = torch.where(mask[:, : known.shape[1]].to("cpu") == 0, known, given)
        different = first_difference(known, given)
        if different is not None:
            sequence, position = different
            raise ValueError(
                f"The prompt does not go on with the {num_tokens:,} tokens that the cache holds: token {position:,} of "
                f"sequence {sequence} is {int(given[different])}, and the cache holds {int(known[different])} there "
                "(counted from 0). Pass the whole conversation as the prompt, or go back to what both begin with by "
                "cache.keep_common_prefix(input_ids), or use a new cache, or cache.reset()."
            )

    def num_common(self, given: torch.Tensor) -> int:
        """Return how many tokens a prompt, `[batch, tokens]`, has in common with those that are known to be stored."""
        self._settle_order()
        num_tokens, known = self._contents.num_tokens, self.token_ids
        if known is None:
            raise ValueError(
                f"It is not known which {num_tokens:,} tokens the cache holds: they are known of prompts of prefill "
                "and generate. Name them with cache.note_tokens(token_ids), or forget them with cache.reset()."
            )
        if len(known) != len(given) and 1 not in (len(known), len(given)):
            raise ValueError(
                f"The prompt has {len(given)} sequences, and the cache holds {len(known)}: pass a prompt for each, or "
                "one for all."
            )
        most = min(num_tokens, known.shape[1], given.shape[1])
        different = first_difference(known[:, :most], given[:, :most].to("cpu", torch.long))
        return most if different is None else different[1]

    def keep_stored(self) -> None:
        """Forget the tokens after those that are stored, which others may follow."""
        num_tokens = self._contents.num_tokens
        if self.token_ids is not None:
            self.token_ids = self.token_ids[:, :num_tokens] if num_tokens else None

    def note_reordered(self) -> None:
        """Note that sequences have changed places, as beams do at every step."""
        self._are_reordered = True

    def selected(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the known tokens of the sequences that `indices` (integers or a boolean mask) selects."""
        self._settle_order()
        if self.token_ids is None or len(self.token_ids) == 1:
            return self.token_ids
        try:
            return self.token_ids[torch.as_tensor(indices, device="cpu")]
        except IndexError:  # the layers refuse it, or the caller has noted the tokens of fewer sequences
            return None

    def repeat(self, repeats: int) -> None:
        """Repeat the tokens of every sequence side by side."""
        self._settle_order()
        if self.token_ids is not None and len(self.token_ids) > 1:
            self.token_ids = self.token_ids.repeat_interleave(repeats, dim=0)

    def _settle_order(self) -> None:
        """Keep what all sequences begin with, if they have changed places: that is known of each."""
        if self._are_reordered and self.token_ids is not None:
            different = first_difference(self.token_ids[:1], self.token_ids)
            self.token_ids = self.token_ids[:1, : None if different is None else different[1]]
        self._are_reordered = False

    def _keep(self, token_ids: torch.Tensor) -> None:
        """Keep a copy: the caller may write to the tensor."""
        with torch.inference_mode(False):
            self.token_ids = token_ids.detach().to("cpu", torch.long, copy=True)
        self._are_reordered = False

    def note_tokens(self, token_ids: torch.Tensor | None) -> None:
        """Note which tokens a generation has computed; warn if it left the cache empty, and no warning told why."""
        self.token_ids = None
        if token_ids is not None:
            self._keep(token_ids)
        if self._contents.of_text and not self._contents.num_tokens and not self._has_left_border:
            warnings.warn(
                "The model has not used the cache that it was passed, which is empty: it keeps none, or one of its "
                "own.",
                stacklevel=stack_level(),
            )
