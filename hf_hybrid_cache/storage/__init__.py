"""Storage of keys and values: growing buffers, device staging, streams and events. It knows torch and nothing above."""

from .buffers.block_buffer import kernel_array, kernel_element
from .buffers.packed_buffer import PackedBuffer
from .buffers.token_buffer import TokenBuffer
from .memory.address_space import huge_page_memory
from .memory.file_pages import give_back_file_pages
from .memory.growth import GRANULE, InitialCapacity, grown_capacity
from .memory.host_memory import ExpectedLength, HostBudget, HostMemoryError, available_host_bytes, require_host_bytes
from .memory.memory_limits import address_space_is_limited
from .memory.page_lock import can_page_lock
from .segments.block_segment import BlockSegment
from .segments.codec import Allowance, Codec, CodecChoice, KVCodec, SeenQueries
from .segments.kv_store import KVShape, KVStore, Pair
from .segments.part import Part
from .segments.quantized_segment import QuantizedSegment
from .segments.resident_segment import ResidentSegment
from .segments.segment import Segment
from .stores.chunk_store import ChunkStore
from .stores.layer_reading import block_keys, middle_in_pieces
from .stores.layer_store import LayerStore
from .stores.layout import Layout
from .stores.recent_states import RecentStates
from .stores.scratch import Scratch
from .stores.shard import Shard
from .stores.sharded_store import MARK_SIZE, ShardedStore
from .stores.shared_prefix_store import SharedPrefixStore, Store
from .streaming.cpu_fraction import LEAST_CPU_FRACTION, CpuFraction
from .streaming.staging import Staging
from .streaming.stats import CacheStats, Decision
from .streaming.streamed_segment import StreamedSegment
from .streaming.streams import Issued, Streams, is_accelerator, streams_for

__all__ = [
    "GRANULE",
    "LEAST_CPU_FRACTION",
    "MARK_SIZE",
    "Allowance",
    "BlockSegment",
    "CacheStats",
    "ChunkStore",
    "Codec",
    "CodecChoice",
    "CpuFraction",
    "Decision",
    "ExpectedLength",
    "HostBudget",
    "HostMemoryError",
    "InitialCapacity",
    "Issued",
    "KVCodec",
    "KVShape",
    "KVStore",
    "LayerStore",
    "Layout",
    "PackedBuffer",
    "Pair",
    "Part",
    "QuantizedSegment",
    "RecentStates",
    "ResidentSegment",
    "Scratch",
    "SeenQueries",
    "Segment",
    "Shard",
    "ShardedStore",
    "SharedPrefixStore",
    "Staging",
    "Store",
    "StreamedSegment",
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
