"""Storage of keys and values: growing buffers, device staging, streams and events. It knows torch and nothing above."""

from .address_space import huge_page_memory
from .block_buffer import kernel_array, kernel_element
from .buffered_store import BufferedStore, LocalStore, WholePart
from .chunk_store import ChunkStore
from .codec import Allowance, Codec, CodecChoice, KVCodec
from .cpu_fraction import LEAST_CPU_FRACTION, CpuFraction
from .file_pages import give_back_file_pages
from .growth import GRANULE, InitialCapacity, grown_capacity
from .host_memory import ExpectedLength, HostBudget, HostMemoryError, available_host_bytes, require_host_bytes
from .host_store import HostStore
from .kv_store import KVShape, KVStore, Pair
from .layout import Layout
from .memory_limits import address_space_is_limited
from .packed_buffer import PackedBuffer
from .page_lock import can_page_lock
from .quantized_shard import QuantizedShard
from .quantized_store import QuantizedStore
from .resident_store import ResidentStore
from .scratch import Scratch
from .shard import Shard
from .sharded_store import MARK_SIZE, ShardedStore
from .shared_prefix_store import SharedPrefixStore
from .split_store import SplitStore
from .staging import Staging
from .stats import CacheStats, Decision
from .streamed_store import StreamedStore
from .streams import Issued, Streams, is_accelerator, streams_for
from .token_buffer import TokenBuffer

__all__ = [
    "GRANULE",
    "LEAST_CPU_FRACTION",
    "MARK_SIZE",
    "Allowance",
    "BufferedStore",
    "CacheStats",
    "ChunkStore",
    "Codec",
    "CodecChoice",
    "CpuFraction",
    "Decision",
    "ExpectedLength",
    "HostBudget",
    "HostMemoryError",
    "HostStore",
    "InitialCapacity",
    "Issued",
    "KVCodec",
    "KVShape",
    "KVStore",
    "Layout",
    "LocalStore",
    "PackedBuffer",
    "Pair",
    "QuantizedShard",
    "QuantizedStore",
    "ResidentStore",
    "Scratch",
    "Shard",
    "ShardedStore",
    "SharedPrefixStore",
    "SplitStore",
    "Staging",
    "StreamedStore",
    "Streams",
    "TokenBuffer",
    "WholePart",
    "address_space_is_limited",
    "available_host_bytes",
    "can_page_lock",
    "give_back_file_pages",
    "grown_capacity",
    "huge_page_memory",
    "is_accelerator",
    "kernel_array",
    "kernel_element",
    "require_host_bytes",
    "streams_for",
]
