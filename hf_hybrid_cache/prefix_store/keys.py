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
KEY_BYTES = 4
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


def identity_digest(identity: bytes) -> str:
    """Return the digest, of 32 hexadecimal digits, of what is before the first token."""
    return blake2b(identity, digest_size=16, person=b"identity").hexdigest()


def end_digests(prefix: str, keys: bytes) -> dict[str, int]:
    """
    Return how many tokens come before each place where a node may end, by the digest of all that is before it.

    A pass ends there, or its token was read as it came. Each digest is computed from the one before it, the first from
    `prefix`, and the keys between them, so that equal digests mean an equal identity and equal keys from the first on.
    """
    digests, start = dict[str, int](), 0
    for end in (np.flatnonzero(as_keys(keys) & (PASS_ENDS | _AS_THEY_CAME)) + 1).tolist():
        data = bytes.fromhex(prefix) + keys[start * KEY_BYTES : end * KEY_BYTES]
        prefix = blake2b(data, digest_size=16).hexdigest()
        digests[prefix] = start = end
    return digests
