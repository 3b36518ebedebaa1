"""
The ends of the forward passes of a prompt, by which it has the same states whatever of it is stored already.

A product of matrices may give a token other bits among more tokens, and attention to codes reads those of the end of
its pass. So passes end where the prompt alone says: at multiples of the chunk size from the first token on, and at the
end of the document. States are used where the passes before them ended there, too.

The last passes of a prompt are short: another one that parts there has little to read again.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..prefill_chunks import PREFILL_CHUNK_SIZE
from .keys import PASS_ENDS

# Tokens of the passes after the last whole chunk.
_LAST_TOKENS = 512
# A shorter pass takes longer for a token, and reading it again takes no longer than storing it.
_FEW_TOKENS = 128


@dataclass(frozen=True)
class Passes:
    """
    The forward passes of a prompt.

    Attributes:
        num_tokens: of the prompt.
        document_tokens: where a pass ends in any case, because other prompts begin with that document, too; 0 for none.
    """

    num_tokens: int
    document_tokens: int

    def is_kept(self, start: int, end: int) -> bool:
        """
        Return whether the states of a pass, from `start` to `end`, are worth storing.

        Those of a single token are not: a model may have another way for it (`fuse_decode`), with other bits.
        """
        return end - start > 1 and (end == self.document_tokens or end - start >= _FEW_TOKENS)

    def ends(self, start: int = 0) -> list[int]:
        """Return where passes end that begin after `start` tokens, where one ended."""
        document, last = self.document_tokens, self.num_tokens - self.num_tokens % PREFILL_CHUNK_SIZE
        chunks = range(PREFILL_CHUNK_SIZE, self.num_tokens, PREFILL_CHUNK_SIZE)
        pieces = range(last + _LAST_TOKENS, self.num_tokens - _FEW_TOKENS + 1, _LAST_TOKENS)
        in_document = (end for end in chunks if end < document - 1)
        after = (end for end in (*chunks, *pieces) if not document or end >= document + _FEW_TOKENS)
        return [end for end in dict.fromkeys((*in_document, document, *after, self.num_tokens)) if end > start]

    def keys(self, token_ids: torch.Tensor) -> np.ndarray:
        """Return the token ids, `[tokens]`, with marks where passes end, which their states depend on."""
        keys = token_ids[: self.num_tokens].numpy().astype(np.uint32)
        keys[[end - 1 for end in self.ends()]] |= PASS_ENDS
        return keys
