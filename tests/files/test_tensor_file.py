"""Files of tensors are written as a stream, read without torch, and refused where a byte of them is another one."""

import subprocess
import sys
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
}
DATA = {name: np.random.default_rng(0).bytes(form.num_bytes) for name, form in FORMS.items()}


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


@pytest.mark.parametrize("alignment", [64, 4096])
def test_tensors_are_read_as_written_each_at_its_border(alignment: int, tmp_path: Path):
    written(tmp_path / "file", alignment)
    assert read(tmp_path / "file") == {**DATA, "b": b"xy"}
    with opened(tmp_path / "file") as file:
        assert file.metadata["what"] == "a test"
        assert {name: each.form for name, each in file.tensors("a").items()} == FORMS
        assert all(file.place_of(each) % alignment == 0 for each in file.tensors("a").values())
    of_safetensors = load_file(tmp_path / "file")
    assert of_safetensors["a/one"].tobytes() == DATA["a/one"]


def test_rows_that_are_not_kept_and_tensors_without_memory_are_passed_over(tmp_path: Path):
    written(tmp_path / "file")
    kept, others = memoryview(bytearray(20)), memoryview(bytearray(20))
    with opened(tmp_path / "file") as file:
        for verify in (True, False):
            kept[:] = bytes(20)
            rows = [Row(others, False), Row(kept, True), Row(others, False)]
            file.read("a", {"a/one": rows}, verify=verify)
            assert bytes(kept) == DATA["a/one"][20:40]
        file.read("a", {"a/one": memoryview(DATA["a/one"])}, {"a/one"})  # as if it were mapped
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


def test_a_file_when_cut_off_or_longer_is_refused(tmp_path: Path):
    content, path = written(tmp_path / "file"), tmp_path / "file"
    for altered in (
        content[:-1],
        content[: len(content) // 2],
        content[:100],
        content[:7],
        content + b"0",
        (2**60).to_bytes(8, "little") + b"{}",
    ):
        path.write_bytes(altered)
        assert error_of(path).startswith("is cut off, altered, or not a safetensors file (")
    path.write_bytes(b"")
    assert error_of(path) == "is empty."


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path: Path):
    content, path = written(tmp_path / "file"), tmp_path / "file"
    with opened(path) as file:
        path.write_bytes(content[:4100])
        with pytest.raises(CacheFileError, match="became shorter"):
            file.read("b", {})


TENSOR = '"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "\ud800",
        f"{{{TENSOR}, {TENSOR}}}",
        '{"a": NaN}',
        "[" * 100_000,
        '{"a": 1}',
        '{"__metadata__": {"format": 1}}',
        TENSOR.join("{}").replace("[0, 4]", "[-4, 0]"),
        TENSOR.join("{}").replace("[0, 4]", "[0, 3]"),
        TENSOR.join("{}").replace("[4]", f"[{2**62}, {2**62}]"),
        TENSOR.join("{}").replace("[4]", "[4.0]"),
        TENSOR.join("{}").replace("U8", "C64"),
        TENSOR.join("{}").replace("[0, 4]", "[1, 5]"),
        f"{{{TENSOR}, {TENSOR.replace('a', 'b', 1)}}}",
    ],
)
def test_a_hostile_header_is_refused_in_a_sentence(header: str, tmp_path: Path):
    write(tmp_path / "file", header.encode(errors="surrogatepass"), b"1234" + bytes(4))
    assert "\n" not in error_of(tmp_path / "file")


TAIL = '"checksum": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
AFTER = TAIL.replace("[0, 4]", "[4, 8]")
OTHER = "is a safetensors file, but not of a cache."


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (f"{TENSOR.replace('[4]', f'[0, {2**62}, {2**62}]').replace('[0, 4]', '[0, 0]')}, {TAIL}", "is not the file"),
        (f"{TENSOR.replace('[4]', str([0] * 99)).replace('[0, 4]', '[0, 0]')}, {TAIL}", "is not the file"),
        (f"{TAIL}, {TENSOR.replace('[4]', '[0]').replace('[0, 4]', '[4, 4]')}", OTHER),
        (TAIL.replace('U8", "shape": [4]', 'F32", "shape": [1]'), OTHER),
        (f"{TENSOR}, {TENSOR}, {AFTER}", "was altered: a does"),
        (f"{TENSOR.replace('a', 'a/padding.0', 1)}, {AFTER}", "was altered: a does"),
        (f"{TENSOR.replace('a', chr(92) + 'n', 1)}, {AFTER}", "was altered: \N{REPLACEMENT CHARACTER} does"),
        (TAIL.replace("checksum", r"\u001b[31m").replace("[0, 4]", "[1, 5]"), "is cut off, altered, or not"),
        (TAIL.replace("checksum", "a" * 100_000).replace("[0, 4]", "[1, 5]"), "is cut off, altered, or not"),
    ],
)
def test_a_forged_header_is_refused_in_printable_words(header: str, reason: str, tmp_path: Path):
    write(tmp_path / "file", f"{{{header}}}".encode(), (b"1234" if AFTER in header else b"") + bytes(4))
    told = error_of(tmp_path / "file")
    assert told.startswith(reason)
    assert told.isprintable()
    assert len(told) <= 2000


def test_a_tensor_whose_name_begins_like_padding_is_none(tmp_path: Path):
    form = TensorForm("uint8", (2,))
    new = NewFile({}, [Section("a", {"a/padding.x": form, "a/y": form}, lambda: [[b"12"], [b"34"]])])
    with (tmp_path / "file").open("wb") as file:
        new.write(file)
    assert read(tmp_path / "file") == {"a/padding.x": b"12", "a/y": b"34"}


def test_a_file_that_grows_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content, path = written(tmp_path / "file"), tmp_path / "file"
    path.write_bytes(content[:10])

    def grown(*arguments: str) -> object:
        path.write_bytes(content)
        return safe_open(*arguments)

    monkeypatch.setattr(tensor_file, "safe_open", grown)
    assert error_of(path) == "was altered while it was opened."


def test_a_length_beyond_the_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    assert error_of(tmp_path / "file").startswith("is cut off, altered, or not a safetensors file (")


def test_files_of_other_tensors_are_named_as_such(tmp_path: Path):
    save_file({"weight": np.ones(3)}, tmp_path / "weights")
    assert error_of(tmp_path / "weights") == "is a safetensors file, but not of a cache."
    write(tmp_path / "complex", {"weight": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8))
    assert "C64" in error_of(tmp_path / "complex")


def test_types_without_a_name_in_a_file_are_refused():
    with pytest.raises(ValueError, match="complex64 cannot be saved; only float64, "):
        tensor_file.dtype_name(np.dtype(np.complex64))
    assert TensorForm(tensor_file.dtype_name(np.dtype(np.int16)), (2, 3)).num_bytes == 2 * 3 * 2


def test_files_are_read_without_torch(tmp_path: Path):
    written(tmp_path / "file")
    program = """
import sys
from hf_hybrid_cache.files.tensor_file import TensorFile
with TensorFile(sys.argv[1], open(sys.argv[1], "rb", buffering=0)) as file:
    file.read("a", {})
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "file")], check=True, timeout=300)
