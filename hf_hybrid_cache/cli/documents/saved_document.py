"""The tokens of a saved document."""

from pathlib import Path

import torch

from ...saving import saved_token_ids
from ..console import UsageError


def document_ids(path: Path) -> torch.Tensor:
    """
    Read the tokens, `[1, tokens]`, of a document or a conversation from the file of its cache.

    Raises:
        UsageError: the file has no tokens, or those of several sequences.
        CacheFileError: the file is not a cache.
    """
    token_ids = saved_token_ids(path)
    if token_ids is None or token_ids.shape[0] != 1:
        raise UsageError(f"{path} was not saved with --save-cache or /save: it lacks the tokens of a document.")
    return token_ids
