"""Calls of attention of a few queries, with queries and outputs in memory as torch has them."""

from typing import Any

import numpy as np
import torch

from hf_hybrid_cache.kernels import Query, Workspace


def attend_to(workspace: Workspace, query: np.ndarray, keys: np.ndarray, *arguments: Any, **options: Any) -> np.ndarray:
    """
    Attend with `query`, `[batch, query_heads, query_length, key_dim]`, which is given in bfloat16 if it fits that.

    Heads of a token follow each other in memory, as those of a model do. The output, `[batch, query_heads,
    query_length, value_dim]`, is that in the workspace; what is written elsewhere must be the same, rounded.
    """
    shape = workspace.shape
    given = torch.from_numpy(query.astype(np.float32)).transpose(1, 2).contiguous().transpose(1, 2)
    if torch.equal(given, given.bfloat16().float()):
        given = given.bfloat16()
    written = torch.empty(*given.shape[:3], shape.value_dim, dtype=given.dtype)
    at = Query(given.data_ptr(), given.stride()[:3], given.dtype == torch.bfloat16)
    workspace.attend(at, keys, *arguments, written=written.data_ptr(), **options)
    out = workspace.out[:, : shape.rows, : shape.value_dim].reshape(written.shape)
    torch.testing.assert_close(written, torch.from_numpy(out).to(written.dtype), rtol=0, atol=0, equal_nan=True)
    return out
