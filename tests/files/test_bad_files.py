"""Damaged, forged and foreign files, and unusable paths, are refused in one sentence."""

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from files.forged import (
    Alter,
    good_file,
    numbers,
    parts_of,
    rewritten,
    with_description,
    with_header,
    without_token_ids,
)

from hf_hybrid_cache import CacheFileError, DynamicHybridCache, HybridCache, Placement, saved_token_ids

from common.caches import group_of_one
from models.tiny_models import FAMILIES

CONFIG = FAMILIES["llama"]()
# Ways to load a file. A group keeps its cache in host memory, and "as saved" is the file's own placement.
PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "as saved": dict,
    "on the device": lambda: {"placement": Placement()},
    "streamed": lambda: {"placement": Placement(True, cpu_decode=False)},
    "split": lambda: {"placement": Placement(True, cpu_decode=True, device_tokens=128)},
    "shared": lambda: {"placement": Placement(True, cpu_decode=0.5)},
    "mapped": lambda: {"placement": Placement(cpu_decode=True), "mmap": True},
    "divided": lambda: {"group": group_of_one()},
}


def error_of(path: Path, config: Any = CONFIG, **options: Any) -> str:
    with pytest.raises(CacheFileError) as raised:
        HybridCache.load(path, config, **options)
    message = str(raised.value)
    assert message.startswith(f"{path} ")
    assert "\n" not in message
    return message.removeprefix(f"{path} ")


def document_of(tokens: object) -> Alter:
    return with_description(lambda described: described.update(document_tokens=tokens))


def hide_attributes(described: Any) -> None:
    described["layers"][0]["attributes"]["__dict__"] = {"dict": [["sliding_window", 3]]}


VERSION = "and this version of hf_hybrid_cache reads 8. Use the version that wrote it"

# Arguments of `good_file`, what is done to the file, and what is then said of it, wherever it is loaded.
DAMAGES: dict[str, tuple[dict[str, Any], Alter, str]] = {
    "other version": ({}, with_header(__metadata__={"format_version": "9"}), f"has format version '9', {VERSION}"),
    "longer document": ({}, document_of(201), "a cache (its document has 201 tokens, the file 200)."),
    "uncounted document": ({}, document_of("7"), "does not describe a cache (ValueError: '7' is not a count)."),
    "squares of another type": (
        {"bits": 4, "num_tokens": 9},
        with_header(**{"codecs.1/squares": {"dtype": "I32"}}),
        "does not describe a cache (codecs.1: there are no means of squares of queries).",
    ),
    "attribute of all objects": (
        {"family": "gemma3"},
        with_description(hide_attributes),
        "layer 0 has __dict__, which is not an attribute",
    ),
    "more sinks than tokens": (
        {"bits": 4},
        rewritten(numbers(packed=1000, sink_tokens=2**34), without_token_ids),
        "cannot be loaded: there are 1,000 quantized blocks after 72 tokens in full precision, of which the first "
        "17,179,869,184 are never quantized.",
    ),
    "shorter layer": (
        {"bits": 4},
        rewritten(numbers({2}, full=60)),
        "200 tokens of 1 in layer 1, 188 tokens of 1 in layer 2",
    ),
    "larger batch of a layer": (
        {},
        rewritten(numbers({1}, batch=2)),
        "200 tokens of 1 in layer 0, 200 tokens of 2 in layer 1",
    ),
    "no heads": (
        {},
        rewritten(numbers(num_kv_heads=0, states=2**36), without_token_ids),
        "there are no states in States(",
    ),
    "fewer tokens than ids": ({}, rewritten(numbers(states=199)), "199 tokens of 1 in layer 3, and 200 ids"),
}


@pytest.mark.usefixtures("short_prompts_choose")
@pytest.mark.parametrize("name", DAMAGES)
def test_file_when_it_does_not_fit_itself_then_is_refused_anywhere(name: str, tmp_path: Path):
    good, damage, message = DAMAGES[name]
    path = good_file(tmp_path, **good)
    damage(path)
    for options in PLACES.values():
        if good.get("family") != "gemma3" or "group" not in options():
            assert message in error_of(path, FAMILIES[good.get("family", "llama")](), **options())


# That any byte of a section is found tells `test_tensor_file.py`.
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


def test_what_is_no_file_of_the_model_here_is_named(tmp_path: Path):
    assert error_of(tmp_path) == "is not a regular file."
    assert error_of(tmp_path / "none.kv") == "cannot be read: No such file or directory."
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert error_of(tmp_path / "pipe") == "is not a regular file."
    path, other = good_file(tmp_path), copy.deepcopy(CONFIG)
    other.num_key_value_heads = 4
    other.rope_parameters = {"rope_theta": 500.0, "rope_type": "default"}
    message = error_of(path, other)
    differs = "is of another model: num_key_value_heads is 2 in the file and 4 in the model; rope_param"
    assert message.startswith(differs)
    assert "hidden_size" not in message
    if not torch.cuda.is_available():
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
