"""Storage of keys and values: growing buffers, device staging, streams and events. It knows torch and nothing above."""

from .buffers.block_buffer import kernel_array, kernel_element
from .buffers.packed_buffer import PackedBuffer
from .buffers.token_buffer import TokenBuffer
from .chunk_store import ChunkStore
from .codec import Allowance, Codec, CodecChoice, KVCodec, SeenQueries
from .kv_store import KVShape, KVStore, Pair
from .layer_reading import block_keys, middle_in_pieces
from .layout import Layout
from .memory.address_space import huge_page_memory
from .memory.file_pages import give_back_file_pages
from .memory.growth import GRANULE, InitialCapacity, grown_capacity
from .memory.host_memory import ExpectedLength, HostBudget, HostMemoryError, available_host_bytes, require_host_bytes
from .memory.memory_limits import address_space_is_limited
from .memory.page_lock import can_page_lock
from .part import Part
from .quantized_segment import QuantizedSegment
from .recent_states import RecentStates
from .runs.host_blocks import HostBlocks
from .runs.resident import Resident
from .runs.run import Run
from .runs.streamed import Streamed
from .scratch import Scratch
from .shard import Shard
from .sharded_store import MARK_SIZE, ShardedStore
from .shared_prefix import AnyStore, SharedPrefix
from .store import Store
from .streaming.cpu_fraction import LEAST_CPU_FRACTION, CpuFraction
from .streaming.staging import Staging
from .streaming.stats import CacheStats, Decision
from .streaming.streams import Issued, Streams, is_accelerator, streams_for

__all__ = [
    "GRANULE",
    "LEAST_CPU_FRACTION",
    "MARK_SIZE",
    "Allowance",
    "AnyStore",
    "CacheStats",
    "ChunkStore",
    "Codec",
    "CodecChoice",
    "CpuFraction",
    "Decision",
    "ExpectedLength",
    "HostBlocks",
    "HostBudget",
    "HostMemoryError",
    "InitialCapacity",
    "Issued",
    "KVCodec",
    "KVShape",
    "KVStore",
    "Layout",
    "PackedBuffer",
    "Pair",
    "Part",
    "QuantizedSegment",
    "RecentStates",
    "Resident",
    "Run",
    "Scratch",
    "SeenQueries",
    "Shard",
    "ShardedStore",
    "SharedPrefix",
    "Staging",
    "Store",
    "Streamed",
    "Streams",
    "TokenBuffer",
    "address_space_is_limited",
    "available_host_bytes",
    "block_keys",
    "can_page_lock",
    "give_back_file_pages",
    "grown_capacity",
    "huge_page_memory",
    "is_accelerator",
    "kernel_array",
    "kernel_element",
    "middle_in_pieces",
    "require_host_bytes",
    "streams_for",
]
