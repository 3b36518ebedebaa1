"""
The file of tensors, of saved caches and of a prefix store: safetensors with checksums, without torch.

See https://github.com/huggingface/safetensors#format: eight bytes with the length of a header, the header in JSON, and
the tensors one after the other without holes. Tensors are in sections, `SECTION/NAME`; a section of one tensor has its
name alone, and the metadata has the checksum of each. What lies between tensors, so that they can be mapped, is a
tensor of padding. The last tensor is the checksum of all that is before the tensors.

safetensors validates what is read. It is written here, because safetensors takes all tensors at once and puts them in
an order of its own.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, NamedTuple, Self

from safetensors import SafetensorError, safe_open

from ..errors import HybridCacheError

# So that tensors can be mapped.
PAGE_BYTES = 4096
# Pieces of a few hundred KiB stay in the processor's cache while they are summed up and copied.
_PIECE_BYTES = 2**19
_LENGTH_BYTES, _CHECKSUM_BYTES = 8, 4
_HEADER_CHECKSUM = "checksum"
_NO_CHECKSUM = f"{0:08x}"
# Tensors of torch have no more; safetensors takes any sizes beside one of 0.
_MOST_DIMENSIONS, _MOST_NUMBERS = 64, 2**60

# By the names of torch: names in the file, and bytes.
_DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
DTYPE_NAMES = tuple(_DTYPES)
_NAMES = {code: name for name, (code, _) in _DTYPES.items()}


class CacheFileError(HybridCacheError, ValueError):
    """
    A file cannot be written, or is not a whole and unaltered cache for this model; the message says why.

    Attributes:
        reason: what is wrong with the file, after its name.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str):
        # Names in a hostile file may have control characters, and any length.
        self.reason = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in reason[:2000])
        super().__init__(f"{os.fspath(path)} {self.reason}")


