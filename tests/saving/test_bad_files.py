"""Damaged, altered and foreign files, and unusable paths, are refused in one sentence."""

import copy
import json
import os
import shutil
import sys
import tempfile
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
from hf_hybrid_cache.saving.container import LENGTH_BYTES, TensorForm
from hf_hybrid_cache.saving.sections import Section
from hf_hybrid_cache.saving.writing import checksum_of_header, write

from common.soak import count, search_at_random
from models.tiny_models import FAMILIES, random_prompt, tiny_model

CONFIG = FAMILIES["llama"]()


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
    return start + data[:-4] + checksum_of_header(start)


def with_cache(content: bytes, **changed: Any) -> bytes:
    """The same file with another description of the cache."""
    tree, rest = parts(content)
    cache = json.loads(tree["__metadata__"]["cache"])
    tree["__metadata__"]["cache"] = json.dumps(cache | changed)
    return with_header(json.dumps(tree).encode(), rest)


def with_document(content: bytes, **document: Any) -> bytes:
    """The same file with other `document_tokens`, or without."""
    tree, rest = parts(content)
    cache = json.loads(tree["__metadata__"]["cache"])
    del cache["document_tokens"]
    tree["__metadata__"]["cache"] = json.dumps(cache | document)
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty."),
        (b"1234567", "is not a safetensors file: it does not begin with the length of a header."),
        ((2**60).to_bytes(8, "little") + b"{}", "is not a safetensors file: it does not begin with the length"),
        ((1000).to_bytes(8, "little") + b"{}", "is cut off, or not a safetensors file: its header has 1,000 bytes"),
        (b"\x02\0\0\0\0\0\0\0[]", "is not a safetensors file: its header is not a JSON object."),
        (b"\x02\0\0\0\0\0\0\0\xff\xfe", "is not a safetensors file: its header is not JSON ('utf-8' codec"),
        (b"\x02\0\0\0\0\0\0\0{}", "is a safetensors file, but not of a saved cache."),
    ],
)
def test_a_file_of_something_else_is_named_as_such(content: bytes, message: str, tmp_path: Path):
    path = tmp_path / "cache.kv"
    path.write_bytes(content)
    assert error_of(path).startswith(message)


TENSOR = '"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f"{{{TENSOR}, {TENSOR}}}", "'a' comes twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ("[" * 100_000, "its header is not JSON"),
        ('{"a": 1}', "the tensor 'a' has no dtype, shape and data_offsets"),
        ('{"__metadata__": {"format": 1}}', "its metadata is not text"),
        (TENSOR.join("{}").replace("[0, 4]", "[-4, 0]"), "the tensor 'a' has no shape, or no place"),
        (TENSOR.join("{}").replace("[0, 4]", "[0, 3]"), "the tensor 'a' needs 4 bytes and has 3"),
        (TENSOR.join("{}").replace("[4]", f"[{2**62}, {2**62}]"), "the tensor 'a' needs"),
        (TENSOR.join("{}").replace("[4]", "[4.0]"), "the tensor 'a' has no shape, or no place"),
        (TENSOR.join("{}").replace("U8", "C64"), "the tensor 'a' is of type 'C64'"),
        (TENSOR.join("{}").replace("[0, 4]", "[1, 5]"), "begins at byte 1 of the data and the one before it ends at 0"),
        (
            f"{{{TENSOR}, {TENSOR.replace('a', 'b', 1)}}}",
            "begins at byte 0 of the data and the one before it ends at 4",
        ),
    ],
)
def test_a_header_that_safetensors_does_not_allow_is_refused(header: str, message: str, tmp_path: Path):
    path = tmp_path / "cache.kv"
    path.write_bytes(with_header(header.encode(), b"12341234"))
    assert message in error_of(path)


def test_folders_missing_files_and_pipes_are_named_as_such(tmp_path: Path):
    assert error_of(tmp_path) == "is a folder."
    assert error_of(tmp_path / "none.kv") == "cannot be read: No such file or directory."
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert error_of(tmp_path / "pipe") == "is not a regular file."


def test_the_weights_of_a_model_are_no_cache(tmp_path: Path):
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert error_of(tmp_path / "model.safetensors") == "is a safetensors file, but not of a saved cache."


def test_file_when_too_short_or_too_long_then_error_says_so(tmp_path: Path):
    content, path = good_file("llama", None), tmp_path / "cache.kv"
    path.write_bytes(content[:-5000])
    assert error_of(path) == "is cut off: 5,000 bytes are missing."
    path.write_bytes(content + b"abc")
    assert error_of(path) == "has 3 bytes more than its header says."


