"""A cache that knows its tokens refuses prompts that begin with others, in `generate` too, and no other prompts."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache, PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, HybridCache, PrefixStore, QuantizedHybridCache, prefill

from common import modes
from models.tiny_models import llama, random_prompt, tiny_model

CONFIG = llama()
DOCUMENT = random_prompt(1, 40)
OTHER = torch.cat([DOCUMENT[:, :10], random_prompt(1, 70, seed=5)], dim=1)
FIRST_DIFFERENCE = next(i for i in range(10, 40) if OTHER[0, i] != DOCUMENT[0, i])
REFUSAL = f"token {FIRST_DIFFERENCE} of sequence 0 is {OTHER[0, FIRST_DIFFERENCE]}, .*whole conversation"


def answer(ids: torch.Tensor, cache: Any, model: PreTrainedModel | None = None, **options: Any) -> torch.Tensor:
    return modes.answer(model or tiny_model("llama"), ids, cache, **{"max_new_tokens": 4} | options)


def question(*before: torch.Tensor, seed: int = 7) -> torch.Tensor:
    """The text before, and six tokens."""
    text = torch.cat(before, dim=1)
    return torch.cat([text, random_prompt(len(text), 6, seed)], dim=1)


def read(**options: Any) -> HybridCache:
    """A cache with the document, by way of `generate`."""
    answer(DOCUMENT, cache := DynamicHybridCache(CONFIG), **options)
    return cache


def read_by_hand(cache: HybridCache, ids: torch.Tensor = DOCUMENT) -> HybridCache:
    modes.read(tiny_model("llama"), ids, cache)
    return cache


def prefilled(_: Path) -> HybridCache:
    return copy.deepcopy(prefill(tiny_model("llama"), DOCUMENT, QuantizedHybridCache(CONFIG), progress=False))


def stored(folder: Path) -> HybridCache:
    cache, store = DynamicHybridCache(CONFIG), PrefixStore(folder)
    store.prefill(tiny_model("llama"), question(DOCUMENT), cache, progress=False)
    return cache


def loaded(folder: Path, cache: HybridCache, *token_ids: torch.Tensor) -> HybridCache:
    cache.save(folder / "document.kv", *token_ids)
    return HybridCache.load(folder / "document.kv", CONFIG)


def changed(*changes: tuple[str, Any]) -> HybridCache:
    answer(torch.cat([random_prompt(1, 40, seed=3), DOCUMENT]), cache := DynamicHybridCache(CONFIG))
    for method, argument in changes:
        getattr(cache, method)(argument)
    return cache


WAYS: dict[str, Callable[[Path], HybridCache]] = {
    "prefill": prefilled,
    "store": stored,
    "file": lambda folder: loaded(folder, read_by_hand(DynamicHybridCache(CONFIG)), DOCUMENT),
    "chunks": lambda _: read(prefill_chunk_size=16),
    "prompt lookup": lambda _: read(prompt_lookup_num_tokens=3),
    "DecodeOnCPU": lambda _: read(custom_generate=DecodeOnCPU()),
    "select and go back": lambda _: changed(("batch_select_indices", torch.tensor([1])), ("go_back", 30)),
}
BEAMS, SAMPLES = {"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}


@pytest.mark.parametrize("way", WAYS)
def test_another_text_is_refused_until_the_cache_is_at_what_it_shares(way: str, tmp_path: Path):
    cache = WAYS[way](tmp_path)
    held = cache.get_seq_length()
    for custom in ({}, {"custom_generate": DecodeOnCPU()}):
        with pytest.raises(ValueError, match=REFUSAL):
            answer(OTHER, cache, **custom)
    assert cache.get_seq_length() == held
    for text, left in ((question(DOCUMENT, seed=8), 40), (OTHER, FIRST_DIFFERENCE)):
        twin = copy.deepcopy(cache)
        assert twin.keep_common_prefix(text) == min(held, left) == twin.get_seq_length()
        assert torch.equal(answer(text, twin), answer(text, DynamicHybridCache(CONFIG)))


@pytest.mark.parametrize(
    ("options", "custom"), [(BEAMS, {}), (BEAMS, {"custom_generate": DecodeOnCPU()}), (SAMPLES, {})], ids=str
)
def test_another_text_when_sequences_were_expanded_then_is_refused(options: dict[str, Any], custom: dict[str, Any]):
    answer(DOCUMENT, cache := DynamicHybridCache(CONFIG), **options, **custom)
    with pytest.raises(ValueError, match=REFUSAL):
        answer(OTHER, cache, **options)
    longer = question(DOCUMENT)
    assert cache.keep_common_prefix(longer) == 40
    found = answer(longer, cache, **options)
    assert options is SAMPLES or torch.equal(found, answer(longer, DynamicHybridCache(CONFIG), **options))


def test_answer_when_it_comes_back_in_other_tokens_then_is_not_refused():
    cache = read()
    answered = answer(question(DOCUMENT), cache)
    answered[:, -3:] += 1
    again = answer(question(answered), cache)
    changed = question(again)
    changed[:, answered.shape[1] - 2] += 1  # now it is known
    with pytest.raises(ValueError, match=f"token {answered.shape[1] - 2} of sequence 0"):
        answer(changed, cache)


def test_padding_when_its_tokens_change_then_is_hidden_by_the_mask():
    ids, mask = random_prompt(2, 20), torch.ones(2, 30, dtype=torch.long)
    mask[0, :5] = 0
    answer(ids, cache := DynamicHybridCache(CONFIG), attention_mask=mask[:, :20])
    longer, other = question(ids), question(ids)
    other[0, :5] += 1
    expected = answer(longer, copy.deepcopy(cache), attention_mask=mask[:, :26])
    assert torch.equal(answer(other, copy.deepcopy(cache), attention_mask=mask[:, :26])[:, 20:], expected[:, 20:])
    with pytest.raises(ValueError, match="token 0 of sequence 0"):
        answer(other, cache)


def emptied(method: str, *argument: int) -> HybridCache:
    getattr(cache := read(), method)(*argument)
    return cache


NOT_KNOWN: dict[str, Callable[[Path], HybridCache]] = {
    "forward pass": lambda _: read_by_hand(DynamicHybridCache(CONFIG)),
    "file without token ids": lambda folder: loaded(folder, read()),
    "reset": lambda _: emptied("reset"),
    "all removed": lambda _: read_by_hand(emptied("crop", -100), random_prompt(1, 20, seed=9)),
}


@pytest.mark.parametrize("way", NOT_KNOWN)
def test_prompts_when_the_tokens_are_not_known_then_are_not_compared(way: str, tmp_path: Path):
    cache = NOT_KNOWN[way](tmp_path)
    held = cache.get_seq_length()
    if held:
        with pytest.raises(ValueError, match=rf"not known which {held} tokens .*cache\.note_tokens.*cache\.reset"):
            cache.keep_common_prefix(OTHER)
    else:
        assert cache.keep_common_prefix(OTHER[0].tolist()) == 0
    for text in (OTHER, question(OTHER.flip(1))):
        answer(text, copy.deepcopy(cache))


def test_prompt_when_its_call_failed_before_storing_then_is_not_known():
    model, cache = tiny_model("llama"), DynamicHybridCache(CONFIG)

    def fail(*_: object) -> None:
        raise MemoryError

    with model.model.layers[0].register_forward_pre_hook(fail), pytest.raises(MemoryError):
        answer(DOCUMENT, cache)
    answer(question(OTHER), read_by_hand(cache, OTHER))


def test_prompt_when_the_caller_writes_to_it_afterwards_then_stays_known():
    ids = DOCUMENT.clone()
    with torch.inference_mode():
        answer(ids, cache := DynamicHybridCache(CONFIG))
    ids[:] = 5
    answer(question(DOCUMENT, random_prompt(1, 4)), copy.deepcopy(cache))
    with pytest.raises(ValueError, match="does not go on with"):
        answer(question(ids, random_prompt(1, 4)), cache)


def test_encoder_decoder_when_its_decoder_goes_on_then_is_not_refused():
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**sizes, num_layers=2)).eval()
    cache = EncoderDecoderCache(DynamicHybridCache(model.config), DynamicCache(config=model.config))
    answer(DOCUMENT, cache, model)
    cache.self_attention_cache.reset()
    cache.cross_attention_cache = DynamicCache(config=model.config)
    cache.is_updated.clear()
    again = answer(OTHER, cache, model)
    fresh = EncoderDecoderCache(DynamicHybridCache(model.config), DynamicCache(config=model.config))
    assert torch.equal(again, answer(OTHER, fresh, model))


def test_beams_when_recurrent_states_are_of_one_sequence_then_are_refused():
    model, beams = tiny_model("qwen3_next"), {"num_beams": 3}
    caches = [prefill(model, DOCUMENT, DynamicHybridCache(model.config), progress=False) for _ in range(2)]
    with pytest.raises(ValueError, match=r"computes 3 sequences, .* stored of 1\. Call cache\.batch_repeat_interleave"):
        answer(question(DOCUMENT), caches[0], model, **beams)
    caches[1].batch_repeat_interleave(3)
    expected = answer(question(DOCUMENT), DynamicCache(config=model.config), model, **beams)
    assert torch.equal(answer(question(DOCUMENT), caches[1], model, **beams), expected)


# Back to what a prompt begins with


def test_answer_when_noted_then_stays_and_else_is_read_again():
    cache = DynamicHybridCache(CONFIG)
    output = answer(DOCUMENT, cache)
    longer = question(output)
    unnoted, noted = copy.deepcopy(cache), output.clone()
    cache.note_tokens(noted)
    noted.zero_()
    cache.require_prefix(longer)
    assert cache.keep_common_prefix(longer) == 43 == output.shape[1] - 1
    assert unnoted.keep_common_prefix(longer) == 40
    assert torch.equal(answer(longer, cache), answer(longer, DynamicCache(config=CONFIG)))


def test_keep_common_prefix_of_several_texts_ends_where_the_first_differs():
    both = torch.cat([DOCUMENT, random_prompt(1, 40, seed=3)])
    other = both.clone()
    other[0, 30], other[1, 25] = 0, 0
    cache = DynamicHybridCache(CONFIG)
    answer(both, cache)
    repeated = copy.deepcopy(cache)
    for ids, reason in (
        (DOCUMENT.expand(3, -1), "has 3 sequences, and the cache holds 2"),
        (DOCUMENT[:, :0], "no tokens"),
        ("text", "must be token ids"),
    ):
        with pytest.raises(ValueError, match=reason):
            cache.keep_common_prefix(ids)
    assert cache.keep_common_prefix(other) == 25
    for prompt, left in ((other, 25), (both[:, :20], 19), (both[:, :1], 0)):  # one is left to compute
        assert cache.keep_common_prefix(prompt) == left
        assert torch.equal(answer(prompt, cache), answer(prompt, DynamicHybridCache(CONFIG)))
    repeated.batch_repeat_interleave(2)
    repeated.go_back(40)
    answer(question(both.repeat_interleave(2, dim=0)), copy.deepcopy(repeated))
    with pytest.raises(ValueError, match="of sequence 1 is"):
        answer(question(both.repeat(2, 1)), repeated)
