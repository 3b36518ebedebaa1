"""A prompt whose beginning is stored has the bits of one that is read whole."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from hf_hybrid_cache import HybridCache, QuantizedHybridCache, minmax
from hf_hybrid_cache.prefix_store import PrefixStore
from hf_hybrid_cache.prefix_store.passes import Passes

from .prompts import FORMS, are_equal, hits, prompts, read
from common.soak import count, search_at_random
from model_identity.models import new_llama
from models.tiny_models import FAMILIES, random_prompt, tiny_model

CHUNK = 2048
BITS_AND_LENGTHS = [(4, 1), (2, 63), (8, 64), (4, 129), (4, 192), (2, 600), (8, 1100)]

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:No layer of this model")
def test_hit_when_prompts_part_late_then_equals_a_cold_read(family: str, form: str, tmp_path: Path):
    first, second = prompts(common=2500, first=30, second=250)
    again = second.shape[1] - 1
    assert hits(tmp_path, tiny_model(family), FORMS[form], first, second, second) == [0, CHUNK, again]


def test_passes_end_where_the_text_says_and_go_on_from_any_end():
    for num_tokens, document, ends in (
        (100, 0, [100]),
        (2049, 0, [2048, 2049]),
        (2749, 0, [2048, 2560, 2749]),
        (4223, 0, [2048, 4096, 4223]),
        (600, 600, [600]),
        (3000, 2040, [2040, 2560, 3000]),
        (8050, 7000, [2048, 4096, 6144, 7000, 7168, 7680, 8050]),
    ):
        passes = Passes(num_tokens, document)
        assert passes.ends() == ends
        assert all(passes.ends(end) == ends[index + 1 :] for index, end in enumerate(ends))


def test_hit_when_products_are_wide_then_equals_a_cold_read(tmp_path: Path):
    """Some libraries sum up 2,048 products in another order for fewer rows."""
    model, both = new_llama(intermediate_size=2048), prompts(common=1100, first=150, second=700)
    assert hits(tmp_path, model, FORMS["full"], *both) == [0, 1024]


def of_bits(bits: int) -> Any:
    return partial(QuantizedHybridCache, bits=bits)


def of_sinks(sink_tokens: int) -> Any:
    return lambda config: HybridCache(config, codec=minmax(4, sink_tokens=sink_tokens, rotate=False))


# A family, how its cache is made, the tokens in common and of each prompt alone, whether those are a document, and how
# many are found of the second prompt, and then again.
HITS: list[tuple[str, Any, tuple[int, int, int], bool, list[int]]] = [
    # All of a document is used; also where nothing of it is quantized.
    *((family, make, (2500, 20, 40), True, [2500]) for family in ("llama", "gemma3", "qwen3_next") for make in FORMS),
    *(("gemma3", "quantized", (length, 300, 400), True, [length, length + 399]) for length in (70, 150)),
    ("gemma3", of_sinks(128), (70, 300, 400), True, [70, 469]),
    *(("llama", of_bits(bits), (length, 20, 300), True, [length, length + 299]) for bits, length in BITS_AND_LENGTHS),
    # Without a document little is read again, but for short prompts.
    *(("llama", make, (common, 200, 260), False, [0]) for make in FORMS for common in (1, 128, 300)),
    *(("llama", make, (1100, 200, 700), False, [1024]) for make in FORMS),
    ("llama", of_bits(4), (3700, 300, 150), False, [3584]),
]


@pytest.mark.parametrize(("family", "make", "lengths", "is_document", "found"), HITS)
def test_hit_when_prompts_begin_alike_then_equals_a_cold_read(
    family: str, make: Any, lengths: tuple[int, int, int], is_document: bool, found: list[int], tmp_path: Path
):
    first, second = prompts(*lengths)
    document, read = lengths[0] * is_document, [first, *[second] * len(found)]
    assert hits(tmp_path, tiny_model(family), FORMS.get(make, make), *read, document=document) == [0, *found]


def test_hit_when_two_are_stored_then_the_longer_one_counts(tmp_path: Path):
    first, second = prompts(common=3001, first=1300, second=150)
    third = torch.cat([first, second], dim=1)
    found = hits(tmp_path, tiny_model("llama"), of_bits((4, 2)), first, second, first, third, second)
    assert found == [0, CHUNK, first.shape[1] - 1, 2 * CHUNK, second.shape[1] - 1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("length", "found"), [(2, 0), (4, 0), (129, 0), (700, 512), (1025, 1024)])
def test_hit_when_a_longer_prompt_is_stored_then_equals_a_cold_read(length: int, found: int, form: str, tmp_path: Path):
    longer, _ = prompts(common=1300, first=10, second=10)
    assert hits(tmp_path, tiny_model("llama"), FORMS[form], longer, longer[:, :length]) == [0, found]


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_any_history_of_a_folder_leaves_the_bits_of_a_cold_read(bits: int, dtype: torch.dtype, tmp_path: Path):
    """Prompts of any length and document, which begin as others do, each with other sinks in a folder of its own."""
    model, beginning = tiny_model("llama", dtype), random_prompt(1, 3000)
    sinks, length = st.sampled_from([0, 64, 1024]), st.one_of(*map(st.integers, (2, 128, 1000), (400, 1300, 3000)))
    described = st.tuples(length, st.integers(0, 200), st.integers(0, 200), st.integers(0, 3))
    folders = map(str, itertools.count())

    @search_at_random(5, 50)
    @given(sinks, st.lists(described, min_size=3, max_size=6))
    def search(sink_tokens: int, history: list[tuple[int, int, int, int]]) -> None:
        store = tmp_path / next(folders)
        for num_tokens, num_own, after_document, seed in history:
            common = max(0, num_tokens - num_own)
            prompt = torch.cat([beginning[:, :common], random_prompt(1, num_tokens - common + 1, seed)], dim=1)
            document = max(0, num_tokens - after_document) if seed else 0
            codec = minmax(bits, sink_tokens=sink_tokens)
            (_, states), (_, cold) = (
                read(folder, model, prompt, HybridCache(model.config, codec=codec), document)
                for folder in (store, tmp_path / next(folders))
            )
            assert are_equal(states, cold)
            count("prompts read from a folder with others")

    search()


def test_prompts_when_half_is_common_then_it_is_stored_once(tmp_path: Path):
    model, sizes = tiny_model("llama"), []
    for prompt in prompts(common=2048, first=2049, second=2049):
        read(tmp_path, model, prompt, FORMS["full"](model.config))
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "nodes").iterdir()))
    assert sizes[1] < 1.55 * sizes[0]


def test_read_when_interrupted_then_goes_on_from_the_last_pass(tmp_path: Path):
    model, make, prompt = tiny_model("llama"), FORMS["quantized"], random_prompt(1, 7000)
    _, cold = read(tmp_path / "cold", model, prompt, make(model.config))
    passes: list[int] = []

    def interrupt(num_tokens: int) -> None:
        passes.append(num_tokens)
        if sum(passes) > CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PrefixStore(tmp_path / "store").prefill(model, prompt, make(model.config), progress=interrupt)
    reused, states = read(tmp_path / "store", model, prompt, make(model.config))
    assert reused == 2 * CHUNK
    assert are_equal(states, cold)
