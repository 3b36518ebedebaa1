"""
The container: a safetensors file, described at https://github.com/huggingface/safetensors#format.

Eight bytes with the length of a header, the header in JSON, and the tensors one after the other without holes. Here
every tensor begins at a multiple of 4,096 bytes, so that it can be mapped: what lies between is a tensor of padding.
Tensors are in sections, `SECTION/NAME`; a section of one tensor has its name alone. The last tensor is the checksum of
all that is before the tensors.

It is written here because `safetensors.torch.save_file` takes all tensors at once, puts them in an order of its own and
computes no checksums.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

ALIGNMENT = 4096
LENGTH_BYTES = 8
HEADER_CHECKSUM = "checksum"
CHECKSUM_BYTES = 4
_LONGEST_HEADER = 100_000_000  # the limit of safetensors
_MOST_DIMENSIONS = 16
_METADATA = "__metadata__"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorForm:
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorForm":
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlacedTensor:
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
        return self.name.partition("/")[2].startswith("padding.")


@dataclass(frozen=True)
class Header:
    """
    The header of a file, which is before the tensors.

    Attributes:
        metadata: text by name.
        tensors: in the order of the file, without holes.
    """

    metadata: Mapping[str, str]
    tensors: tuple[PlacedTensor, ...]

    @classmethod
    def of(cls, metadata: Mapping[str, str], forms: Mapping[str, TensorForm]) -> Self:
        """Make the header for tensors in the order of `forms`, with padding between them and a checksum at the end."""
        tensors: list[PlacedTensor] = []
        end = 0

        def add(name: str, form: TensorForm) -> int:
            tensors.append(PlacedTensor(name, form, end))
            return tensors[-1].end

        for name, form in forms.items():
            end = add(name, form)
            if padding := -end % ALIGNMENT:
                section = tensors[-1].section
                end = add(f"{section}/padding.{len(tensors)}", TensorForm(torch.uint8, (padding,)))
        add(HEADER_CHECKSUM, TensorForm(torch.uint8, (CHECKSUM_BYTES,)))
        return cls(metadata, tuple(tensors))

    @property
    def num_data_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    def section(self, name: str) -> tuple[PlacedTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.section == name)

    def to_bytes(self) -> bytes:
        """Return the header with its length, padded so that tensors begin at a page border."""
        tree: dict[str, Any] = {_METADATA: dict(self.metadata)}
        for tensor in self.tensors:
            tree[tensor.name] = {
                "dtype": _CODES[tensor.form.dtype],
                "shape": list(tensor.form.shape),
                "data_offsets": [tensor.start, tensor.end],
            }
        text = json.dumps(tree, allow_nan=False).encode()
        text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """
        Parse the bytes after the length, from `to_bytes` or any other writer of safetensors.

        Raises:
            ValueError: it is no header of safetensors; the message continues "The file".
        """
        try:
            tree = json.loads(text.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refused)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not a safetensors file: its header is not JSON ({error}).") from None
        if not isinstance(tree, dict):
            raise ValueError("is not a safetensors file: its header is not a JSON object.")
        metadata = tree.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("is not a safetensors file: its metadata is not text.")
        tensors = sorted(
            (_placed(name, entry) for name, entry in tree.items()), key=lambda each: (each.start, each.end)
        )
        end = 0
        for tensor in tensors:
            if tensor.start != end:
                raise ValueError(
                    f"is not a safetensors file: the tensor {tensor.name!r} begins at byte {tensor.start:,} of the "
                    f"data and the one before it ends at {end:,}."
                )
            end = tensor.end
        return cls(metadata, tuple(tensors))


def header_length(start: bytes, num_bytes: int) -> int:
    """
    Return the length of the header of a file of `num_bytes` that begins with `start`.

    Raises:
        ValueError: it cannot be one of safetensors; the message continues "The file".
    """
    if not num_bytes:
        raise ValueError("is empty.")
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or not 2 <= length <= _LONGEST_HEADER:
        raise ValueError("is not a safetensors file: it does not begin with the length of a header.")
    if LENGTH_BYTES + length > num_bytes:
        raise ValueError(
            f"is cut off, or not a safetensors file: its header has {length:,} bytes, the file {num_bytes:,}."
        )
    return length


def _placed(name: str, entry: Any) -> PlacedTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"is not a safetensors file: the tensor {name!r} has no dtype, shape and data_offsets.")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"is not the file of a saved cache: the tensor {name!r} is of type {code!r}.")
    if not _are_counts(shape) or len(shape) > _MOST_DIMENSIONS or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"is not a safetensors file: the tensor {name!r} has no shape, or no place.")
    tensor = PlacedTensor(name, TensorForm(DTYPES[code], tuple(shape)), offsets[0])
    if tensor.end != offsets[1]:
        raise ValueError(
            f"is not a safetensors file: the tensor {name!r} needs {tensor.form.num_bytes:,} bytes and has "
            f"{offsets[1] - offsets[0]:,}."
        )
    return tensor


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise ValueError(f"{name!r} comes twice")
        tree[name] = value
    return tree


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")
