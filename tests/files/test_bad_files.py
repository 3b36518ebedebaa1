"""Damaged, altered and foreign files, and unusable paths, are refused in one sentence."""

import copy
import json
import os
import shutil
import sys
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file

from hf_hybrid_cache import (
    CacheFileError,
    DynamicHybridCache,
    HybridCache,
    Selection,
    minmax,
    saved_token_ids,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.storage import Part

from common.soak import count, search_at_random
from models.tiny_models import FAMILIES, random_prompt, tiny_model

CONFIG = FAMILIES["llama"]()
LENGTH_BYTES = 8


@cache
def good_file(family: str, bits: int | None) -> bytes:
    """A cache with token ids, in full precision with an index of keys."""
    model, ids, selection = tiny_model(family), random_prompt(1, 200), Selection()
    full = DynamicHybridCache(model.config, selection=selection)
    filled = HybridCache(model.config, codec=minmax(bits, sink_tokens=0)) if bits else full
    with torch.no_grad():
        model(ids, **cache_argument(filled))
    with tempfile.TemporaryDirectory() as folder:
        filled.save(f"{folder}/cache.kv", ids)
        return Path(folder, "cache.kv").read_bytes()


def error_of(path: Path, config: Any = CONFIG, **options: Any) -> str:
    with pytest.raises(CacheFileError) as raised:
        HybridCache.load(path, config, **options)
    message = str(raised.value)
    assert message.startswith(f"{path} ")
    assert "\n" not in message
    return message.removeprefix(f"{path} ")


# Damage


def damage(content: bytes, data: st.DataObject) -> bytes:
    """The content with some of its bytes altered, taken away, or added."""
    length = len(content)
    # Half of the time where there is the most to be misunderstood.
    place = st.one_of(st.integers(0, length - 1), st.integers(0, 300), st.integers(length - 300, length - 1))
    how = data.draw(st.sampled_from(["alter", "alter", "alter", "cut", "insert", "remove"]))
    altered = bytearray(content)
    if how == "alter":
        for position in data.draw(st.sets(place, min_size=1, max_size=8)):
            altered[position] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del altered[data.draw(place) :]
    elif how == "remove":
        start = data.draw(place)
        del altered[start : start + data.draw(st.integers(1, 5000))]
    else:
        start = data.draw(place)
        altered[start:start] = data.draw(st.binary(min_size=1, max_size=20))
    return bytes(altered)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "bits", "mmap"), [("llama", None, True), ("gemma3", None, False), ("qwen3_next", 4, False)]
)
def test_an_altered_file_is_never_loaded(family: str, bits: int | None, mmap: bool, tmp_path: Path):
    content, path, config = good_file(family, bits), tmp_path / "cache.kv", FAMILIES[family]()
    path.write_bytes(content)
    HybridCache.load(path, config, mmap=mmap)

    @search_at_random(20, 200)
    @given(st.data())
    def search(data: st.DataObject) -> None:
        altered = damage(content, data)
        if altered == content:  # zeros taken from among zeros, or added
            return
        path.write_bytes(altered)
        error_of(path, config, mmap=mmap)
        count("files altered")

    search()


def parts(content: bytes) -> tuple[Any, bytes]:
    """The header's tree and the data after it."""
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    return json.loads(content[LENGTH_BYTES:end]), content[end:]


def with_header(text: bytes, data: bytes) -> bytes:
    """A file with this header, and a checksum that fits it."""
    start = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return start + data[:-4] + zlib.crc32(start).to_bytes(4, "little")


def with_cache(content: bytes, **changed: Any) -> bytes:
    """The same file with another description of the cache."""
    tree, rest = parts(content)
    cache = json.loads(tree["__metadata__"]["cache"])
    tree["__metadata__"]["cache"] = json.dumps(cache | changed)
    return with_header(json.dumps(tree).encode(), rest)


# Messages


def test_one_altered_bit_of_a_layer_is_said_to_be_of_that_layer(tmp_path: Path):
    content, path = bytearray(good_file("llama", None)), tmp_path / "cache.kv"
    tree, rest = parts(bytes(content))
    position = len(content) - len(rest) + tree["layers.2/states.values"]["data_offsets"][0] + 1000
    content[position] ^= 16
    path.write_bytes(content)
    for options in ({}, {"mmap": True}):
        assert error_of(path, **options) == "was altered: layers.2 does not fit its checksum."
    # Not compared, not found.
    HybridCache.load(path, CONFIG, mmap=True, verify=False)


def test_altered_token_ids_are_found(tmp_path: Path):
    content, path = bytearray(good_file("llama", None)), tmp_path / "cache.kv"
    content[len(content) - len(parts(bytes(content))[1])] ^= 1
    path.write_bytes(content)
    assert error_of(path) == "was altered: token_ids does not fit its checksum."
    with pytest.raises(CacheFileError, match="token_ids does not fit"):
        saved_token_ids(path)


