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
    from .codecs import minmax, quanto
    from .decode_phase import DecodeOnCPU, decode_on_cpu
    from .kernels import (
        KernelsDisabledError,
        get_num_threads,
        set_integer_kernels,
        set_num_threads,
        uses_integer_kernels,
    )
    from .layers import DeviceMemoryError, IncompleteCacheError, Placement, Selection
    from .processes import LostProcessError, OutOfStepError
    from .prompt_reading import prefill
    from .saving import CacheFileError, saved_token_ids
    from .storage import CacheStats, Decision, HostMemoryError, KVCodec
    from .weights import (
        CodedWeightsConfig,
        ExpertsReport,
        WeightsReport,
        host_experts,
        move_experts_to_host,
        quantize_weights,
        weights_in_bits,
    )

__all__ = [
    "CacheFileError",
    "CacheStats",
    "CodedWeightsConfig",
    "Decision",
    "DecodeOnCPU",
    "DeviceMemoryError",
    "DynamicHybridCache",
    "ExpertsReport",
    "HostMemoryError",
    "HybridCache",
    "IncompleteCacheError",
    "KVCodec",
    "KernelsDisabledError",
    "LostProcessError",
    "MemoryReport",
    "OffloadedHybridCache",
    "OutOfStepError",
    "Placement",
    "QuantizedHybridCache",
    "SameLogits",
    "Selection",
    "StaleHandleError",
    "WeightsReport",
    "__version__",
    "decode_on_cpu",
    "get_num_threads",
    "host_experts",
    "minmax",
    "move_experts_to_host",
    "prefill",
    "quantize_weights",
    "quanto",
    "saved_token_ids",
    "set_integer_kernels",
    "set_num_threads",
    "uses_integer_kernels",
    "weights_in_bits",
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
        "codecs": ("minmax", "quanto"),
        "decode_phase": ("DecodeOnCPU", "decode_on_cpu"),
        "kernels": (
            "KernelsDisabledError",
            "get_num_threads",
            "set_integer_kernels",
            "set_num_threads",
            "uses_integer_kernels",
        ),
        "layers": ("DeviceMemoryError", "IncompleteCacheError", "Placement", "Selection"),
        "processes": ("LostProcessError", "OutOfStepError"),
        "prompt_reading": ("prefill",),
        "saving": ("CacheFileError", "saved_token_ids"),
        "storage": ("CacheStats", "Decision", "HostMemoryError", "KVCodec"),
        "weights": (
            "CodedWeightsConfig",
            "ExpertsReport",
            "WeightsReport",
            "host_experts",
            "move_experts_to_host",
            "quantize_weights",
            "weights_in_bits",
        ),
    },
)


def __dir__() -> list[str]:
    return list(__all__)
