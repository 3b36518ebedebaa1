"""Errors that a layer raises."""

import torch

from ..errors import HybridCacheError


class IncompleteCacheError(HybridCacheError, RuntimeError):
    """The cache is used after a change of it ended half-way; reset it first."""


class DeviceMemoryError(HybridCacheError, torch.OutOfMemoryError):
    """The device has no room for the keys and values of a layer; the message says what to use instead."""


class NoCheckpointError(HybridCacheError, RuntimeError):
    """A cache cannot go back to so many tokens; the message names the checkpoints that there are."""
