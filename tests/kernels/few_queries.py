"""Calls of attention of a few queries, with queries and outputs in memory as torch has them."""

from typing import Any

import numpy as np
import torch

from hf_hybrid_cache.kernels import Strided, Workspace


def strided(states: torch.Tensor) -> Strided:
    sequence, head, token = (stride * states.element_size() for stride in states.stride()[:3])
    return Strided(states.data_ptr(), sequence, head, token, states.dtype == torch.bfloat16)


def attend_to(workspace: Workspace, query: np.ndarray, *arguments: Any, **options: Any) -> np.ndarray:
    """
    Attend with `query`, `[batch, query_heads, query_length, key_dim]`, which is given in bfloat16 if it fits that.

    Heads of a token follow each other in memory, as those of a model do. The output, `[batch, query_heads,
    query_length, value_dim]`, is that in the workspace; what is written elsewhere must be the same, rounded.
    """
    given = torch.from_numpy(query.astype(np.float32)).transpose(1, 2).contiguous().transpose(1, 2)
    if torch.equal(given, given.bfloat16().float()):
        given = given.bfloat16()
    workspace.attend(strided(given), *arguments, **options)
    written = torch.empty(*given.shape[:3], workspace.shape.value_dim, dtype=given.dtype)
    workspace.attend(strided(given), *arguments, **options, out=strided(written))
    expected = torch.from_numpy(workspace.out).to(written.dtype)
    torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)
    return workspace.out.copy()
