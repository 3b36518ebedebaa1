"""
The keys by which prompts are found: token ids, with marks of all else that states depend on.

Token ids are smaller than the marks, which are added by a bitwise or. As bytes a key has four, the highest first, so
that bytes sort as keys do.
"""

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

PASS_ENDS, _AS_THEY_CAME = 2**31, 2**30
MOST_TOKEN_IDS = _AS_THEY_CAME
BLOCK_TOKENS, KEY_BYTES = 64, 4
BLOCK_BYTES = BLOCK_TOKENS * KEY_BYTES
# Beyond any context.
MOST_TOKENS = 2**26


def keys_as_they_came(token_ids: "torch.Tensor") -> np.ndarray:
    """
    Return keys of tokens, `[tokens]`, that were generated, or read after a document as they came.

    Their states depend on more than the tokens, so these are found for one conversation only.
    """
    return token_ids.numpy().astype(np.uint32) | _AS_THEY_CAME


def num_shared_tokens(keys: np.ndarray) -> int:
    """Return how many of the first tokens have states that are those of any prompt with these tokens."""
    others = np.flatnonzero(keys & _AS_THEY_CAME)
    return int(others[0]) if len(others) else len(keys)


def token_ids_of(keys: np.ndarray) -> np.ndarray:
    """Return the token ids of keys."""
    return (keys & (_AS_THEY_CAME - 1)).astype(np.int64)


def as_bytes(keys: np.ndarray) -> bytes:
    """Return keys, `[tokens]`, as bytes."""
    assert keys.ndim == 1
    assert len(keys) <= MOST_TOKENS
    return keys.astype(">u4").tobytes()


def as_keys(data: bytes) -> np.ndarray:
    """Return keys, uint32 `[tokens]`, from bytes."""
    return np.frombuffer(data, ">u4").astype(np.uint32)


def num_common(keys: bytes, others: bytes) -> int:
    """Return with how many equal keys, as bytes, both begin."""
    length = min(len(keys), len(others))
    if keys[:length] == others[:length]:
        return length // KEY_BYTES
    one, other = (np.frombuffer(each, ">u4", length // KEY_BYTES) for each in (keys, others))
    return int((one != other).argmax())


def prefix_digests(identity: bytes, keys: bytes) -> list[str]:
    """
    Return the digests of what is before each block of a prompt, the one that follows the last whole block included.

    Each, of 32 hexadecimal digits, is computed from the one before it and the keys of the block, the first from
    `identity`, so that equal digests mean an equal identity and equal keys from the first on.
    """
    digest = blake2b(identity, digest_size=16, person=b"identity").digest()
    digests = [digest.hex()]
    for start in range(0, len(keys) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest = blake2b(digest + keys[start : start + BLOCK_BYTES], digest_size=16).digest()
        digests.append(digest.hex())
    return digests
