"""Files of nodes are safetensors files, which say in their metadata who they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_hybrid_cache.files.tensor_file import NewFile, Section, TensorForm
from hf_hybrid_cache.prefix_store.keys import as_bytes, prefix_digests

from store_folder.stored import IDENTITY, Tokens, keys_of, num_found, open_folder, section_of, states_of
from store_folder.trials import check_whole

PROMPT: Tokens = tuple(range(100))
PREFIX = prefix_digests(IDENTITY, b"")[0].hex()
NODE = {"parent": None, "prefix": PREFIX, "start": 0}
METADATA = {"format": "hf_hybrid_cache.prefix_store", "format_version": "2", "description": "Dear", "states": ""}
FORM = TensorForm("uint8", (100, 4))


def write_node(path: Path, metadata: dict[str, str], node: Any = NODE, form: TensorForm = FORM) -> None:
    text = node if isinstance(node, str) else json.dumps(node)
    data = as_bytes(keys_of(PROMPT))[: form.num_bytes]
    sections = [Section("keys", {"keys": form}, lambda: [[data]]), section_of(states_of(PROMPT, 0))]
    with (path / "nodes" / ("0" * 32 + ".safetensors")).open("xb", buffering=0) as file:
        NewFile(metadata | {"node": text}, sections, 64).write(file)


def test_file_of_version_2_is_found_again(path: Path):
    open_folder(path)
    write_node(path, METADATA)
    user = open_folder(path)
    assert num_found(user, PROMPT) == 100
    assert [entry.description for entry in user.entries()] == ["Dear"]
    check_whole(path)


@pytest.mark.parametrize(
    "head",
    [
        {"metadata": METADATA | {"format_version": "3"}},
        {"metadata": METADATA | {"format": "another"}},
        {"metadata": {name: METADATA[name] for name in ("format", "format_version", "states")}},
        *({"node": NODE | {"start": start}} for start in (-64, 1, 64, 2**70, 0.0, None, "0")),
        *({"node": NODE | {"prefix": prefix}} for prefix in ("", "no", PREFIX * 2, 7, None)),
        *({"node": NODE | {"start": 64, "parent": parent}} for parent in ("0" * 32, "", 7, ["a"])),
        *({"node": node} for node in ({}, [], None, "", "{", "[" * 100_000)),
        *({"form": TensorForm(*form)} for form in (("uint8", ()), ("uint8", (400,)), ("uint8", (0, 4)))),
        {"form": TensorForm("int8", (100, 4))},
    ],
)
def test_head_that_is_none_goes_with_its_file(head: dict[str, Any], path: Path):
    open_folder(path)
    write_node(path, **{"metadata": METADATA, **head})
    with pytest.warns(UserWarning, match="It was removed from the store"):
        open_folder(path)
    check_whole(path)


def test_safetensors_of_another_program_when_named_as_a_node_then_goes(path: Path):
    open_folder(path)
    save_file({"keys": np.zeros((1, 4), np.uint8)}, path / "nodes" / f"{'0' * 32}.safetensors", METADATA)
    with pytest.warns(UserWarning, match="is a safetensors file, but not of a cache. It was removed"):
        open_folder(path)
    check_whole(path)
