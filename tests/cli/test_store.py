"""A prefix store: the list of it, removing from it, and conversations that go on another day."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cli.store import existing_store, numbered, table_of
from hf_hybrid_cache.prefix_store import PrefixStore

from .commands import error_of, lines, run, without_heavy
from common.modes import read
from models.tiny_models import random_prompt, tiny_model

TITLES = ("日本.txt: Who?", "a.txt: Where?", "a\x1b[2J\x9bb.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keeps three prompts, the last one of which is a conversation."""
    model, path = tiny_model("llama"), tmp_path / "prompts"
    prefix_store, details = PrefixStore(path), {"model": "/models/tiny", "cache": "quantized", "bits": 8, "weights": 4}
    for number, title in enumerate(TITLES):
        cache, prompt = DynamicHybridCache(model.config), random_prompt(1, 200, number)
        prefix_store.prefill(model, prompt, cache, title=title, details=details, document_tokens=200, progress=False)
    talk = torch.cat([prompt, prompt[:, :5]], dim=1)
    read(model, talk[:, 200:], cache)
    prefix_store.keep(model, talk, cache, document_tokens=200, title=TITLES[-1], details=details)
    return path


def test_a_list_is_as_wide_as_the_terminal_and_begins_all_titles(folder: Path):
    rows = numbered(existing_store(folder))
    untitled = [replace(row, stored=replace(row.stored, title="")) for row in rows]
    assert table_of(untitled, Console(width=60, force_terminal=True)).count("\n") == 3
    whole = table_of(rows, Console(width=200, force_terminal=True)).splitlines()
    for width in (40, 60, 80, 100):
        told = table_of(rows, Console(width=width, force_terminal=True)).splitlines()
        assert max(map(cell_len, told)) <= width
        assert [line.split()[0] for line in told[1:]] == ["1", "2", "3"]
        assert ["title" in told[0], told[0].split()[0]] == [True, "id"]
    assert whole == table_of(rows, Console(width=9)).splitlines()  # no terminal: all of it


def listed(folder: Path) -> list[dict[str, Any]]:
    return lines(run("store", folder, "--json"))


def test_list_when_prompts_are_kept_then_has_model_and_bits_of_each(folder: Path):
    (ended,) = without_heavy(["store", folder])
    _, first_row, _, last_row = ended.stdout.splitlines()
    first, *_ = fields = listed(folder)
    assert [each["title"] for each in fields] == list(reversed(TITLES))
    assert (first["kind"], first["tokens"], first["document_tokens"]) == ("conversation", 205, 200)
    assert (first["model"], first["weights"], first["cache"], first["bits"]) == ("/models/tiny", 4, "quantized", 8)
    assert sum(each["bytes"] for each in fields) == sum(each.stat().st_size for each in folder.glob("*/*.safetensors"))
    assert first_row.split()[:9] == ["1", first["id"][:8], "conversation", "tiny", "4", "bits", "8", "bits", "205"]
    assert last_row.endswith("日本.txt: Who?")


@pytest.mark.filterwarnings("default:.* was removed from the store")
def test_files_when_verified_then_damaged_ones_are_removed(folder: Path):
    named = folder.rename(os.fsdecode(bytes(folder) + b"-\xe9"))  # no UTF-8
    files = list(named.glob("*/*.safetensors"))
    for path in files:
        os.utime(path, (0, 0))
    assert len(listed(named)) == 3
    assert "damaged files: 0" in run("store", named, "--verify").stderr
    for path in files:
        path.write_bytes(path.read_bytes()[:-9] + b"altered!!")
    run("store", named, "--verify", code=1)
    assert listed(named) == []


def test_prompts_when_removed_then_are_gone_and_others_stay(folder: Path):
    first, _, last = listed(folder)
    error_of("store", folder, "--remove", 2, "--remove", 9)
    assert len(listed(folder)) == 3
    shown, removed = run("store", folder), run("store", folder, "--remove", 2, "--remove", first["id"][:9])
    for said in (shown.stdout, removed.stderr):  # titles without their control characters
        assert "[2Jb.txt" in said
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)
    assert [each["id"] for each in listed(folder)] == [last["id"]]
    assert f"'{last['id'][:3]}' names none of 1" in error_of("store", folder, "--remove", last["id"][:3])
