"""Damaged, altered and foreign files, and unusable paths, are refused in one sentence."""

import contextlib
import copy
import json
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from files.forged import parts_of, write

from hf_hybrid_cache import (
    CacheFileError,
    DynamicHybridCache,
    HybridCache,
    minmax,
    saved_token_ids,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.storage import Store

from common.limits import limited
from models.tiny_models import FAMILIES, random_prompt, tiny_model

CONFIG = FAMILIES["llama"]()


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


def error_of(path: Path, config: Any = CONFIG, **options: Any) -> str:
    with pytest.raises(CacheFileError) as raised:
        HybridCache.load(path, config, **options)
    message = str(raised.value)
    assert message.startswith(f"{path} ")
    assert "\n" not in message
    return message.removeprefix(f"{path} ")


# Damage; that any byte of a section is found tells test_tensor_file.py


@pytest.mark.parametrize(
    ("family", "bits", "num_tokens", "mmap"),
    [("llama", None, 200, True), ("gemma3", None, 200, False), ("qwen3_next", 4, 200, False), ("llama", 4, 9, False)],
)
def test_one_altered_bit_is_said_to_be_of_its_section(
    family: str, bits: int | None, num_tokens: int, mmap: bool, tmp_path: Path
):
    path, config = good_file(tmp_path, family, bits, num_tokens), FAMILIES[family]()
    content, (header, data) = path.read_bytes(), parts_of(path)
    for name, tensor in header.items():
        start, end = tensor.get("data_offsets", (0, 0))
        if start == end or "/padding." in name or name == "checksum":
            continue
        altered, section = bytearray(content), name.partition("/")[0]
        altered[len(content) - len(data) + end - 1] ^= 16
        path.write_bytes(altered)
        assert error_of(path, config, mmap=mmap) == f"was altered: {section} does not fit its checksum."
        if section == "token_ids":
            with pytest.raises(CacheFileError, match="token_ids does not fit"):
                saved_token_ids(path)
        elif mmap:  # not compared, not found
            HybridCache.load(path, config, mmap=True, verify=False)
    path.write_bytes(content)
    HybridCache.load(path, config, mmap=mmap)


# Messages


def test_folders_missing_files_and_pipes_are_named_as_such(tmp_path: Path):
    assert error_of(tmp_path) == "is not a regular file."
    assert error_of(tmp_path / "none.kv") == "cannot be read: No such file or directory."
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert error_of(tmp_path / "pipe") == "is not a regular file."


@pytest.mark.parametrize("version", ["5", "7"])
def test_another_version_of_the_format_is_refused_with_the_way_out(version: str, tmp_path: Path):
    header, data = parts_of(path := good_file(tmp_path))
    header["__metadata__"]["format_version"] = version
    write(path, header, data)
    assert (
        f"has format version '{version}', and this version of hf_hybrid_cache reads 6. Use the version that wrote it"
        in error_of(path)
    )


@pytest.mark.parametrize(
    ("document_tokens", "reason"),
    [
        (0, "its document has 0 tokens, the file 200"),
        (201, "its document has 201 tokens, the file 200"),
        ("7", "ValueError: '7' is not a count"),
    ],
)
def test_document_of_an_impossible_length_is_refused(document_tokens: Any, reason: str, tmp_path: Path):
    header, data = parts_of(path := good_file(tmp_path))
    described = json.loads(header["__metadata__"]["cache"]) | {"document_tokens": document_tokens}
    header["__metadata__"]["cache"] = json.dumps(described)
    write(path, header, data)
    assert error_of(path) == f"does not describe a cache ({reason})."


def test_queries_when_they_cannot_be_those_of_a_layer_then_are_refused(tmp_path: Path):
    header, data = parts_of(path := good_file(tmp_path, bits=4, num_tokens=9))
    header["codecs.1/squares"]["dtype"] = "I32"
    write(path, header, data)
    assert error_of(path) == "does not describe a cache (codecs.1: there are no means of squares of queries)."
    header["codecs.1/squares"]["dtype"], header["codecs.0/number"]["dtype"] = "F32", "F64"
    write(path, header, data)
    assert error_of(path) == "does not describe a cache (codecs.0: there are no means of squares of queries)."


def test_another_model_is_refused_with_what_differs(tmp_path: Path):
    path, other = good_file(tmp_path), copy.deepcopy(CONFIG)
    other.num_key_value_heads = 4
    other.rope_parameters = {"rope_theta": 500.0, "rope_type": "default"}
    message = error_of(path, other)
    assert message.startswith(
        "is of another model: num_key_value_heads is 2 in the file and 4 in the model; rope_param"
    )
    assert "hidden_size" not in message
    with pytest.raises(TypeError, match="config must be a transformers config"):
        HybridCache.load(path, "llama")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_is_refused_with_the_way_out(tmp_path: Path):
    message = error_of(good_file(tmp_path), device="cuda:0")
    assert "there is no device cuda:0 here; pass device='cpu'" in message


# Writing


def test_places_that_cannot_be_written_to_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = DynamicHybridCache(CONFIG)
    with pytest.raises(CacheFileError, match=r"there is no folder .*none\. Make it first"):
        cache.save(tmp_path / "none" / "cache.kv")
    with pytest.raises(CacheFileError, match="was not written: Is a directory"):
        cache.save(tmp_path)
    for name in ("a" * 300, "a" * 300 + "/b"):
        with pytest.raises(CacheFileError, match="was not written: "):
            cache.save(tmp_path / name)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CacheFileError, match=r"it needs 0\.00 GiB and 0\.00 GiB are free there"):
        cache.save(str(tmp_path / "cache.kv"))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError, CacheFileError])
def test_whatever_ends_the_writing_leaves_the_older_file(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, states, full = tmp_path / "cache.kv", torch.ones(1, 2, 500, 16), DynamicHybridCache(CONFIG)
    path.write_bytes(b"older")
    for layer in range(CONFIG.num_hidden_layers):
        full.update(states, states, layer)
    before, made = Store.rows, list[Store]()

    def rows(store: Store, name: str, start: int) -> Any:
        if made:
            raise error
        made.append(store)
        return before(store, name, start)

    if error is CacheFileError:
        ending: Any = limited("RLIMIT_FSIZE", 50_000)
    else:
        ending = contextlib.nullcontext(monkeypatch.setattr(Store, "rows", rows))
    with ending, pytest.raises(error, match="File too large" if error is CacheFileError else None):
        full.save(path)
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]
