"""Storage of keys and values: growing buffers, device staging, streams and events. It knows torch and nothing above."""

from .address_space import huge_page_memory
from .block_buffer import kernel_array, kernel_element
from .block_segment import BlockSegment
from .chunk_store import ChunkStore
from .codec import Allowance, Codec, CodecChoice, KVCodec
from .cpu_fraction import LEAST_CPU_FRACTION, CpuFraction
from .file_pages import give_back_file_pages
from .growth import GRANULE, InitialCapacity, grown_capacity
from .host_memory import ExpectedLength, HostBudget, HostMemoryError, available_host_bytes, require_host_bytes
from .kv_store import KVShape, KVStore, Pair
from .layer_reading import block_keys, middle_in_pieces
from .layer_store import LayerStore
from .layout import Layout
from .memory_limits import address_space_is_limited
from .packed_buffer import PackedBuffer
from .page_lock import can_page_lock
from .part import Part
from .quantized_segment import QuantizedSegment
from .resident_segment import ResidentSegment
from .scratch import Scratch
from .segment import Segment
from .shard import Shard
from .sharded_store import MARK_SIZE, ShardedStore
from .shared_prefix_store import SharedPrefixStore, Store
from .staging import Staging
from .stats import CacheStats, Decision
from .streamed_segment import StreamedSegment
from .streams import Issued, Streams, is_accelerator, streams_for
from .token_buffer import TokenBuffer

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
    "ResidentSegment",
    "Scratch",
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
