"""Storage of keys and values: growing buffers, device staging, streams and events. It knows torch and nothing above."""

from .codec import Allowance, Codec, CodecChoice, KVCodec, SeenQueries
from .cpu_fraction import CpuFraction
from .kv_shape import KVShape, Pair, kernel_element
from .layout import Layout, Shard, Split
from .memory.address_space import give_back_file_pages, huge_page_memory
from .memory.buffer_memory import StorageUses
from .memory.growth import GRANULE, InitialCapacity, grown_capacity
from .memory.host_memory import (
    HostBudget,
    HostMemoryError,
    available_host_bytes,
    require_host_bytes,
)
from .memory.page_lock import can_page_lock
from .runs.block_buffer import kernel_array
from .runs.run import HostBlocks, Resident, Run
from .runs.streamed import Staging, Streamed
from .runs.streams import Issued, Streams, streams_for
from .runs.token_buffer import TokenBuffer
from .scratch import Scratch
from .segments import Segment
from .sharded_store import MARK_SIZE, ShardedStore
from .shared_prefix import AnyStore, OneSequence, SharedPrefix
from .split_store import SplitStore
from .stats import CacheStats, Decision
from .store import Store
from .token_store import RecentStates, TokenStore
from .window_store import WindowStore

__all__ = [
    "GRANULE",
    "MARK_SIZE",
    "Allowance",
    "AnyStore",
    "CacheStats",
    "Codec",
    "CodecChoice",
    "CpuFraction",
    "Decision",
    "HostBlocks",
    "HostBudget",
    "HostMemoryError",
    "InitialCapacity",
    "Issued",
    "KVCodec",
    "KVShape",
    "Layout",
    "OneSequence",
    "Pair",
    "RecentStates",
    "Resident",
    "Run",
    "Scratch",
    "SeenQueries",
    "Segment",
    "Shard",
    "ShardedStore",
    "SharedPrefix",
    "Split",
    "SplitStore",
    "Staging",
    "StorageUses",
    "Store",
    "Streamed",
    "Streams",
    "TokenBuffer",
    "TokenStore",
    "WindowStore",
    "available_host_bytes",
    "can_page_lock",
    "give_back_file_pages",
    "grown_capacity",
    "huge_page_memory",
    "kernel_array",
    "kernel_element",
    "require_host_bytes",
    "streams_for",
]
