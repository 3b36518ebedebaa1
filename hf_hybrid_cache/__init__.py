"""KV caches for Hugging Face transformers that keep long contexts in host memory."""

from typing import TYPE_CHECKING

from ._version import __version__
from .lazy_names import lazy_names

if TYPE_CHECKING:
    from .attention import StaleHandleError
    from .cache import (
        DynamicHybridCache,
        HybridCache,
        MemoryReport,
        OffloadedHybridCache,
        QuantizedHybridCache,
        SameLogits,
    )
    from .chat import Answer, AnswerSettings, Chat
    from .codecs import minmax, quanto
    from .decode_phase import DecodeOnCPU
    from .decode_step import FusedDecode, UnknownStepError, fuse_decode
    from .errors import HybridCacheError
    from .files import CacheFileError, saved_token_ids
    from .kernels import KernelsDisabledError, get_num_threads, set_num_threads
    from .layers import DeviceMemoryError, IncompleteCacheError, NoCheckpointError, Placement
    from .planning import cache_for_budget
    from .prefix_store import PrefixStore, PrefixStoreError, PrefixStoreFolderError, Reuse, StoredPrompt
    from .processes import LostProcessError, OutOfStepError
    from .prompt_reading import prefill
    from .storage import CacheStats, Decision, HostMemoryError, KVCodec
    from .system.numa_nodes import NodeError, bind_to_node
    from .weights import (
        QuantizedWeightsConfig,
        WeightsReport,
        move_experts_to_host,
        quantize_weights,
    )

__all__ = [
    "Answer",
    "AnswerSettings",
    "CacheFileError",
    "CacheStats",
    "Chat",
    "Decision",
    "DecodeOnCPU",
    "DeviceMemoryError",
    "DynamicHybridCache",
    "FusedDecode",
    "HostMemoryError",
    "HybridCache",
    "HybridCacheError",
    "IncompleteCacheError",
    "KVCodec",
    "KernelsDisabledError",
    "LostProcessError",
    "MemoryReport",
    "NoCheckpointError",
    "NodeError",
    "OffloadedHybridCache",
    "OutOfStepError",
    "Placement",
    "PrefixStore",
    "PrefixStoreError",
    "PrefixStoreFolderError",
    "QuantizedHybridCache",
    "QuantizedWeightsConfig",
    "Reuse",
    "SameLogits",
    "StaleHandleError",
    "StoredPrompt",
    "UnknownStepError",
    "WeightsReport",
    "__version__",
    "bind_to_node",
    "cache_for_budget",
    "fuse_decode",
    "get_num_threads",
    "minmax",
    "move_experts_to_host",
    "prefill",
    "quantize_weights",
    "quanto",
    "saved_token_ids",
    "set_num_threads",
]

__getattr__ = lazy_names(
    __name__,
    {
        "attention": ("StaleHandleError",),
        "cache": (
            "DynamicHybridCache",
            "HybridCache",
            "MemoryReport",
            "OffloadedHybridCache",
            "QuantizedHybridCache",
            "SameLogits",
        ),
        "chat": ("Answer", "AnswerSettings", "Chat"),
        "codecs": ("minmax", "quanto"),
        "decode_phase": ("DecodeOnCPU",),
        "decode_step": ("FusedDecode", "UnknownStepError", "fuse_decode"),
        "errors": ("HybridCacheError",),
        "kernels": ("KernelsDisabledError", "get_num_threads", "set_num_threads"),
        "layers": ("DeviceMemoryError", "IncompleteCacheError", "NoCheckpointError", "Placement"),
        "system.numa_nodes": ("NodeError", "bind_to_node"),
        "planning": ("cache_for_budget",),
        "prefix_store": ("PrefixStore", "PrefixStoreError", "PrefixStoreFolderError", "Reuse", "StoredPrompt"),
        "processes": ("LostProcessError", "OutOfStepError"),
        "prompt_reading": ("prefill",),
        "files": ("CacheFileError", "saved_token_ids"),
        "storage": ("CacheStats", "Decision", "HostMemoryError", "KVCodec"),
        "weights": (
            "QuantizedWeightsConfig",
            "WeightsReport",
            "move_experts_to_host",
            "quantize_weights",
        ),
    },
)


def __dir__() -> list[str]:
    return list(__all__)