def test_folders_missing_files_and_pipes_are_named_as_such(tmp_path: Path):
    assert error_of(tmp_path) == "is not a regular file."
    assert error_of(tmp_path / "none.kv") == "cannot be read: No such file or directory."
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert error_of(tmp_path / "pipe") == "is not a regular file."


def test_the_weights_of_a_model_are_no_cache(tmp_path: Path):
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert error_of(tmp_path / "model.safetensors") == "is a safetensors file, but not of a cache."


@pytest.mark.parametrize("version", ["5", "7"])
def test_another_version_of_the_format_is_refused_with_the_way_out(version: str, tmp_path: Path):
    path = tmp_path / "cache.kv"
    tree, rest = parts(good_file("llama", None))
    tree["__metadata__"]["format_version"] = version
    path.write_bytes(with_header(json.dumps(tree).encode(), rest))
    assert (
        f"has format version '{version}', and this version of hf_hybrid_cache reads 6. Use the version that wrote it"
        in error_of(path)
    )


@pytest.mark.parametrize(
    ("document_tokens", "message"),
    [
        (0, "does not describe a cache (its document has 0 tokens, the file 200)."),
        (201, "does not describe a cache (its document has 201 tokens, the file 200)."),
        ("7", "does not describe a cache (ValueError: '7' is not a count)."),
    ],
)
def test_a_document_when_it_cannot_have_so_many_tokens_then_is_refused(
    document_tokens: Any, message: str, tmp_path: Path
):
    path = tmp_path / "cache.kv"
    path.write_bytes(with_cache(good_file("llama", None), document_tokens=document_tokens))
    assert error_of(path) == message


@cache
def file_before_the_choice() -> bytes:
    """A cache of 4 bits with a few tokens."""
    model = tiny_model("llama")
    filled = HybridCache(model.config, codec=minmax(4))
    with torch.no_grad():
        model(random_prompt(1, 9), **cache_argument(filled))
    with tempfile.TemporaryDirectory() as folder:
        filled.save(f"{folder}/cache.kv")
        return Path(folder, "cache.kv").read_bytes()


def test_queries_when_they_cannot_be_those_of_a_layer_then_are_refused(tmp_path: Path):
    path, content = tmp_path / "cache.kv", file_before_the_choice()
    tree, rest = parts(content)
    tree["codecs.1/squares"]["dtype"] = "I32"
    path.write_bytes(with_header(json.dumps(tree).encode(), rest))
    assert error_of(path) == "does not describe a cache (codecs.1: there are no means of squares of queries)."
    tree["codecs.1/squares"]["dtype"], tree["codecs.0/number"]["dtype"] = "F32", "F64"
    path.write_bytes(with_header(json.dumps(tree).encode(), rest))
    assert error_of(path) == "does not describe a cache (codecs.0: there are no means of squares of queries)."
    altered, (start, _) = bytearray(rest), tree["codecs.0/number"]["data_offsets"]
    altered[start] ^= 1
    path.write_bytes(with_header(json.dumps(parts(content)[0]).encode(), bytes(altered)))
    assert error_of(path) == "was altered: codecs.0 does not fit its checksum."


def test_another_model_is_refused_with_what_differs(tmp_path: Path):
    path = tmp_path / "cache.kv"
    path.write_bytes(good_file("llama", None))
    other = copy.deepcopy(CONFIG)
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
    path = tmp_path / "cache.kv"
    path.write_bytes(good_file("llama", None))
    assert "there is no device cuda:0 here; pass device='cpu'" in error_of(path, device="cuda:0")


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_whatever_ends_the_writing_leaves_the_older_file(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "cache.kv"
    path.write_bytes(b"older")
    full, made = filled(), []

    def rows_from(part: Part, start: int) -> Any:
        if made:
            raise error
        made.append(part)
        return before(part, start)

    before = Part.rows_from
    monkeypatch.setattr(Part, "rows_from", rows_from)
    with pytest.raises(error):
        full.save(path)
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


def filled() -> HybridCache:
    """A cache with some states in each layer."""
    states, cache = torch.ones(1, 2, 500, 16), DynamicHybridCache(CONFIG)
    for layer in range(CONFIG.num_hidden_layers):
        cache.update(states, states, layer)
    return cache


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_a_disk_that_is_full_leaves_the_older_file(tmp_path: Path):
    import resource

    path = tmp_path / "cache.kv"
    path.write_bytes(b"older")
    full = filled()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(CacheFileError, match=r"was not written: File too large\.$"):
            full.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of POSIX")
def test_a_file_can_be_read_by_those_who_can_read_other_new_files(tmp_path: Path):
    (tmp_path / "other").touch()
    DynamicHybridCache(CONFIG).save(tmp_path / "cache.kv")
    assert (tmp_path / "cache.kv").stat().st_mode == (tmp_path / "other").stat().st_mode
