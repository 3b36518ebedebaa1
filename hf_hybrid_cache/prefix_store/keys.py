"""
The keys by which states are found: equal keys of all tokens before mean equal bits.

Of a token that the store has read the key is its id, with a mark where a forward pass ended. Of any other one, such as
a token of an answer, it is a random number, which only this conversation has: what its states depend on is not known.
Token ids are smaller than the marks, which are added by a bitwise or.

Forward passes end where a prompt alone says, so that it has the same states whatever of it is stored already: a product
of matrices may give a token other bits among more tokens, and attention to codes reads those of the end of its pass.
The ends are multiples of the chunk size from the first token on, and the end of the document. The last passes are
short: another prompt that parts there has little to read again.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ..scalars import MOST_ROWS, PREFILL_CHUNK_SIZE

PASS_ENDS, _RANDOM = 2**31, 2**30
MOST_TOKEN_IDS = _RANDOM
# Beyond any context, and a header of safetensors, of 100 MB, has the keys of as many.
MOST_TOKENS = 2**24
# Tokens of the passes after the last whole chunk.
_LAST_TOKENS = 512
# A shorter pass takes longer for a token, and reading it again takes no longer than storing it.
_FEW_TOKENS = 128


def random_keys(count: int, seed: int) -> np.ndarray:
    """Return keys of tokens, `[count]`, that no other ones have."""
    return np.random.default_rng(seed).integers(_RANDOM, size=count, dtype=np.uint32) | _RANDOM


def num_read_tokens(keys: np.ndarray) -> int:
    """Return how many of the first tokens the store has read, so that their keys tell them."""
    others = np.flatnonzero(keys & _RANDOM)
    return int(others[0]) if len(others) else len(keys)


def token_ids_of(keys: np.ndarray) -> np.ndarray:
    """Return the ids of tokens that the store has read, by their keys."""
    return (keys & (_RANDOM - 1)).astype(np.int64)


def as_bytes(keys: np.ndarray) -> bytes:
    """Return keys, `[tokens]`, as bytes, four each, the highest first."""
    assert keys.ndim == 1
    assert len(keys) <= MOST_TOKENS
    return keys.astype(">u4").tobytes()


def as_keys(data: bytes) -> np.ndarray:
    """Return keys, uint32 `[tokens]`, from bytes."""
    return np.frombuffer(data, ">u4").astype(np.uint32)


def identity_digest(identity: bytes) -> str:
    """Return the digest, of 32 hexadecimal digits, of what is before the first token."""
    return blake2b(identity, digest_size=16, person=b"identity").hexdigest()


def end_digests(prefix: str, keys: np.ndarray) -> dict[str, int]:
    """
    Return how many tokens come before each place where a node may end, by the digest of all that is before it.

    A pass ends there, or its key is a random one. Each digest is computed from the one before it, the first from
    `prefix`, and the keys between them, so that equal digests mean an equal identity and equal keys from the first on.
    """
    digests, start = dict[str, int](), 0
    for end in (np.flatnonzero(keys & (PASS_ENDS | _RANDOM)) + 1).tolist():
        prefix = blake2b(bytes.fromhex(prefix) + as_bytes(keys[start:end]), digest_size=16).hexdigest()
        digests[prefix] = start = end
    return digests


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

        Those of few tokens are not: a model may have another way for them (`fuse_decode`), with other bits.
        """
        return end - start > MOST_ROWS and (end == self.document_tokens or end - start >= _FEW_TOKENS)

    def ends(self, start: int = 0) -> list[int]:
        """Return where passes end that begin after `start` tokens, where one ended."""
        document, last = self.document_tokens, self.num_tokens - self.num_tokens % PREFILL_CHUNK_SIZE
        chunks = range(PREFILL_CHUNK_SIZE, self.num_tokens, PREFILL_CHUNK_SIZE)
        pieces = range(last + _LAST_TOKENS, self.num_tokens - _FEW_TOKENS + 1, _LAST_TOKENS)
        in_document = (end for end in chunks if end < document - MOST_ROWS)
        after = (end for end in (*chunks, *pieces) if not document or end >= document + _FEW_TOKENS)
        return [end for end in dict.fromkeys((*in_document, document, *after, self.num_tokens)) if end > start]

    def keys(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the token ids, `[tokens]`, with marks where passes end, which their states depend on."""
        keys = token_ids[: self.num_tokens].astype(np.uint32)
        keys[[end - 1 for end in self.ends()]] |= PASS_ENDS
        return keys
