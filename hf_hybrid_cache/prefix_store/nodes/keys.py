"""
The keys by which prompts are found: token ids, with marks of all else that states depend on.

Token ids are smaller than the marks, which are added by a bitwise or.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

PASS_ENDS, _AS_THEY_CAME = 2**31, 2**30


def keys_as_they_came(token_ids: "torch.Tensor") -> np.ndarray:
    """
    Return keys of tokens, `[tokens]`, that were generated, read after such, or read in a pass of few tokens.

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


def num_common(tokens: np.ndarray, others: np.ndarray) -> int:
    """Return with how many equal tokens, or keys, both begin."""
    length = min(len(tokens), len(others))
    different = np.flatnonzero(tokens[:length] != others[:length])
    return int(different[0]) if len(different) else length
