"""
Attention of a chunk of a prompt, but for the first one, to a quantized layer on the CPU.

Each token sees the codes that it would see had the tokens come one by one: its own position tells which tokens it
reads in full precision, never where its chunk begins or ends. So the bits of an answer do not depend on where the rest
of a prompt is cut into chunks.

They do depend on it with chunks of at most `MAX_QUERIES` tokens, which take the kernel for few queries, and with the
one whose states choose the codec. And they do where chunks are not kept in full precision: in layers on a device, in
part or streamed, of several processes or continuations, where attention asks for the states, and where torch attends.
"""

import numpy as np
import torch

from ..storage import ChunkStore
from .host_kernel import MAX_QUERIES, HostKernel
from .masks import SeenTokens
from .merging import merged_in_place
from .segment import Queries


def is_later_chunk(chunk: ChunkStore, query_length: int) -> bool:
    """Return whether so many queries are those of the tokens of the chunk, and there are tokens before it."""
    return 0 < chunk.tokens_before == chunk.num_tokens - query_length and query_length > MAX_QUERIES


def attend_to_later_chunk(
    queries: Queries, mask: torch.Tensor | None, chunk: ChunkStore, kernel: HostKernel
) -> torch.Tensor:
    """
    Attend to sinks and quantized blocks in the layer's store, and to the tokens after them in the chunk.

    Args:
        queries: of the chunk's tokens.
        mask: see `AttentionSegment`, of all tokens.
        chunk: see `is_later_chunk`.
        kernel: attends to both.

    Returns:
        `[batch, query_heads, query_length, value_dim]`, of the query's type.
    """
    ends = np.array(chunk.quantized_ends)[:, None]
    seen = kernel.seen.of(mask)
    ranges = np.array([[[[0, chunk.num_tokens]]]]) if seen.ranges is None else seen.ranges
    in_codes = seen._replace(ranges=np.minimum(ranges, ends, order="C"))
    in_chunk = SeenTokens(
        np.maximum(ranges, ends, order="C") - chunk.first,
        _from(chunk.first, seen.visible),
        _from(chunk.first, seen.bias),
    )
    partial = kernel.attend_many(queries, chunk.stored, in_codes, torch.float32)
    others = kernel.attend_many(queries, chunk, in_chunk, torch.float32)
    return merged_in_place(partial, others).to(queries.states.dtype)


def _from(first: int, of_mask: np.ndarray | None) -> np.ndarray | None:
    """Return the part of a mask for the tokens from `first` on."""
    return None if of_mask is None else np.ascontiguousarray(of_mask[..., first:])
