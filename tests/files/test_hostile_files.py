"""Files altered at random, with checksums that fit, are refused in a sentence, or are attended to in every place."""

import json
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from files.forged import good_file, numbers, parts_of, rewritten, without_token_ids, write
from files.test_bad_files import PLACES
from fuzz.altered import altered
from hypothesis import given

from hf_hybrid_cache import CacheFileError, HostMemoryError, HybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.storage import Layout

from common.soak import count, search_at_random
from models.tiny_models import random_prompt, tiny_model


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
    "num_kv_heads": st.integers(0, 4),
    "sink_tokens": st.sampled_from([0, 1, 64, 128, 1024, 2**20, 2**34, 2**62]),
}


def alter_numbers(path: Path, data: st.DataObject) -> None:
    """Change some numbers, to which the tensors are made to fit."""
    changes = []
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(list(NUMBERS)))
        layers = data.draw(st.none() | st.sets(st.integers(0, 3), min_size=1))
        changes.append(numbers(layers, **{name: data.draw(NUMBERS[name])}))
    if data.draw(st.booleans()):
        changes.append(without_token_ids)
    rewritten(*changes)(path)


@pytest.mark.soak
@pytest.mark.parametrize("alter", [alter_the_header, alter_numbers])
@search_at_random(15)
@given(data=st.data(), form=st.sampled_from([("llama", 4), ("llama", None), ("gemma3", 4)]))
def test_file_when_altered_with_its_checksums_then_is_refused_or_harmless(
    alter: Callable[[Path, st.DataObject], None], data: st.DataObject, form: tuple[str, int | None], tmp_path: Path
):
    path = good_file(tmp_path, *form)
    alter(path, data)
    attends_or_is_refused(path, form[0])
    count("files altered")


def test_quantized_blocks_when_sinks_are_incomplete_then_are_refused():
    layout = Layout(sink_tokens=128, is_quantized=True)
    layout.require_entries(128, 3)
    layout.require_entries(64, 0)
    with pytest.raises(ValueError, match="3 quantized blocks after 127 tokens"):
        layout.require_entries(127, 3)
