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
from hf_hybrid_cache.cache_argument import cache_argument

from models.tiny_models import llama, random_prompt, tiny_model

CONFIG = llama()
DOCUMENT = random_prompt(1, 40)
OTHER = torch.cat([DOCUMENT[:, :10], random_prompt(1, 70, seed=5)], dim=1)
FIRST_DIFFERENCE = next(i for i in range(10, 40) if OTHER[0, i] != DOCUMENT[0, i])
REFUSAL = f"token {FIRST_DIFFERENCE} of sequence 0 is {OTHER[0, FIRST_DIFFERENCE]}, .*whole conversation"


def answer(ids: torch.Tensor, cache: Any, model: PreTrainedModel | None = None, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 4, "do_sample": False, **options}
    return (model or tiny_model("llama")).generate(ids, **cache_argument(cache), **options)


def question(*before: torch.Tensor, seed: int = 7) -> torch.Tensor:
    """The text before, and six tokens."""
    text = torch.cat(before, dim=1)
    return torch.cat([text, random_prompt(len(text), 6, seed)], dim=1)


def read(**options: Any) -> HybridCache:
    """A cache with the document, by way of `generate`."""
    answer(DOCUMENT, cache := DynamicHybridCache(CONFIG), **options)
    return cache


@torch.no_grad()
def read_by_hand(cache: HybridCache, ids: torch.Tensor = DOCUMENT) -> HybridCache:
    tiny_model("llama")(ids, **cache_argument(cache))
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


def cropped(_: Path) -> HybridCache:
    cache = read()
    cache.go_back(30)
    return cache


def selected(_: Path) -> HybridCache:
    answer(torch.cat([random_prompt(1, 40, seed=3), DOCUMENT]), cache := DynamicHybridCache(CONFIG))
    cache.batch_select_indices(torch.tensor([1]))
    return cache


WAYS: dict[str, Callable[[Path], HybridCache]] = {
    "prefill": prefilled,
    "store": stored,
    "file": lambda folder: loaded(folder, read_by_hand(DynamicHybridCache(CONFIG)), DOCUMENT),
    "generate": lambda _: read(),
    "chunks": lambda _: read(prefill_chunk_size=16),
    "prompt lookup": lambda _: read(prompt_lookup_num_tokens=3),
    "DecodeOnCPU": lambda _: read(custom_generate=DecodeOnCPU()),
    "go back": cropped,
    "select": selected,
}


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


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
@pytest.mark.parametrize("custom", [{}, {"custom_generate": DecodeOnCPU()}], ids=["loop", "DecodeOnCPU"])
def test_another_text_when_sequences_were_expanded_then_is_refused(options: dict[str, Any], custom: dict[str, Any]):
    cache = read(**options, **custom)
    with pytest.raises(ValueError, match=REFUSAL):
        answer(OTHER, cache, **options)
    cache.go_back(40)
    answer(question(DOCUMENT), cache, **options)


def test_two_texts_when_their_sequences_are_repeated_then_each_goes_on():
    both = torch.cat([DOCUMENT, random_prompt(1, 40, seed=3)])
    answer(both, cache := DynamicHybridCache(CONFIG))
    cache.batch_repeat_interleave(2)
    cache.go_back(40)
    answer(question(both.repeat_interleave(2, dim=0)), copy.deepcopy(cache))
    with pytest.raises(ValueError, match="of sequence 1 is"):
        answer(question(both.repeat(2, 1)), cache)


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


def by_embeddings() -> HybridCache:
    model, cache = tiny_model("llama"), DynamicHybridCache(CONFIG)
    options = {"max_new_tokens": 4, "do_sample": False}
    model.generate(inputs_embeds=model.get_input_embeddings()(DOCUMENT), **cache_argument(cache), **options)
    return cache


def all_removed() -> HybridCache:
    cache = read()
    cache.crop(-100)
    return read_by_hand(cache, random_prompt(1, 20, seed=9))


