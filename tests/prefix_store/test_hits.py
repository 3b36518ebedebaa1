"""A prompt whose beginning is stored has the bits of one that is read whole."""

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
from transformers import PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, minmax
from hf_hybrid_cache.prefix_store import PrefixStore
from hf_hybrid_cache.prefix_store.keys import Passes

from .prompts import FORMS, are_equal, hits, prompts, read
from common.soak import count, search_at_random
from model_identity.models import new_llama
from models.tiny_models import random_prompt, tiny_model

CHUNK = 2048

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")


def test_passes_end_where_the_text_says_and_go_on_from_any_end():
    for num_tokens, document, ends in (
        (2049, 0, [2048, 2049]),
        (4223, 0, [2048, 4096, 4223]),
        (600, 600, [600]),
        (8050, 7000, [2048, 4096, 6144, 7000, 7168, 7680, 8050]),
    ):
        passes = Passes(num_tokens, document)
        assert passes.ends() == ends
        assert all(passes.ends(end) == ends[index + 1 :] for index, end in enumerate(ends))


def test_hit_when_products_are_wide_then_equals_a_cold_read(tmp_path: Path):
    """Some libraries sum up 2,048 products in another order for fewer rows."""
    model, both = new_llama(intermediate_size=2048), prompts(common=1100, first=150, second=700)
    assert hits(tmp_path, model, FORMS["full"], *both) == [0, 1024]


def test_prefill_when_less_is_stored_than_wanted_then_reads_nothing(tmp_path: Path):
    model, store = new_llama(), PrefixStore(tmp_path)
    document = random_prompt(1, 150)
    for at_least, stored, num_held in ((1, 0, 0), (0, 0, 150), (151, 150, 0), (150, 150, 199)):
        prompt = document if not stored else torch.cat([document, random_prompt(1, 50, 1)], dim=1)
        cache = DynamicHybridCache(model.config)
        reuse = store.prefill(model, prompt, cache, document_tokens=150, at_least=at_least, progress=False)
        assert (reuse.num_tokens, cache.get_seq_length()) == (stored, num_held)


def of_sinks(config: Any) -> HybridCache:
    return HybridCache(config, codec=minmax(4, sink_tokens=128, rotate=False))


@pytest.mark.parametrize(
    ("family", "make", "lengths", "document", "found"),
    [
        # The tokens in common and of each prompt alone, and how many are found of the second one.
        ("mistral_sliding", FORMS["full"], (2200, 30, 150), 0, CHUNK),
        ("gemma3", FORMS["offloaded"], (2200, 30, 150), 0, CHUNK),
        ("gemma4_shared", FORMS["quantized"], (2200, 30, 150), 0, CHUNK),
        ("qwen3_next", FORMS["quantized"], (2200, 30, 150), 0, CHUNK),
        ("deepseek_v3", FORMS["full"], (2200, 30, 150), 0, CHUNK),
        # All of a document, also where nothing of it is quantized.
        ("qwen3_next", FORMS["offloaded"], (2100, 20, 40), 2100, 2100),
        ("gemma3", FORMS["quantized"], (150, 300, 400), 150, 150),
        ("gemma3", of_sinks, (70, 300, 400), 70, 70),
    ],
)
@pytest.mark.filterwarnings("ignore:No layer of this model")
def test_hit_when_prompts_begin_alike_then_equals_a_cold_read(
    family: str, make: Any, lengths: tuple[int, int, int], document: int, found: int, tmp_path: Path
):
    assert hits(tmp_path, tiny_model(family), make, *prompts(*lengths), document=document) == [0, found]


def of_bits(bits: int | tuple[int, int]) -> Callable[[Any, int], HybridCache]:
    return lambda config, sink_tokens: HybridCache(config, codec=minmax(bits, sink_tokens=sink_tokens))


