"""Files of tensors with other headers, whose checksums fit."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

LENGTH_BYTES = 8


def parts_of(path: Path) -> tuple[Any, bytes]:
    """Return the header of a file as JSON has it, and the data after it."""
    content = path.read_bytes()
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    return json.loads(content[LENGTH_BYTES:end]), content[end:]


def write(path: Path, header: Any, data: bytes, hole: int = 0) -> None:
    """
    Write a file whose header has a checksum that fits.

    Args:
        path: of the file.
        header: as JSON has it, or as bytes.
        data: after the header; the last four bytes make room for the checksum.
        hole: number of bytes before the checksum that take no room on the disk.
    """
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = len(text).to_bytes(LENGTH_BYTES, "little") + text
    with path.open("wb") as file:
        file.write(start + data[:-4])
        file.seek(hole, os.SEEK_CUR)
        file.write(zlib.crc32(start).to_bytes(4, "little"))
