"""Saving a cache to a file, and opening the file of one for a model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig

from ..saving import CacheFile, save_layers
from ..scalars import as_integer
from ..token_ids import TokenIds, as_token_ids
from .contents.contents import Contents


def save(
    contents: Contents,
    model_traits: dict[str, Any],
    path: str | os.PathLike[str],
    token_ids: TokenIds | None,
    document_tokens: int | None,
) -> None:
    """Write a cache to a file, with the traits of its model; see `HybridCache.save` for the rest."""
    num_tokens = contents.num_tokens
    kept = None if token_ids is None else as_token_ids("token_ids", token_ids)
    if kept is not None and kept.shape[1] != num_tokens:
        raise ValueError(
            f"token_ids must be integers [batch, {num_tokens}], one for each token that is stored, got "
            f"{list(kept.shape)}. The last token that was generated is not stored."
        )
    document = None if document_tokens is None else as_integer(document_tokens)
    if document_tokens is not None and (kept is None or document is None or not 0 < document <= num_tokens):
        raise ValueError(
            f"document_tokens must be an integer from 1 to the {num_tokens:,} stored tokens, and goes with "
            f"token_ids, got {document_tokens!r}."
        )
    save_layers(path, contents.layers, contents.stores, model_traits, kept, document)


@contextmanager
def opened_for(
    config: PreTrainedConfig, path: str | os.PathLike[str], token_ids: TokenIds | None
) -> Iterator[CacheFile]:
    """Open the file of a cache for such a model, whose tokens these begin with; see `HybridCache.load`."""
    with CacheFile(path) as file:
        file.require_model(config)
        if token_ids is not None:
            file.require_prefix(as_token_ids("token_ids", token_ids))
        yield file