@pytest.mark.parametrize("version", ["4", "6"])
def test_another_version_of_the_format_is_refused_with_the_way_out(version: str, tmp_path: Path):
    path = tmp_path / "cache.kv"
    tree, rest = parts(good_file("llama", None))
    tree["__metadata__"]["format_version"] = version
    path.write_bytes(with_header(json.dumps(tree).encode(), rest))
    assert (
        f"has format version '{version}', and this version of hf_hybrid_cache reads 5. Use the version that wrote it"
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
    path.write_bytes(with_document(good_file("llama", None), document_tokens=document_tokens))
    assert error_of(path) == message


def test_a_file_when_it_is_older_and_tells_of_no_document_then_loads(tmp_path: Path):
    path = tmp_path / "cache.kv"
    path.write_bytes(with_document(good_file("llama", None)))
    assert HybridCache.load(path, CONFIG).get_seq_length() == 200


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


def test_a_file_when_it_is_older_and_has_no_queries_then_loads(tmp_path: Path):
    model, path = tiny_model("llama"), tmp_path / "cache.kv"
    filled = HybridCache(model.config, codec=minmax(4))
    states = torch.ones(1, 2, 9, model.config.head_dim)
    for layer in range(model.config.num_hidden_layers):
        filled.update(states, states, layer)
    filled.save(path)
    tree, rest = parts(path.read_bytes())
    assert not any(name.startswith("queries.") for name in tree)
    cache = json.loads(tree["__metadata__"]["cache"])
    del cache["sees_as_alone"]
    tree["__metadata__"]["cache"] = json.dumps(cache)
    path.write_bytes(with_header(json.dumps(tree).encode(), rest))
    assert HybridCache.load(path, CONFIG).get_seq_length() == 9


def test_queries_when_they_cannot_be_those_of_a_layer_then_are_refused(tmp_path: Path):
    path, content = tmp_path / "cache.kv", file_before_the_choice()
    codec = {"name": "minmax", "bits": [4, 4], "group_size": 64, "sink_tokens": 64, "rotate": True, "auto_bits": False}
    path.write_bytes(with_cache(content, codecs=[[layer, codec] for layer in range(CONFIG.num_hidden_layers)]))
    assert "(queries.0: no codec is to be chosen by them)" in error_of(path)
    tree, rest = parts(content)
    tree["queries.1/squares"]["dtype"] = "I32"
    path.write_bytes(with_header(json.dumps(tree).encode(), rest))
    assert "(queries.1: the tensor queries.1/squares is not torch.float32" in error_of(path)
    altered, (start, _) = bytearray(rest), tree["queries.0/number"]["data_offsets"]
    altered[start] ^= 1
    path.write_bytes(with_header(json.dumps(parts(content)[0]).encode(), bytes(altered)))
    assert error_of(path) == "was altered: queries.0 does not fit its checksum."


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
    with pytest.raises(CacheFileError, match="it is a folder"):
        cache.save(tmp_path)
    for name in ("a" * 300, "a\0b", "a" * 300 + "/b"):
        with pytest.raises(CacheFileError, match="was not written: "):
            cache.save(tmp_path / name)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CacheFileError, match=r"it needs 0\.00 GiB and 0\.00 GiB are free there"):
        cache.save(str(tmp_path / "cache.kv"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_whatever_ends_the_writing_leaves_the_older_file(error: type[BaseException], tmp_path: Path):
    path = tmp_path / "cache.kv"
    path.write_bytes(b"older")

    def pieces():
        yield [torch.ones(5000)]
        raise error

    section = Section("layers.0", {f"layers.0/{name}": TensorForm(torch.float32, (5000,)) for name in "ab"}, pieces)
    with pytest.raises(error):
        write(path, {}, [section])
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_a_disk_that_is_full_leaves_the_older_file(tmp_path: Path):
    import resource

    path = tmp_path / "cache.kv"
    path.write_bytes(b"older")
    states = torch.ones(1, 2, 500, 16)
    filled = DynamicHybridCache(CONFIG)
    for layer in range(CONFIG.num_hidden_layers):
        filled.update(states, states, layer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(CacheFileError, match=r"was not written: File too large\.$"):
            filled.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of POSIX")
def test_a_file_can_be_read_by_those_who_can_read_other_new_files(tmp_path: Path):
    (tmp_path / "other").touch()
    DynamicHybridCache(CONFIG).save(tmp_path / "cache.kv")
    assert (tmp_path / "cache.kv").stat().st_mode == (tmp_path / "other").stat().st_mode
