"""
Token ids as bytes, and their digests.

A token is four bytes, the highest first, so that bytes sort as tokens do.
"""

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import TokenIdsError

BLOCK_TOKENS = 64
TOKEN_BYTES = 4
# Beyond any context; the sizes in a file are compared with it before memory is taken.
MOST_TOKENS = 2**26
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
DIGEST_BYTES = 32
ID_BYTES = 16


def as_bytes(token_ids: Any) -> bytes:
    """
    Return the token ids of one prompt as bytes.

    Args:
        token_ids: integers `[tokens]`, as a list, an array or a tensor in host memory.

    Raises:
        TokenIdsError: they are something else.
    """
    try:
        array = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TokenIdsError(f"Token ids must be integers [tokens], and cannot be an array: {error}.") from error
    if array.shape == (0,):
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TokenIdsError(f"Token ids must be integers [tokens], got {list(array.shape)} of {array.dtype}.")
    if len(array) > MOST_TOKENS:
        raise TokenIdsError(f"A prompt can have up to {MOST_TOKENS:,} tokens, got {len(array):,}.")
    if array.min() < 0 or array.max() >= 2 ** (8 * TOKEN_BYTES):
        raise TokenIdsError(f"Token ids must be between 0 and 2**32 - 1, got {array.min()} to {array.max()}.")
    return array.astype(">u4").tobytes()


def as_array(tokens: bytes) -> NDArray[np.int64]:
    """Return token ids from bytes."""
    return np.frombuffer(tokens, ">u4").astype(np.int64)


def block_digests(identity: bytes, tokens: bytes) -> list[bytes]:
    """
    Return the digests of the first 0, 1, 2, ... whole blocks of a prompt.

    Each is computed from the one before it and the tokens of the block, the first from `identity`, so that equal
    digests mean an equal identity and equal tokens from the first on.
    """
    digest = blake2b(identity, digest_size=DIGEST_BYTES, person=b"identity").digest()
    digests = [digest]
    for start in range(0, len(tokens) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest = blake2b(digest + tokens[start : start + BLOCK_BYTES], digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return digests


def node_id(parent: bytes, start: int, end_digest: bytes, last_tokens: bytes) -> bytes:
    """
    Return the id of a node, which says all tokens up to its end.

    Args:
        parent: id of the parent.
        start: number of tokens before the node.
        end_digest: of the whole blocks up to its end.
        last_tokens: that follow them, as bytes.
    """
    place = parent + start.to_bytes(8, "little") + end_digest
    return blake2b(place + last_tokens, digest_size=ID_BYTES, person=b"node").digest()


def num_common(tokens: bytes, others: bytes) -> int:
    """Return with how many equal tokens both begin."""
    length = min(len(tokens), len(others))
    if tokens[:length] == others[:length]:
        return length // TOKEN_BYTES
    one, other = (np.frombuffer(each, ">u4", length // TOKEN_BYTES) for each in (tokens, others))
    return int((one != other).argmax())
