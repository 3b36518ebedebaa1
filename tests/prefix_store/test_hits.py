"""A prompt whose beginning is stored has the bits of one that is read whole."""

import itertools
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from hf_hybrid_cache import HybridCache, QuantizedHybridCache, minmax
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.prefix_store import PrefixStore
from hf_hybrid_cache.prefix_store.keeping import Keeper
from hf_hybrid_cache.storage import KVCodec

from .prompts import FORMS, are_equal, prompts, read
from common.soak import count, search_at_random
from models.tiny_models import FAMILIES, random_prompt, tiny_model

CHUNK = 2048

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:No layer of this model")
def test_hit_when_prompts_part_late_then_equals_a_cold_read(family: str, form: str, tmp_path: Path):
    model, make = tiny_model(family), FORMS[form]
    first, second = prompts(common=2500, first=30, second=250)
    _, cold = read(tmp_path / "cold", model, second, make(model.config))
    none, _ = read(tmp_path / "store", model, first, make(model.config))
    reused, states = read(tmp_path / "store", model, second, make(model.config))
    again, whole = read(tmp_path / "store", model, second, make(model.config))
    assert none == 0
    assert reused == (2500 if family in ("llama", "deepseek_v3") and form == "full" else CHUNK)
    # Attention to latents reads the states of codes, which depend on where the last pass ends.
    assert again == (CHUNK if (family, form) == ("deepseek_v3", "quantized") else second.shape[1] - 1)
    assert are_equal(states, cold)
    assert are_equal(whole, cold)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_hit_when_a_document_ends_there_then_all_of_it_is_used(family: str, form: str, tmp_path: Path):
    model, make = tiny_model(family), FORMS[form]
    first, second = prompts(common=2500, first=20, second=40)
    _, cold = read(tmp_path / "cold", model, second, make(model.config), document_tokens=2500)
    read(tmp_path / "store", model, first, make(model.config), document_tokens=2500)
    reused, states = read(tmp_path / "store", model, second, make(model.config), document_tokens=2500)
    assert reused == 2500
    assert are_equal(states, cold)


@pytest.mark.parametrize("codec", [None, minmax(4, sink_tokens=128, rotate=False)], ids=["chosen", "128 sinks"])
def test_hit_when_nothing_of_the_document_is_quantized_then_used(codec: KVCodec | None, tmp_path: Path):
    model = tiny_model("gemma3")
    other, prompt = prompts(common=70, first=300, second=400)

    def make() -> HybridCache:
        return QuantizedHybridCache(model.config) if codec is None else HybridCache(model.config, codec=codec)

    _, cold = read(tmp_path / "cold", model, prompt, make(), document_tokens=70)
    read(tmp_path / "store", model, other, make(), document_tokens=70)
    for stored in (70, prompt.shape[1] - 1):
        reused, states = read(tmp_path / "store", model, prompt, make(), document_tokens=70)
        assert reused == stored
        assert are_equal(states, cold)


