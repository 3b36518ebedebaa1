"""Digests of plain values."""

import hashlib
import json
from typing import Any

DIGEST_BYTES = 32


def canonical(tree: Any) -> bytes:
    """Encode plain values as JSON, the same for equal ones in any process."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def digest_of(data: bytes) -> str:
    """Return the BLAKE2b digest as 64 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
