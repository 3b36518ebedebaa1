"""
The keys by which states are found: equal keys of all tokens before mean equal bits.

Of a token that the store has read the key is its id, with a mark where a forward pass ended. Of any other one, such as
a token of an answer, it is a random number, which only this conversation has: what its states depend on is not known.
Token ids are smaller than the marks, which are added by a bitwise or. As bytes a key has four, the highest first, so
that bytes sort as keys do.
"""

from hashlib import blake2b

import numpy as np

PASS_ENDS, _RANDOM = 2**31, 2**30
MOST_TOKEN_IDS = _RANDOM
KEY_BYTES = 4
# Beyond any context.
MOST_TOKENS = 2**26


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

    A pass ends there, or its key is a random one. Each digest is computed from the one before it, the first from
    `prefix`, and the keys between them, so that equal digests mean an equal identity and equal keys from the first on.
    """
    digests, start = dict[str, int](), 0
    for end in (np.flatnonzero(as_keys(keys) & (PASS_ENDS | _RANDOM)) + 1).tolist():
        data = bytes.fromhex(prefix) + keys[start * KEY_BYTES : end * KEY_BYTES]
        prefix = blake2b(data, digest_size=16).hexdigest()
        digests[prefix] = start = end
    return digests
