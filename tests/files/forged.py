"""
Files of caches, whole, and forged so that their checksums fit.

A damage is a function of a path; those that are made here write a header, a description or numbers anew:

    path = good_file(tmp_path, bits=4)
    rewritten(numbers(packed=1000))(path)
"""

import json
import os
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_hybrid_cache import HybridCache, minmax
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.files.description import DTYPES
from hf_hybrid_cache.files.layers import bytes_of
from hf_hybrid_cache.files.tensor_file import NewFile, Section, TensorFile, TensorForm

from models.tiny_models import random_prompt, tiny_model

LENGTH_BYTES = 8
Alter = Callable[[Path], None]
Forms = dict[str, TensorForm]
Change = Callable[[Any, Forms], None]


@cache
def _content(family: str, bits: int | None, num_tokens: int) -> bytes:
    model, ids = tiny_model(family), random_prompt(1, num_tokens)
    filled = HybridCache(model.config, codec=minmax(bits, sink_tokens=0) if bits else None)
    with torch.no_grad():
        model(ids, **cache_argument(filled))
    with tempfile.TemporaryDirectory() as folder:
        filled.save(f"{folder}/cache.kv", ids)
        return Path(folder, "cache.kv").read_bytes()


def good_file(folder: Path, family: str = "llama", bits: int | None = None, num_tokens: int = 200) -> Path:
    """Write a cache with token ids, in full precision or quantized; return its path."""
    path = folder / "cache.kv"
    path.write_bytes(_content(family, bits, num_tokens))
    return path


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


def with_header(**changes: dict[str, Any]) -> Alter:
    """Change fields of entries of the header, by their names."""

    def alter(path: Path) -> None:
        header, data = parts_of(path)
        for name, fields in changes.items():
            header[name] |= fields
        write(path, header, data)

    return alter


def with_description(change: Callable[[Any], object]) -> Alter:
    """Change what the header says of the cache."""

    def alter(path: Path) -> None:
        header, data = parts_of(path)
        described = json.loads(header["__metadata__"]["cache"])
        change(described)
        header["__metadata__"]["cache"] = json.dumps(described)
        write(path, header, data)

    return alter


def rewritten(*changes: Change) -> Alter:
    """Write the file anew, of ones, after changes of its description and the forms of its tensors."""

    def alter(path: Path) -> None:
        with TensorFile(path, path.open("rb", buffering=0)) as file:
            metadata = {name: text for name, text in file.metadata.items() if not name.startswith("checksum ")}
            forms = {name: each.form for section in file.sections for name, each in file.tensors(section).items()}
        described, sections = json.loads(metadata["cache"]), dict[str, Forms]()
        for change in changes:
            change(described, forms)
        for name, form in forms.items():
            sections.setdefault(name.partition("/")[0], {})[name] = form
        metadata["cache"] = json.dumps(described)
        with path.open("wb") as new:
            NewFile(metadata, [Section(*each, _ones_of(each[1])) for each in sections.items()]).write(new)

    return alter


def _ones_of(forms: Forms) -> Callable[[], Any]:
    return lambda: ([bytes_of(torch.ones(form.shape, dtype=DTYPES[form.dtype]))] for form in forms.values())


def numbers(layers: set[int] | None = None, sink_tokens: int | None = None, **numbers: int) -> Change:
    """A change of numbers of all layers, or of some, to which the tensors are made to fit."""

    def change(described: Any, forms: Forms) -> None:
        for codec in described["codecs"].values():
            codec["sink_tokens"] = codec["sink_tokens"] if sink_tokens is None else sink_tokens
        for index, layer in enumerate(described["layers"]):
            states = layer["states"]
            if states is None or (layers is not None and index not in layers):
                continue
            for tree in (states, states["entries"]):
                tree |= {name: number for name, number in numbers.items() if name in tree}
            for part, number in states["entries"].items():
                for name in (f"layers.{index}/{part}.keys", f"layers.{index}/{part}.values"):
                    rows, form = number if part == "packed" else -(-number // 64), forms[name]
                    forms[name] = TensorForm(
                        form.dtype, (rows, states["batch"], states["num_kv_heads"], *form.shape[3:])
                    )

    return change


def without_token_ids(described: Any, forms: Forms) -> None:
    forms.pop("token_ids/ids", None)
    described["document_tokens"] = None
