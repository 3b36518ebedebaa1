"""Errors of groups of processes that run one model."""

from ..errors import HybridCacheError


class LostProcessError(HybridCacheError, RuntimeError):
    """Another process of the group has ended, or does not answer; the message names its rank."""


class OutOfStepError(HybridCacheError, RuntimeError):
    """The processes of the group compute different things; the message says where they differ."""
