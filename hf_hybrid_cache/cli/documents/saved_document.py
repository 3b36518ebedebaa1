"""The tokens of a saved document."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ...saving import CacheFile
from ..console import UsageError


@dataclass(frozen=True)
class SavedDocument:
    """
    The tokens in the file of a cache.

    Attributes:
        token_ids: `[1, tokens]`, of a document or of a conversation about it.
        document_tokens: how many of them are the document's; `None` where the file does not tell.
    """

    token_ids: torch.Tensor
    document_tokens: int | None


def saved_document(path: Path) -> SavedDocument:
    """
    Read the tokens of a document or a conversation from the file of its cache.

    Raises:
        UsageError: the file has no tokens, or those of several sequences.
        CacheFileError: the file is not a cache.
    """
    with CacheFile(path) as file:
        token_ids = file.token_ids()
        document_tokens = file.description.document_tokens
    if token_ids is None or token_ids.shape[0] != 1:
        raise UsageError(f"{path} was not saved with --save-cache or /save: it lacks the tokens of a document.")
    return SavedDocument(token_ids, document_tokens)
