"""What a layer raises."""

import torch

from ..errors import HybridCacheError


class IncompleteCacheError(HybridCacheError, RuntimeError):
    """Something ended a change of the cache half-way, and it is used without being reset."""


class DeviceMemoryError(HybridCacheError, torch.OutOfMemoryError):
    """The device has no room for the keys and values of a layer; the message says what to use instead."""