class TensorForm(NamedTuple):
    """Type, by torch's name such as "float32", and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype][1]


_CHECKSUM_FORM = TensorForm("uint8", (_CHECKSUM_BYTES,))


class PlacedTensor(NamedTuple):
    """A tensor in a file; `start` is counted from the first byte after the header."""

    name: str
    form: TensorForm
    start: int

    @property
    def end(self) -> int:
        return self.start + self.form.num_bytes

    @property
    def section(self) -> str:
        return self.name.partition("/")[0]

    @property
    def is_padding(self) -> bool:
        return self.name == f"{self.section}/padding.{self.start}"


@dataclass(frozen=True)
class Section:
    """
    Tensors that share a checksum.

    Attributes:
        name: of the section.
        forms: of the tensors, by name.
        data: makes the bytes, in the order of `forms`: of each tensor the pieces that it is put together of.
    """

    name: str
    forms: Mapping[str, TensorForm]
    data: Callable[[], Iterable[Iterable[bytes | memoryview]]]


class Row(NamedTuple):
    """Memory for a row of a tensor, and whether it is kept."""

    data: memoryview
    is_kept: bool


class NewFile:
    """
    A file of tensors that is to be written.

    Args:
        metadata: text by name.
        sections: in the order of the file.
        alignment: at a multiple of which each tensor begins, at most a page.
    """

    def __init__(self, metadata: Mapping[str, str], sections: Sequence[Section], alignment: int = PAGE_BYTES):
        self._metadata, self._sections, self._alignment = dict(metadata), sections, alignment
        self._tensors = tuple(self._placed())
        self._checksums = dict.fromkeys((f"checksum {section.name}" for section in sections), _NO_CHECKSUM)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._header()) + self._tensors[-1].end

    def write(self, file: BinaryIO) -> None:
        """Write all of it into an empty file; the header, with the checksums, comes last."""
        file.seek(len(self._header()))
        for section in self._sections:
            self._checksums[f"checksum {section.name}"] = self._write_section(file, section)
        header = self._header()  # as long as before, because all checksums are
        _write_all(file, _checksum_of(header))
        file.seek(0)
        _write_all(file, header)

    def _placed(self) -> Iterator[PlacedTensor]:
        end = 0
        for section in self._sections:
            for name, form in section.forms.items():
                yield (tensor := PlacedTensor(name, form, end))
                end = tensor.end
                if padding := -end % self._alignment:
                    yield PlacedTensor(f"{section.name}/padding.{end}", TensorForm("uint8", (padding,)), end)
                    end += padding
        yield PlacedTensor(_HEADER_CHECKSUM, _CHECKSUM_FORM, end)

    def _header(self) -> bytes:
        """Return the header with its length, padded so that tensors begin at a page border."""
        tree: dict[str, Any] = {"__metadata__": self._metadata | self._checksums}
        for tensor in self._tensors:
            form, offsets = tensor.form, [tensor.start, tensor.end]
            tree[tensor.name] = {"dtype": _DTYPES[form.dtype][0], "shape": form.shape, "data_offsets": offsets}
        text = json.dumps(tree, allow_nan=False).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % PAGE_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def _write_section(self, file: BinaryIO, section: Section) -> str:
        """
        Write the tensors and their padding; return their checksum.

        CRC-32 finds every change of up to 32 bits in a row, and of others all but one in four billions. It is no help
        against forgery, and two to three times as fast as SHA-256 and BLAKE2.
        """
        checksum = 0
        for form, tensor in zip(section.forms.values(), section.data(), strict=True):
            num_bytes = 0
            padding = bytes(-form.num_bytes % self._alignment)
            for part in chain(tensor, [padding]):
                for piece in _pieces(memoryview(part).cast("B")):
                    checksum = zlib.crc32(piece, checksum)
                    _write_all(file, piece)
                    num_bytes += len(piece)
            assert num_bytes == form.num_bytes + len(padding), (section.name, form, num_bytes)
        return f"{checksum:08x}"


class TensorFile:
    """
    An open file of tensors, whose header is whole and whose size is right. A context manager.

    Args:
        path: of the file.
        file: it, open for reading without a buffer; it is closed with this.

    Attributes:
        path: as given.
        metadata: text by name.
        sections: the tensors of each section in the order of the file, padding included.

    Raises:
        CacheFileError: it is no such file.
    """

    def __init__(self, path: str | os.PathLike[str], file: BinaryIO):
        self.path, self._file = path, file
        try:
            self._read_header()
        except BaseException as error:
            file.close()
            if isinstance(error, OSError):
                raise CacheFileError(path, f"cannot be read: {error.strerror or error}.") from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        """Return the number of the open file."""
        return self._file.fileno()

    def place_of(self, tensor: PlacedTensor) -> int:
        """Return at which byte of the file a tensor begins."""
        return self._data_start + tensor.start

    def tensors(self, section: str) -> dict[str, PlacedTensor]:
        """Return the tensors of a section by name, without padding; none where there is no such section."""
        return {tensor.name: tensor for tensor in self.sections.get(section, ()) if not tensor.is_padding}

    def read(self, section: str, targets: Mapping[str, memoryview | Iterable[Row]], verify: bool = True) -> None:
        """
        Read tensors of a section, and compare all of it with its checksum.

        Args:
            section: name of it.
            targets: memory by the names of tensors, or for each of their rows. It may be shorter than the tensor; what
                has none is summed up, and no more.
            verify: whether it is compared.

        Raises:
            CacheFileError: it was altered, or cannot be read.
        """
        checksum = 0
        for tensor in self.sections.get(section, ()):
            at, end = self.place_of(tensor), self._data_start + tensor.end
            target = targets.get(tensor.name, memoryview(b""))
            rows = [Row(target, True)] if isinstance(target, memoryview) else target
            self._file.seek(at)
            for row in rows:
                for piece in _pieces(row.data) if verify or row.is_kept else ():
                    self._fill(piece)
                    checksum = zlib.crc32(piece, checksum) if verify else 0
                at += len(row.data)
                self._file.seek(at)
            if verify and at < end:
                checksum = self._summed_up(end - at, checksum)
        if verify and self.metadata.get(f"checksum {section}", _NO_CHECKSUM) != f"{checksum:08x}":
            raise CacheFileError(self.path, f"was altered: {section} does not fit its checksum.")

    def _read_header(self) -> None:
        num_bytes = os.fstat(self._file.fileno()).st_size
        if not num_bytes:
            raise CacheFileError(self.path, "is empty.")
        try:
            # The file that is open, whatever has its name by now.
            name = f"/dev/fd/{self._file.fileno()}"
            with safe_open(name if os.path.exists(name) else os.fspath(self.path), "np") as checked:
                self.metadata = dict(checked.metadata() or {})
                slices = [(name, checked.get_slice(name)) for name in checked.offset_keys()]
                forms = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices}
        except SafetensorError as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise CacheFileError(self.path, f"is cut off, altered, or not a safetensors file ({reason}).") from None
        self.sections: dict[str, list[PlacedTensor]] = {}
        end, tensor = 0, None
        for name, (code, shape) in forms.items():
            if code not in _NAMES:
                raise CacheFileError(self.path, f"is not the file of a cache: the tensor {name!r} is of type {code}.")
            if len(shape) > _MOST_DIMENSIONS or math.prod(max(1, size) for size in shape) > _MOST_NUMBERS:
                raise CacheFileError(self.path, f"is not the file of a cache: the tensor {name!r} is {list(shape)}.")
            tensor = PlacedTensor(name, TensorForm(_NAMES[code], shape), end)
            self.sections.setdefault(tensor.section, []).append(tensor)
            end = tensor.end
        if tensor is None or tensor[:2] != (_HEADER_CHECKSUM, _CHECKSUM_FORM):
            raise CacheFileError(self.path, "is a safetensors file, but not of a cache.")
        self._data_start = num_bytes - end
        if self._data_start < 0:
            raise CacheFileError(self.path, "was altered while it was opened.")
        header, checksum = bytearray(self._data_start), bytearray(_CHECKSUM_BYTES)
        self._file.seek(0)
        self._fill(memoryview(header))
        self._file.seek(num_bytes - _CHECKSUM_BYTES)
        self._fill(memoryview(checksum))
        if checksum != _checksum_of(header):
            raise CacheFileError(self.path, "was altered: its header does not fit its checksum.")
        self.sections.pop(_HEADER_CHECKSUM, None)

    def _summed_up(self, num_bytes: int, checksum: int) -> int:
        """Read on without keeping it, and return the checksum continued over it."""
        scratch = memoryview(bytearray(min(num_bytes, _PIECE_BYTES)))
        while num_bytes:
            piece = scratch[:num_bytes]
            self._fill(piece)
            checksum = zlib.crc32(piece, checksum)
            num_bytes -= len(piece)
        return checksum

    def _fill(self, data: memoryview) -> None:
        """Fill memory from where the file stands."""
        while len(data):
            try:
                count = self._file.readinto(data)  # type: ignore[attr-defined]
            except OSError as error:
                raise CacheFileError(self.path, f"cannot be read: {error.strerror or error}.") from error
            if not count:
                raise CacheFileError(self.path, "is cut off: it became shorter while it was read.")
            data = data[count:]


def dtype_name(dtype: Any) -> str:
    """Return the name of a type, such as "float32"; `ValueError` if there is no such type in a file."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"{dtype} cannot be saved; only {', '.join(_DTYPES)} can.")
    return name


def _write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """Write all of the data, which the system may take in parts."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _checksum_of(header: bytes | bytearray) -> bytes:
    return zlib.crc32(header).to_bytes(_CHECKSUM_BYTES, "little")


def _pieces(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))