def after_reset() -> HybridCache:
    cache = read()
    cache.reset()
    return cache


NOT_KNOWN: dict[str, Callable[[Path], HybridCache]] = {
    "forward pass": lambda _: read_by_hand(DynamicHybridCache(CONFIG)),
    "embeddings": lambda _: by_embeddings(),
    "file without token ids": lambda folder: loaded(folder, read()),
    "reset": lambda _: after_reset(),
    "all removed": lambda _: all_removed(),
}


@pytest.mark.parametrize("way", NOT_KNOWN)
def test_prompts_when_the_tokens_are_not_known_then_are_not_compared(way: str, tmp_path: Path):
    cache = NOT_KNOWN[way](tmp_path)
    if held := cache.get_seq_length():
        with pytest.raises(ValueError, match=rf"not known which {held} tokens .*cache\.note_tokens.*cache\.reset"):
            cache.keep_common_prefix(OTHER)
    else:
        assert cache.keep_common_prefix(OTHER[0].tolist()) == 0
    assert cache.go_back(min(30, held)) == min(30, held)
    for text in (OTHER, question(OTHER.flip(1))):
        answer(text, cache)
        if held:
            cache.go_back(min(30, held))
        else:
            cache.reset()


def test_new_tokens_alone_when_the_mask_covers_the_stored_ones_then_go_on():
    longer = question(DOCUMENT)
    cache = prefill(tiny_model("llama"), DOCUMENT, DynamicHybridCache(CONFIG), progress=False)
    new = answer(longer[:, 40:], cache, attention_mask=torch.ones_like(longer))
    assert torch.equal(new[:, 6:], answer(longer, DynamicHybridCache(CONFIG))[:, 46:])


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


def test_keep_common_prefix_leaves_a_token_of_the_prompt_to_compute():
    for prompt, left in ((DOCUMENT, 39), (DOCUMENT[:, :20], 19), (DOCUMENT[:, :1], 0)):
        cache = read()
        assert cache.keep_common_prefix(prompt) == left
        assert torch.equal(answer(prompt, cache), answer(prompt, DynamicHybridCache(CONFIG)))


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
    with pytest.raises(ValueError, match="has 3 sequences, and the cache holds 2"):
        cache.keep_common_prefix(DOCUMENT.expand(3, -1))
    assert cache.keep_common_prefix(other) == 25
    assert torch.equal(answer(other, cache), answer(other, DynamicHybridCache(CONFIG)))


@pytest.mark.parametrize("custom", [{}, {"custom_generate": DecodeOnCPU()}], ids=["loop", "DecodeOnCPU"])
def test_keep_common_prefix_after_beams_leaves_the_prompt(custom: dict[str, Any]):
    cache = DynamicHybridCache(CONFIG)
    longer = question(answer(DOCUMENT, cache, num_beams=3, **custom))
    assert cache.keep_common_prefix(longer) == 40
    expected = answer(longer, DynamicHybridCache(CONFIG), num_beams=3)
    assert torch.equal(answer(longer, cache, num_beams=3), expected)


@pytest.mark.parametrize(("ids", "reason"), [(DOCUMENT[:, :0], "no tokens"), ("text", "must be token ids")])
def test_keep_common_prefix_when_no_prompt_is_given_then_is_refused(ids: Any, reason: str):
    with pytest.raises(ValueError, match=reason):
        read().keep_common_prefix(ids)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_chat_when_the_template_changes_answers_then_answers_as_stock(family: str):
    model, ids = tiny_model(family), DOCUMENT
    cache = DynamicHybridCache(model.config)
    for seed in (1, 2, 3):
        cache.keep_common_prefix(ids)
        output = answer(ids, cache, model)
        cache.note_tokens(output)
        assert torch.equal(output, answer(ids, DynamicCache(config=model.config), model))
        ids = question(output[:, :-2], seed=seed)  # a template may drop the end, or the thoughts, of an answer
