"""KV caches for Hugging Face transformers that keep long contexts in host memory."""

from typing import TYPE_CHECKING

from .lazy_names import lazy_names

if TYPE_CHECKING:
    from ._version import __version__ as __version__
    from .attention import StaleHandleError as StaleHandleError
    from .cache import DynamicHybridCache as DynamicHybridCache
    from .cache import HybridCache as HybridCache
    from .cache import MemoryReport as MemoryReport
    from .cache import OffloadedHybridCache as OffloadedHybridCache
    from .cache import QuantizedHybridCache as QuantizedHybridCache
    from .cache import SameLogits as SameLogits
    from .chat import Answer as Answer
    from .chat import AnswerSettings as AnswerSettings
    from .chat import Chat as Chat
    from .codecs import minmax as minmax
    from .codecs import quanto as quanto
    from .decode_phase import DecodeOnCPU as DecodeOnCPU
    from .decode_step import FusedDecode as FusedDecode
    from .decode_step import UnknownStepError as UnknownStepError
    from .decode_step import fuse_decode as fuse_decode
    from .drafts import PromptLookup as PromptLookup
    from .errors import HybridCacheError as HybridCacheError
    from .files import CacheFileError as CacheFileError
    from .files import saved_token_ids as saved_token_ids
    from .kernels import KernelsDisabledError as KernelsDisabledError
    from .kernels import get_num_threads as get_num_threads
    from .kernels import set_num_threads as set_num_threads
    from .layers import DeviceMemoryError as DeviceMemoryError
    from .layers import IncompleteCacheError as IncompleteCacheError
    from .layers import NoCheckpointError as NoCheckpointError
    from .layers import Placement as Placement
    from .planning import cache_for_budget as cache_for_budget
    from .prefix_store import PrefixStore as PrefixStore
    from .prefix_store import PrefixStoreError as PrefixStoreError
    from .prefix_store import PrefixStoreFolderError as PrefixStoreFolderError
    from .prefix_store import Reuse as Reuse
    from .prefix_store import StoredPrompt as StoredPrompt
    from .processes import LostProcessError as LostProcessError
    from .processes import OutOfStepError as OutOfStepError
    from .prompt_reading import prefill as prefill
    from .storage import CacheStats as CacheStats
    from .storage import Decision as Decision
    from .storage import HostMemoryError as HostMemoryError
    from .storage import KVCodec as KVCodec
    from .system.numa_nodes import NodeError as NodeError
    from .system.numa_nodes import bind_to_node as bind_to_node
    from .weights import QuantizedWeightsConfig as QuantizedWeightsConfig
    from .weights import WeightsReport as WeightsReport
    from .weights import move_experts_to_host as move_experts_to_host
    from .weights import quantize_weights as quantize_weights

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "_version": ("__version__",),
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
        "drafts": ("PromptLookup",),
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
    return __all__
