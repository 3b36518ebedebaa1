"""A parameter that stays in host memory when its model is moved to a device."""

from typing import Any

import torch
from torch import nn

from .hot_experts import HotExperts


class HostWeight(nn.Parameter):
    """
    A parameter that stays in host memory while the rest of its model is on a device.

    `model.to(device)` leaves it there; `model.to(dtype)` converts it. `weight.detach().to(device)` gives a copy on a
    device.

    Attributes:
        hot: the hot experts of its layer on the device; `None` if none are kept there.
    """

    hot: HotExperts | None = None

    @staticmethod
    def of(weight: torch.Tensor) -> "HostWeight":
        """A parameter with the same numbers in host memory, without gradient."""
        data: HostWeight = torch.Tensor._make_subclass(HostWeight, weight.detach().to("cpu"), False)
        return data

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostWeight":
        twin = HostWeight.of(self.detach().clone())
        twin.hot = None if self.hot is None else HotExperts(self.hot.room)
        memo[id(self)] = twin
        return twin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MOVES and isinstance(args[0], HostWeight):
            dtype = asked_dtype(func, args[1:], kwargs)
            if dtype in (None, args[0].dtype):
                return args[0]
            func, args, kwargs = torch.Tensor.to, (args[0], dtype), {}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


# The methods of parameters that a model calls when it is moved.
MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}


def asked_dtype(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype in a call of one of `MOVES`; `None` if there is none."""
    if func is not torch.Tensor.to:
        return None
    dtype: torch.dtype | None = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})[1]
    return dtype
