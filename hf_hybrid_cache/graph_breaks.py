"""Functions that `torch.compile` does not trace: it compiles the model around them."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler_of_frames
    from torch._dynamo.eval_frame import skip_code

    _KNOWS_COMPILED = True
except ImportError:  # neither is a promise of torch
    _KNOWS_COMPILED = False

_REASON = "keys, values and weights in host memory are used outside of compiled graphs; compile without fullgraph=True"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_of_graphs(function: _Function) -> _Function:
    """
    Decorate a function that compiled models call outside of their graphs.

    `torch.compiler.disable` does that, and takes as long as a small operation even where nothing is compiled. So its
    wrapper is called in compiled models alone.
    """
    disabled = torch.compiler.disable(function, reason=_REASON)
    if not _KNOWS_COMPILED:
        return cast(_Function, disabled)

    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if compiler_of_frames() is None else disabled)(*args, **kwargs)

    skip_code(called.__code__)
    # With the marks of the wrapper, by which the compiler ends a graph.
    return cast(_Function, wraps(disabled)(called))
