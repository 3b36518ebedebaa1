"""
The ends of the forward passes of a prompt, by which it has the same states whatever of it is stored already.

Attention by the kernels of this package, and products of matrices on a CPU, give a token the same bits wherever passes
end, unless a pass has few tokens. There a prompt can go on from any token of a stored one. Elsewhere (on a device, in
layers of transformers' own, with experts, in several processes) passes end at multiples of the chunk size from the
first token on, and at the end of the document, whatever is stored; and states are used only where the passes before
them ended there, too.

In a quantized cache states go on from where a pass ended, wherever they do not depend on it. So the last passes of a
prompt are short: another one that parts there has little to read again.
"""

import re
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ..cache import Contents
from ..kernels import uses_prefill_kernel
from ..prefill_chunks import FEWEST_TOKENS_OF_SAME_BITS, PREFILL_CHUNK_SIZE
from ..storage import GRANULE, kernel_element
from .keys import PASS_ENDS

# The first pass chooses the codecs of a quantized cache: it is the same for all prompts. So many come after the sinks.
_FIRST_TOKENS = 15 * GRANULE
# Tokens of a quantized prompt's passes after the last whole chunk.
_LAST_TOKENS = 512
# In names of modules and of their classes. Products with the weights of an expert have as many rows as chose it.
_EXPERTS = re.compile("expert|moe|router", re.IGNORECASE)


@dataclass(frozen=True)
class Passes:
    """
    The forward passes of a prompt.

    Attributes:
        num_tokens: of the prompt.
        document_tokens: where a pass ends in any case, because other prompts begin with that document, too; 0 for none.
        can_end_anywhere: whether states do not depend on where passes end.
        needs_whole_nodes: whether states go on only from where a pass ended before.
        first_tokens: of the first pass, if states depend on its end; 0 if not.
    """

    num_tokens: int
    document_tokens: int
    can_end_anywhere: bool
    needs_whole_nodes: bool
    first_tokens: int

    @classmethod
    def of(cls, num_tokens: int, document_tokens: int, model: PreTrainedModel, contents: Contents) -> "Passes":
        """Return the passes by which a model reads a prompt, of which a document is the beginning, into a cache."""
        anywhere = _can_end_anywhere(model, contents)
        sinks = [codec.sink_tokens for codec in contents.stores.asked_codecs.values()]
        first = max(sinks) + _FIRST_TOKENS if anywhere and sinks else 0
        if anywhere and document_tokens < first + FEWEST_TOKENS_OF_SAME_BITS:
            document_tokens = 0
        return cls(num_tokens, min(document_tokens, num_tokens), anywhere, bool(sinks) or not anywhere, first)

    def is_kept(self, start: int, end: int, are_read: bool = False) -> bool:
        """
        Return whether a pass, from `start` to `end`, gives states that are those of any prompt with these tokens.

        With `are_read` attention has read the states of the cache, those of codes as they were at the end of the pass.
        """
        if not self.can_end_anywhere:
            return True
        if are_read and self.first_tokens and end != self.first_tokens and end % PREFILL_CHUNK_SIZE:
            return False
        return end == self.first_tokens or (start >= self.first_tokens and end - start >= FEWEST_TOKENS_OF_SAME_BITS)

    @property
    def shared_tokens(self) -> int:
        """Number of first tokens whose states are those of any prompt with these tokens."""
        start = 0
        for end in self.ends():
            if not self.is_kept(start, end):
                break
            start = end
        return start

    def ends(self, start: int = 0) -> list[int]:
        """Return where passes end that begin after `start` tokens, which are there already."""
        if start < self.first_tokens and self.num_tokens >= self.first_tokens + FEWEST_TOKENS_OF_SAME_BITS:
            return [self.first_tokens, *self.ends(self.first_tokens)]
        ends: list[int] = []
        for border in (self.document_tokens, self.num_tokens):
            if start < border:
                ends += self._ends_between(start, border)
                start = border
        return ends

    def usable(self, stored: int) -> int:
        """Return how many of the first tokens, of `stored` ones, leave the next pass long enough."""
        stored = min(stored, self.shared_tokens)
        if not self.can_end_anywhere or stored in (0, self.num_tokens):
            return stored
        if stored >= self.document_tokens:
            return max(self.document_tokens, min(stored, self.num_tokens - FEWEST_TOKENS_OF_SAME_BITS))
        return max(0, min(stored, self.document_tokens - FEWEST_TOKENS_OF_SAME_BITS))

    def keys(self, token_ids: torch.Tensor) -> np.ndarray:
        """Return the token ids, `[tokens]`, with marks of the passes that their states depend on."""
        keys = token_ids[: self.num_tokens].numpy().astype(np.uint32)
        ends = [self.first_tokens] if self.can_end_anywhere else self.ends()
        keys[[end - 1 for end in ends if 0 < end <= self.num_tokens]] |= PASS_ENDS
        return keys

    def _ends_between(self, start: int, border: int) -> list[int]:
        least = FEWEST_TOKENS_OF_SAME_BITS if self.can_end_anywhere else 1
        first_chunk = start - start % PREFILL_CHUNK_SIZE + PREFILL_CHUNK_SIZE
        ends = list(range(first_chunk, border, PREFILL_CHUNK_SIZE))
        if self.first_tokens and border == self.num_tokens:
            last = ends[-1] if ends else start
            ends += range(last - last % _LAST_TOKENS + _LAST_TOKENS, border, _LAST_TOKENS)
        return [*(end for end in ends if end - start >= least and border - end >= least), border]


def _can_end_anywhere(model: PreTrainedModel, contents: Contents) -> bool:
    """Whether a token has the same bits wherever passes end."""
    stores, placement = contents.stores, contents.stores.placement
    config, element = stores.config, kernel_element(model.dtype)
    return (
        stores.peers is None  # which compute the first pass in another way than the next ones
        and not contents.theirs
        and {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and not any(_EXPERTS.search(f"{name} {type(module).__name__}") for name, module in model.named_modules())
        and placement.cpu_decode in (None, True)
        and not placement.offload
        and not placement.device_tokens
        and element is not None
        and uses_prefill_kernel(element)
    )
