"""Where keys and values live: growing buffers, device staging, streams and events. Knows torch and nothing above it."""

from .growth import Room
from .host_memory import HostBudget, HostMemoryError, require_host_bytes
from .host_store import HostStore
from .kv_store import KVShape, KVStore
from .resident_store import ResidentStore
from .staging import Staging
from .stats import CacheStats
from .streamed_store import StreamedStore
from .streams import Streams, streams_for

__all__ = [
    "CacheStats",
    "HostBudget",
    "HostMemoryError",
    "HostStore",
    "KVShape",
    "KVStore",
    "ResidentStore",
    "Room",
    "Staging",
    "StreamedStore",
    "Streams",
    "require_host_bytes",
    "streams_for",
]
