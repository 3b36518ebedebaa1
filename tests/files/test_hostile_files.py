"""Files whose numbers do not fit each other are refused in a sentence; what loads is attended to, in every place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from files.forged import parts_of, write
from files.test_bad_files import error_of, good_file
from fuzz.altered import altered
from hypothesis import given

from hf_hybrid_cache import CacheFileError, HostMemoryError, HybridCache, Placement
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.files.description import DTYPES
from hf_hybrid_cache.files.layers import bytes_of
from hf_hybrid_cache.files.tensor_file import NewFile, Section, TensorFile, TensorForm
from hf_hybrid_cache.storage import Layout

from common.caches import group_of_one
from common.soak import count, search_at_random
from models.tiny_models import random_prompt, tiny_model

# How a file may be loaded. A group keeps its cache in host memory, and `None` is the file's own placement.
PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "as saved": dict,
    "on the device": lambda: {"placement": Placement()},
    "streamed": lambda: {"placement": Placement(True, cpu_decode=False)},
    "split": lambda: {"placement": Placement(True, cpu_decode=True, device_tokens=128)},
    "shared": lambda: {"placement": Placement(True, cpu_decode=0.5)},
    "mapped": lambda: {"placement": Placement(cpu_decode=True), "mmap": True},
    "divided": lambda: {"group": group_of_one()},
}
Change = Callable[[Any, dict[str, TensorForm]], None]


def rewrite(path: Path, change: Change) -> None:
    """Write a file anew, of ones, after a change of its description and the forms of its tensors."""
    with TensorFile(path, path.open("rb", buffering=0)) as file:
        metadata = {name: text for name, text in file.metadata.items() if not name.startswith("checksum ")}
        forms = {name: each.form for section in file.sections for name, each in file.tensors(section).items()}
    cache = json.loads(metadata["cache"])
    change(cache, forms)
    sections: dict[str, dict[str, TensorForm]] = {}
    for name, form in forms.items():
        sections.setdefault(name.partition("/")[0], {})[name] = form
    with path.open("wb") as new:
        metadata["cache"] = json.dumps(cache)
        NewFile(metadata, [Section(*each, ones_of(each[1])) for each in sections.items()]).write(new)


def ones_of(forms: dict[str, TensorForm]) -> Callable[[], Any]:
    return lambda: ([bytes_of(torch.ones(form.shape, dtype=DTYPES[form.dtype]))] for form in forms.values())


def with_numbers(layers: set[int] | None = None, sink_tokens: int | None = None, **numbers: int) -> Change:
    """A change of numbers of all layers, or of some, to which the tensors are made to fit."""

    def change(cache: Any, forms: dict[str, TensorForm]) -> None:
        for codec in cache["codecs"].values():
            codec["sink_tokens"] = codec["sink_tokens"] if sink_tokens is None else sink_tokens
        for index, layer in enumerate(cache["layers"]):
            if layer["states"] is None or (layers is not None and index not in layers):
                continue
            states, entries = layer["states"], layer["states"]["entries"]
            for tree in (states, entries):
                tree |= {name: number for name, number in numbers.items() if name in tree}
            for part, number in entries.items():
                for name in (f"layers.{index}/{part}.keys", f"layers.{index}/{part}.values"):
                    rows, form = number if part == "packed" else -(-number // 64), forms[name]
                    sizes = rows, states["prefixes"], states["num_kv_heads"]
                    forms[name] = TensorForm(form.dtype, (*sizes, *form.shape[3:]))

    return change


def in_turn(*changes: Change) -> Change:
    def change(cache: Any, forms: dict[str, TensorForm]) -> None:
        for each in changes:
            each(cache, forms)

    return change


def without_token_ids(cache: Any, forms: dict[str, TensorForm]) -> None:
    forms.pop("token_ids/ids", None)
    cache["document_tokens"] = None


@torch.no_grad()
def attends_or_is_refused(path: Path, family: str) -> None:
    """Load a file to every place, and read a token there, and more than the kernel for few takes."""
    model = tiny_model(family)
    has_theirs = any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or ())
    for options in PLACES.values():
        try:
            cache = HybridCache.load(path, model.config, **options())
        except (CacheFileError, HostMemoryError) as error:  # a cache may be said to be meant for far too many tokens
            assert "\n" not in str(error)  # noqa: PT017
            continue
        try:
            for num_tokens in (1, 70):
                model(random_prompt(1, num_tokens), **cache_argument(cache))
        except HostMemoryError:
            pass
        except Exception as error:
            # The file's heads, or sequences, may be others; and of transformers' own layers torch finds what is wrong.
            if not has_theirs and "the new states are" not in str(error):
                raise


def alter_the_header(path: Path, data: st.DataObject) -> None:
    """Put something hostile somewhere into the header, or into its description of the cache."""
    header, content = parts_of(path)
    if data.draw(st.booleans()):
        metadata = header["__metadata__"]
        metadata["cache"] = json.dumps(data.draw(altered(json.loads(metadata["cache"]))))
    else:
        header = data.draw(altered(header))
    write(path, header, content)


NUMBERS = {
    "full": st.sampled_from([0, 1, 63, 64, 65, 128, 200, 1000]),
    "states": st.sampled_from([0, 1, 63, 64, 65, 128, 192, 1000]),
    "packed": st.sampled_from([0, 1, 2, 3, 50]),
    "batch": st.integers(0, 4),
    "prefixes": st.integers(0, 4),
    "num_kv_heads": st.integers(0, 4),
    "sink_tokens": st.sampled_from([0, 1, 64, 128, 1024, 2**20, 2**34, 2**62]),
}


def alter_numbers(path: Path, data: st.DataObject) -> None:
    """Change some numbers, to which the tensors are made to fit."""
    changes = []
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(list(NUMBERS)))
        layers = data.draw(st.none() | st.sets(st.integers(0, 3), min_size=1))
        changes.append(with_numbers(layers, **{name: data.draw(NUMBERS[name])}))
    if data.draw(st.booleans()):
        changes.append(without_token_ids)
    rewrite(path, in_turn(*changes))


@pytest.mark.soak
@pytest.mark.parametrize(("family", "bits"), [("llama", 4), ("llama", None), ("gemma3", 4)])
@pytest.mark.parametrize("alter", [alter_the_header, alter_numbers])
def test_file_when_altered_with_its_checksums_then_is_refused_or_harmless(
    alter: Callable[[Path, st.DataObject], None], family: str, bits: int | None, tmp_path: Path
):
    @search_at_random(30, 1000)
    @given(st.data())
    def search(data: st.DataObject) -> None:
        path = good_file(tmp_path, family, bits)
        alter(path, data)
        attends_or_is_refused(path, family)
        count("files altered")

    search()


# What is refused, and why


@pytest.mark.parametrize(
    ("bits", "change", "message"),
    [
        (
            4,
            in_turn(with_numbers(packed=1000, sink_tokens=2**34), without_token_ids),
            "cannot be loaded: there are 1,000 quantized blocks after 72 tokens in full precision, of which the first "
            "17,179,869,184 are never quantized.",
        ),
        (4, with_numbers({2}, full=60), "200 tokens of 1 in layer 1, 188 tokens of 1 in layer 2"),
        (None, with_numbers({1}, batch=2, prefixes=2), "200 tokens of 1 in layer 0, 200 tokens of 2 in layer 1"),
        (
            None,
            in_turn(with_numbers(num_kv_heads=0, states=2**36), without_token_ids),
            "there are no states in States(",
        ),
        (None, in_turn(with_numbers(batch=0, prefixes=0), without_token_ids), "there are no states in States("),
        (None, with_numbers(states=199), "199 tokens of 1 in layer 3, and 200 ids"),
    ],
)
def test_numbers_when_they_do_not_fit_each_other_then_are_refused(
    bits: int | None, change: Change, message: str, tmp_path: Path
):
    rewrite(path := good_file(tmp_path, bits=bits), change)
    for options in PLACES.values():
        assert message in error_of(path, **options())


def test_attributes_when_they_are_of_all_objects_then_are_refused(tmp_path: Path):
    header, data = parts_of(path := good_file(tmp_path, "gemma3"))
    cache = json.loads(header["__metadata__"]["cache"])
    cache["layers"][0]["attributes"]["__dict__"] = {"dict": [["sliding_window", 3]]}
    header["__metadata__"]["cache"] = json.dumps(cache)
    write(path, header, data)
    assert "layer 0 has __dict__, which is not an attribute" in error_of(path, tiny_model("gemma3").config)


def test_quantized_blocks_when_sinks_are_incomplete_then_are_refused():
    layout = Layout(sink_tokens=128, is_quantized=True)
    layout.require_entries(128, 3)
    layout.require_entries(64, 0)
    with pytest.raises(ValueError, match="3 quantized blocks after 127 tokens"):
        layout.require_entries(127, 3)
