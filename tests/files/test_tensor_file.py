"""Files of tensors are written as a stream, read without torch, and refused where a byte of them is another one."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from files.forged import write
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hf_hybrid_cache.files import tensor_file
from hf_hybrid_cache.files.tensor_file import CacheFileError, NewFile, Row, Section, TensorFile, TensorForm

FORMS = {
    "a/one": TensorForm("float32", (3, 5)),
    "a/two": TensorForm("uint8", (7,)),
    "a/none": TensorForm("int64", (0,)),
    "a/padding.x": TensorForm("uint8", (2,)),  # begins like what fills the room between tensors
}
DATA = {name: np.random.default_rng(0).bytes(form.num_bytes) for name, form in FORMS.items()}


NO_FILE = "is cut off, altered, or not a safetensors file ("
OTHER = "is a safetensors file, but not of a cache."


def written(path: Path, alignment: int = 4096) -> bytes:
    """Write a file of two sections, and return its content."""
    sections = [
        Section("a", FORMS, lambda: ([data[:3], data[3:]] for data in DATA.values())),
        Section("b", {"b": TensorForm("uint8", (2,))}, lambda: [[b"xy"]]),
    ]
    new = NewFile({"what": "a test"}, sections, alignment)
    with path.open("wb") as file:
        new.write(file)
    assert path.stat().st_size == new.num_bytes
    return path.read_bytes()


def opened(path: Path) -> TensorFile:
    return TensorFile(path, path.open("rb", buffering=0))


def read(path: Path) -> dict[str, bytes]:
    """Return all tensors of a file."""
    found = {}
    with opened(path) as file:
        for section in file.sections:
            targets = {name: memoryview(bytearray(each.form.num_bytes)) for name, each in file.tensors(section).items()}
            file.read(section, targets)
            found |= {name: bytes(target) for name, target in targets.items()}
    return found


def error_of(path: Path) -> str:
    with pytest.raises(CacheFileError) as raised:
        read(path)
    assert str(raised.value) == f"{path} {raised.value.reason}"
    return raised.value.reason


def test_tensors_are_read_as_written_each_at_its_border(tmp_path: Path):
    for alignment in (64, 4096):
        written(tmp_path / "file", alignment)
        assert read(tmp_path / "file") == {**DATA, "b": b"xy"}
        with opened(tmp_path / "file") as file:
            assert file.metadata["what"] == "a test"
            assert {name: each.form for name, each in file.tensors("a").items()} == FORMS
            assert all(file.place_of(each) % alignment == 0 for each in file.tensors("a").values())
    assert load_file(tmp_path / "file")["a/one"].tobytes() == DATA["a/one"]
    # Rows that are not kept, and tensors without memory, are passed over.
    kept, others = memoryview(bytearray(20)), memoryview(bytearray(20))
    with opened(tmp_path / "file") as file:
        for verify in (True, False):
            kept[:] = bytes(20)
            rows = [Row(others, False), Row(kept, True), Row(others, False)]
            file.read("a", {"a/one": rows}, verify=verify)
            assert bytes(kept) == DATA["a/one"][20:40]
        file.read("a", {})  # as of tensors that are mapped
        file.read("no such section", {})


def test_each_altered_byte_is_found(tmp_path: Path):
    content, path = written(tmp_path / "file", alignment=64), tmp_path / "file"
    header = int.from_bytes(content[:8], "little")
    for position in (*range(0, 8 + header, 97), *range(8 + header, len(content))):
        altered = bytearray(content)
        altered[position] ^= 16
        path.write_bytes(altered)
        assert error_of(path)
    path.write_bytes(content)
    read(path)


def test_a_file_when_cut_off_longer_or_of_others_is_refused(tmp_path: Path):
    content, path = written(tmp_path / "file"), tmp_path / "file"
    shorter = (content[:-1], content[: len(content) // 2], content[:100], content[:7])
    for altered in (*shorter, content + b"0", (2**60).to_bytes(8, "little") + b"{}"):
        path.write_bytes(altered)
        assert error_of(path).startswith(NO_FILE)
    path.write_bytes(b"")
    assert error_of(path) == "is empty."
    save_file({"weight": np.ones(3)}, path)
    assert error_of(path) == OTHER


def entry(name: str = "a", dtype: str = "U8", shape: Sequence[float] = (4,), start: int = 0, end: int = 4) -> str:
    return f'"{name}": {{"dtype": "{dtype}", "shape": {json.dumps(shape)}, "data_offsets": [{start}, {end}]}}'


TENSOR, EMPTY = entry(), entry(shape=[0], start=4, end=4)
CHECKSUM = entry("checksum")
AFTER = entry("checksum", start=4, end=8)
WRONG = "is not the file"
ALTERED = "was altered: "
# Headers with checksums that fit, and what is said of them; data of four bytes is before the checksum if it is `AFTER`.
HEADERS = {
    "surrogate": ("\ud800", NO_FILE),
    "deep": ("[" * 100_000, NO_FILE),
    "metadata of numbers": ('{"__metadata__": {"format": 1}}', NO_FILE),
    "overflow": (f"{{{entry(shape=[2**62, 2**62])}}}", NO_FILE),
    "gap": (f"{{{entry(start=1, end=5)}}}", NO_FILE),
    "shared bytes": (f"{{{TENSOR}, {entry('b')}}}", NO_FILE),
    "complex": (f"{{{entry(dtype='C64', shape=[1], end=8)}}}", "C64"),
    "twice": (f"{{{TENSOR}, {TENSOR}, {AFTER}}}", ALTERED + "a does"),
    "huge and empty": (f"{{{entry(shape=[0, 2**62, 2**62], end=0)}, {CHECKSUM}}}", WRONG),
    "too many sizes": (f"{{{entry(shape=[0] * 99, end=0)}, {CHECKSUM}}}", WRONG),
    "checksum first": (f"{{{CHECKSUM}, {EMPTY}}}", OTHER),
    "padding": (f"{{{entry('a/padding.0')}, {AFTER}}}", ALTERED + "a does"),
    "line end": (f"{{{entry(chr(92) + 'n')}, {AFTER}}}", ALTERED + "\N{REPLACEMENT CHARACTER} does"),
    "escapes": (f"{{{entry(chr(92) + 'u001b[31m', start=1, end=5)}}}", NO_FILE),
    "long": (f"{{{entry('a' * 100_000, start=1, end=5)}}}", NO_FILE),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_forged_header_is_refused_in_a_sentence_of_printable_words(name: str, tmp_path: Path):
    header, reason = HEADERS[name]
    data = b"" if CHECKSUM in header or reason == OTHER else b"1234"
    write(tmp_path / "file", header.encode(errors="surrogatepass"), data + bytes(4))
    told = error_of(tmp_path / "file")
    assert reason in told if reason == "C64" else told.startswith(reason)
    assert told.isprintable()
    assert len(told) <= 2000


def test_a_file_that_changes_while_it_is_opened_or_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content, path = written(tmp_path / "file"), tmp_path / "file"
    with opened(path) as file:
        path.write_bytes(content[:4100])
        with pytest.raises(CacheFileError, match="became shorter"):
            file.read("b", {})

    def grown(*arguments: str) -> object:
        path.write_bytes(content)
        return safe_open(*arguments)

    monkeypatch.setattr(tensor_file, "safe_open", grown)
    path.write_bytes(content[:10])
    assert error_of(path) == "was altered while it was opened."


def test_types_without_a_name_in_a_file_are_refused():
    with pytest.raises(ValueError, match="complex64 cannot be saved; only float64, "):
        tensor_file.dtype_name(np.dtype(np.complex64))
    assert TensorForm(tensor_file.dtype_name(np.dtype(np.int16)), (2, 3)).num_bytes == 2 * 3 * 2
