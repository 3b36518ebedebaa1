"""Files that the system writes and reads in parts."""

import io
from pathlib import Path

import pytest

from hf_hybrid_cache.prefix_folder import files


class InParts(io.FileIO):
    """Takes and gives up to three bytes at a time, as the system may."""

    def write(self, data: object) -> int:
        return super().write(memoryview(data)[:3])  # type: ignore[call-overload]

    def read(self, size: int | None = -1) -> bytes:
        return super().read(3 if size is None or size < 0 else min(3, size))


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 10, 100])
def test_data_when_taken_in_parts_then_is_all_there(num_bytes: int, tmp_path: Path):
    data = bytes(range(50))
    with InParts(tmp_path / "file", "xb+") as file:
        files.write_all(file, data)  # type: ignore[arg-type]
        file.seek(0)
        assert files.read_all(file, num_bytes) == data[:num_bytes]  # type: ignore[arg-type]
    assert (tmp_path / "file").read_bytes() == data