@pytest.mark.parametrize("bits", [8, 4, 2, (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hit_when_quantized_then_equals_a_cold_read(bits: int | tuple[int, int], dtype: torch.dtype, tmp_path: Path):
    model = tiny_model("llama", dtype)
    first, second = prompts(common=3001, first=150, second=1300)
    _, cold = read(tmp_path / "cold", model, second, QuantizedHybridCache(model.config, bits=bits))
    for prompt in (first, second, first):
        read(tmp_path / "store", model, prompt, QuantizedHybridCache(model.config, bits=bits))
    third = torch.cat([second[:, :3001], first[:, 3001:], second], dim=1)
    reused, _ = read(tmp_path / "store", model, third, QuantizedHybridCache(model.config, bits=bits))
    again, states = read(tmp_path / "store", model, second, QuantizedHybridCache(model.config, bits=bits))
    assert reused == 3150  # all of the first one
    assert again == second.shape[1] - 1
    assert are_equal(states, cold)


@pytest.mark.parametrize("common", [1, 63, 64, 65, 127, 128, 129, 300])
def test_hit_when_prompts_are_short_then_equals_a_cold_read(common: int, tmp_path: Path):
    model = tiny_model("llama")
    for form, make in FORMS.items():
        first, second = prompts(common, first=200, second=260)
        _, cold = read(tmp_path / f"cold {form}", model, second, make(model.config))
        read(tmp_path / form, model, first, make(model.config))
        reused, states = read(tmp_path / form, model, second, make(model.config))
        assert reused == (common if form == "full" else 0)
        assert are_equal(states, cold)


@pytest.mark.parametrize("length", [2, 3, 4, 100, 128, 129])
def test_hit_when_a_longer_prompt_is_stored_then_equals_a_cold_read(length: int, tmp_path: Path):
    model, (longer, _) = tiny_model("llama"), prompts(common=300, first=10, second=10)
    for form, make in FORMS.items():
        _, cold = read(tmp_path / f"cold {form}", model, longer[:, :length], make(model.config))
        read(tmp_path / form, model, longer, make(model.config))
        reused, states = read(tmp_path / form, model, longer[:, :length], make(model.config))
        # A pass of fewer tokens than 128 has the bits of other kernels.
        assert reused == (128 if length == 129 and form == "full" else 0)
        assert are_equal(states, cold)


def test_quantized_prompts_when_parting_near_the_end_then_little_is_reread(tmp_path: Path):
    model = tiny_model("llama")
    first, second = prompts(common=3700, first=300, second=150)
    read(tmp_path / "store", model, first, QuantizedHybridCache(model.config))
    reused, states = read(tmp_path / "store", model, second, QuantizedHybridCache(model.config))
    _, cold = read(tmp_path / "cold", model, second, QuantizedHybridCache(model.config))
    assert reused == 3584
    assert are_equal(states, cold)


@pytest.mark.parametrize(("bits", "length"), [(8, 256), (4, 700), (4, 1151), (2, 1023)])
def test_short_prompt_when_longer_one_begins_alike_then_equals_a_cold_read(bits: int, length: int, tmp_path: Path):
    model = tiny_model("llama")
    longer, prompt = prompts(common=128, first=1200, second=length - 128)
    _, cold = read(tmp_path / "cold", model, prompt, QuantizedHybridCache(model.config, bits=bits))
    read(tmp_path / "store", model, longer, QuantizedHybridCache(model.config, bits=bits))
    _, states = read(tmp_path / "store", model, prompt, QuantizedHybridCache(model.config, bits=bits))
    assert are_equal(states, cold)


def test_prompts_when_the_usual_first_pass_is_sinks_then_equal_cold_reads(tmp_path: Path):
    model = tiny_model("llama")

    def make() -> HybridCache:
        return HybridCache(model.config, codec=minmax(4, sink_tokens=1024))

    longer, prompt = prompts(common=1200, first=1100, second=700)
    _, cold = read(tmp_path / "cold", model, prompt, make(), document_tokens=1400)
    read(tmp_path / "store", model, longer, make(), document_tokens=0)
    _, states = read(tmp_path / "store", model, prompt, make(), document_tokens=1400)
    assert are_equal(states, cold)


@pytest.mark.soak
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_any_history_of_a_folder_leaves_the_bits_of_a_cold_read(bits: int, tmp_path: Path):
    """Prompts of any length and document, which begin as others do, each with other sinks in a folder of its own."""
    model, beginning = tiny_model("llama"), random_prompt(1, 3000)
    sinks, length = st.sampled_from([0, 64, 1024]), st.one_of(*map(st.integers, (2, 128, 1000), (400, 1300, 3000)))
    described = st.tuples(length, st.integers(0, 200), st.integers(0, 200), st.integers(0, 3))
    folders = map(str, itertools.count())

    @search_at_random(10, 100)
    @given(sinks, st.lists(described, min_size=3, max_size=6))
    def search(sink_tokens: int, history: list[tuple[int, int, int, int]]) -> None:
        store = tmp_path / next(folders)
        for num_tokens, num_own, after_document, seed in history:
            common = max(0, num_tokens - num_own)
            prompt = torch.cat([beginning[:, :common], random_prompt(1, num_tokens - common + 1, seed)], dim=1)
            results = []
            for folder in (store, tmp_path / next(folders)):
                cache = HybridCache(model.config, codec=minmax(bits, sink_tokens=sink_tokens))
                document = max(0, num_tokens - after_document) if seed else 0
                results.append(read(folder, model, prompt, cache, document_tokens=document))
            (_, states), (_, cold) = results
            assert are_equal(states, cold)
            count("prompts read from a folder with others")

    search()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_hit_when_several_continue_it_then_answers_as_a_cold_read(form: str, options: dict[str, Any], tmp_path: Path):
    model, make = tiny_model("llama"), FORMS[form]
    first, second = prompts(common=2500, first=30, second=250)
    answers = []
    for folder in ("cold", "store"):
        if folder == "store":
            read(tmp_path / folder, model, first, make(model.config))
        cache = make(model.config)
        PrefixStore(tmp_path / folder).prefill(model, second, cache, progress=False)
        torch.manual_seed(0)
        answers.append(model.generate(second, **cache_argument(cache), max_new_tokens=8, **options))
    assert torch.equal(*answers)


def test_prompts_when_half_is_common_then_it_is_stored_once(tmp_path: Path):
    model, make = tiny_model("llama"), FORMS["full"]
    first, second = prompts(common=2048, first=2049, second=2049)

    def num_bytes() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "nodes").iterdir())

    read(tmp_path, model, first, make(model.config))
    one = num_bytes()
    read(tmp_path, model, second, make(model.config))
    assert num_bytes() < 1.55 * one


def test_read_when_interrupted_then_goes_on_from_the_last_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, make = tiny_model("llama"), FORMS["quantized"]
    _, prompt = prompts(common=4000, first=1, second=3000)
    _, cold = read(tmp_path / "cold", model, prompt, make(model.config))
    after_pass = Keeper.after_pass

    def interrupted(keeper: Keeper, reached: int, is_last: bool) -> None:
        after_pass(keeper, reached, is_last)
        if reached > CHUNK:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "after_pass", interrupted)
        with pytest.raises(KeyboardInterrupt):
            PrefixStore(tmp_path / "store").prefill(model, prompt, make(model.config), progress=False)
    reused, states = read(tmp_path / "store", model, prompt, make(model.config))
    assert reused == 2 * CHUNK
    assert are_equal(states, cold)


@torch.no_grad()
def test_cache_when_saved_and_loaded_then_later_passes_see_the_same_codes(tmp_path: Path):
    model = tiny_model("llama")
    _, prompt = prompts(common=300, first=1, second=400)
    caches = [QuantizedHybridCache(model.config)]
    PrefixStore(tmp_path / "store").prefill(model, prompt[:, :300], caches[0], document_tokens=300, progress=False)
    caches[0].save(tmp_path / "cache.kv")
    caches.append(HybridCache.load(tmp_path / "cache.kv", model.config))
    assert torch.equal(*(model(prompt[:, 300:], **cache_argument(cache)).logits for cache in caches))