MAKERS: dict[str, Callable[[Any, int], HybridCache]] = {
    "full": lambda config, _: DynamicHybridCache(config),
    "offloaded": lambda config, _: OffloadedHybridCache(config),
    **{f"{bits} bits": of_bits(bits) for bits in (8, 4, 2, (4, 2))},
}
# Tokens, how many of them are its own and how many follow the document, and a seed, which is 0 without a document.
LENGTHS = st.one_of(*map(st.integers, (2, 128, 1000), (400, 1300, 3000)))
DESCRIBED = st.tuples(LENGTHS, st.integers(0, 200), st.integers(0, 200), st.integers(0, 3))
LONGER_ONES = [(3000, 50, 0, 0), (2700, 0, 0, 0), (2900, 0, 0, 0), (1300, 0, 100, 1), (1500, 300, 300, 2)]

# A document whose first block is due in the pass that follows it, and chooses the codec.
FIRST_BLOCKS = [(170, 20, 20, 1), (300, 150, 150, 1)]
# Documents that end before the sinks do, and prompts that go on from there.
SHORT_ONES = [(50, 20, 20, 1), (330, 300, 300, 1), (330, 300, 300, 1), (400, 170, 100, 1), (400, 170, 100, 1)]


@functools.cache
def model_of(dtype: torch.dtype, attention: str) -> PreTrainedModel:
    model = copy.deepcopy(tiny_model("llama", dtype))
    model.set_attn_implementation(attention)
    return model


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
def test_any_history_of_a_folder_leaves_the_bits_of_a_cold_read(tmp_path: Path):
    """Prompts of any length and document, which begin as others do, each history in a folder of its own."""
    beginning, folders = random_prompt(1, 3000), map(str, itertools.count())
    dtypes = st.sampled_from([torch.float32, torch.bfloat16])

    @search_at_random(5)
    @given(
        st.sampled_from([*MAKERS]),
        dtypes,
        st.sampled_from(["sdpa", "eager"]),
        st.sampled_from([0, 64, 1024]),
        st.lists(DESCRIBED, min_size=3, max_size=6),
    )
    @example("(4, 2) bits", torch.float32, "sdpa", 64, LONGER_ONES)
    @example("2 bits", torch.float32, "sdpa", 64, SHORT_ONES)
    @example("8 bits", torch.float32, "eager", 64, FIRST_BLOCKS)
    def search(
        maker: str, dtype: torch.dtype, attention: str, sink_tokens: int, history: list[tuple[int, int, int, int]]
    ) -> None:
        store, model, stored = tmp_path / next(folders), model_of(dtype, attention), list[np.ndarray]()
        for num_tokens, num_own, after_document, seed in history:
            common = max(0, num_tokens - num_own)
            prompt = torch.cat([beginning[:, :common], random_prompt(1, num_tokens - common + 1, seed)], dim=1)
            document = max(0, num_tokens - after_document) if seed else 0
            (found, states), (_, cold) = (
                read(folder, model, prompt, MAKERS[maker](model.config, sink_tokens), document)
                for folder in (store, tmp_path / next(folders))
            )
            assert are_equal(states, cold)
            assert found == num_found(prompt, document, stored)
            stored.append(Passes(num_tokens, document).keys(prompt[0].numpy()))
            count("prompts read from a folder with others")

    search()


def num_found(prompt: torch.Tensor, document: int, stored: list[np.ndarray]) -> int:
    """Return the last end of a pass that is kept, up to which a stored prompt has the same tokens and passes."""
    passes = Passes(prompt.shape[1] - 1, document)
    keys, ends = passes.keys(prompt[0].numpy()), [0, *passes.ends()]
    kept = [end for start, end in itertools.pairwise(ends) if passes.is_kept(start, end)]
    return max((end for end in kept if any(np.array_equal(each[:end], keys[:end]) for each in stored)), default=0)


def test_prompts_when_half_is_common_then_it_is_stored_once(tmp_path: Path):
    model, sizes = tiny_model("llama"), []
    for prompt in prompts(common=2048, first=2049, second=2049):
        read(tmp_path, model, prompt, FORMS["full"](model.config))
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")))
    assert sizes[1] < 1.55 * sizes[0]


def test_read_when_interrupted_then_goes_on_from_the_last_pass(tmp_path: Path):
    model, make, prompt = tiny_model("llama"), FORMS["quantized"], random_prompt(1, 4800)
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
