"""A conversation that is kept goes on as if it had never ended."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_hybrid_cache import HybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.prefix_store import PrefixStore, PrefixStoreError

from .prompts import FORMS, are_equal, held, next_logits, read
from models.tiny_models import random_prompt, tiny_model

# The models have short contexts.
pytestmark = pytest.mark.filterwarnings("ignore:The prompt has .* context is 512")

DOCUMENT = random_prompt(1, 2300)


@torch.no_grad()
def say(model: PreTrainedModel, tokens: torch.Tensor, cache: HybridCache, new: torch.Tensor) -> torch.Tensor:
    """Let a model read a question, and generate 70 tokens token by token."""
    whole = torch.cat([tokens, new], dim=1)
    return model.generate(whole, **cache_argument(cache), max_new_tokens=70, do_sample=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_conversation_when_resumed_then_goes_on_to_the_bit(family: str, form: str, tmp_path: Path):
    model, store = tiny_model(family), PrefixStore(tmp_path)
    live = FORMS[form](model.config)
    tokens, length = DOCUMENT, DOCUMENT.shape[1]
    store.prefill(model, tokens, live, document_tokens=length, progress=False)
    for seed in (1, 2):
        tokens = say(model, tokens, live, random_prompt(1, 20, seed))
        store.keep(model, tokens, live, document_tokens=length, title="of two questions")
    (stored,) = store.prompts()
    assert stored.token_ids.tolist() == tokens[0].tolist()
    assert store.prompts() == [stored]
    assert (stored.document_tokens, stored.title, stored.is_conversation) == (length, "of two questions", True)
    resumed = FORMS[form](model.config)
    store.resume(model, stored, resumed)
    assert resumed.get_seq_length() == live.get_seq_length()
    assert are_equal(held(resumed), held(live))
    question = random_prompt(1, 20, 3)
    assert torch.equal(say(model, tokens, resumed, question), say(model, tokens, live, question))
    assert are_equal(held(resumed), held(live))


def test_conversation_when_kept_before_it_is_quantized_then_goes_on(tmp_path: Path):
    model, store, tokens = tiny_model("llama"), PrefixStore(tmp_path), DOCUMENT[:, :100]
    live = FORMS["quantized"](model.config)
    store.prefill(model, tokens, live, document_tokens=100, progress=False)
    for seed in (1, 2):
        resumed, own_id = FORMS["quantized"](model.config), store.keep(model, tokens, live, document_tokens=100)
        store.resume(model, next(each for each in store.prompts() if each.id == own_id), resumed)
        assert are_equal(held(resumed), held(live))
        before, tokens = tokens, say(model, tokens, live, random_prompt(1, 90, seed))
        assert torch.equal(say(model, before, resumed, random_prompt(1, 90, seed)), tokens)
        assert are_equal(held(resumed), held(live))


def test_turn_when_kept_then_writes_about_its_own_tokens(tmp_path: Path):
    model, store = tiny_model("llama"), PrefixStore(tmp_path)
    cache, length = FORMS["full"](model.config), DOCUMENT.shape[1]
    store.prefill(model, DOCUMENT, cache, document_tokens=length, progress=False)
    of_document = num_bytes(tmp_path)
    tokens = say(model, DOCUMENT, cache, random_prompt(1, 130, 1))
    store.keep(model, tokens, cache, document_tokens=length)
    # And what is stored again of the block that the document ends in, and the rest of the last block.
    most = tokens.shape[1] - length + 2 * 64
    assert num_bytes(tmp_path) - of_document < most / length * of_document + 2**14


@pytest.mark.parametrize("form", FORMS)
def test_answers_when_a_prompt_has_them_then_are_read_again(form: str, tmp_path: Path):
    model, store = tiny_model("llama"), PrefixStore(tmp_path)
    cache, length = FORMS[form](model.config), DOCUMENT.shape[1]
    store.prefill(model, DOCUMENT, cache, document_tokens=length, progress=False)
    tokens = say(model, DOCUMENT, cache, random_prompt(1, 200, 1))
    store.keep(model, tokens, cache, document_tokens=length)
    other, cold = FORMS[form](model.config), FORMS[form](model.config)
    reuse = store.prefill(model, tokens, other, document_tokens=length, progress=False)
    PrefixStore(tmp_path / "cold").prefill(model, tokens, cold, document_tokens=length, progress=False)
    assert reuse.num_tokens == length
    assert are_equal([*held(other), next_logits(model, tokens, other)], [*held(cold), next_logits(model, tokens, cold)])


@pytest.mark.parametrize("form", FORMS)
def test_conversation_when_a_turn_is_taken_back_then_kept_anew(form: str, tmp_path: Path):
    model, store = tiny_model("llama"), PrefixStore(tmp_path)
    live, length = FORMS[form](model.config), DOCUMENT.shape[1]
    store.prefill(model, DOCUMENT, live, document_tokens=length, progress=False)
    first = say(model, DOCUMENT, live, random_prompt(1, 90, 1))
    store.keep(model, first, live, document_tokens=length)
    second = say(model, first, live, random_prompt(1, 90, 2))
    store.keep(model, second, live, document_tokens=length, title="second")
    live.crop(-(live.get_seq_length() - first.shape[1] + 30))
    third = say(model, first[:, : live.get_seq_length()], live, random_prompt(1, 90, 3))
    store.keep(model, third, live, document_tokens=length, title="third")
    stored = {each.title: each for each in store.prompts()}
    assert list(stored["third"].token_ids) == third[0].tolist()
    assert list(stored["second"].token_ids) == second[0].tolist()
    resumed = FORMS[form](model.config)
    store.resume(model, stored["third"], resumed)
    assert are_equal(held(resumed), held(live))


@pytest.mark.parametrize("form", ["full", "quantized"])
def test_conversation_when_kept_twice_at_a_border_then_is_one(form: str, tmp_path: Path):
    model, store = tiny_model("llama"), PrefixStore(tmp_path)
    cache, length = FORMS[form](model.config), DOCUMENT.shape[1]
    store.prefill(model, DOCUMENT, cache, document_tokens=length, progress=False)
    tokens = say(model, DOCUMENT, cache, random_prompt(1, 63, 1))
    assert cache.get_seq_length() % 64 == 0
    ids = [store.keep(model, tokens, cache, document_tokens=length) for _ in range(2)]
    (stored,) = store.prompts()
    assert ids == [stored.id] * 2


def test_conversation_when_resumed_in_another_form_then_refused(tmp_path: Path):
    model, store = tiny_model("llama"), PrefixStore(tmp_path)
    cache, length = FORMS["full"](model.config), DOCUMENT.shape[1]
    store.prefill(model, DOCUMENT, cache, document_tokens=length, progress=False)
    (stored,) = store.prompts()
    with pytest.raises(PrefixStoreError, match="another form of cache"):
        store.resume(model, stored, FORMS["quantized"](model.config))
    store.remove(stored)
    assert store.prompts() == []
    assert num_bytes(tmp_path) == 0
    with pytest.raises(PrefixStoreError, match="cannot be gone on with"):
        store.resume(model, stored, FORMS["full"](model.config))


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "nodes").iterdir())


@pytest.mark.parametrize("length", [90, 2100])
def test_document_when_its_last_pass_is_short_then_no_prompt_finds_it(length: int, tmp_path: Path):
    model, store = tiny_model("llama"), PrefixStore(tmp_path)
    cache, document = FORMS["full"](model.config), random_prompt(1, length)
    store.prefill(model, document, cache, document_tokens=length, progress=False)
    tokens = say(model, document, cache, random_prompt(1, 30, 1))
    store.keep(model, tokens, cache, document_tokens=length)
    (stored,) = (each for each in store.prompts() if each.is_conversation)
    longer = torch.cat([document, random_prompt(1, 300, 2)], dim=1)
    other, cold = FORMS["full"](model.config), FORMS["full"](model.config)
    store.prefill(model, longer, other, progress=False)
    PrefixStore(tmp_path / "cold").prefill(model, longer, cold, progress=False)
    assert stored.document_tokens == length
    assert are_equal(held(other), held(cold))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_conversation_when_codecs_are_chosen_late_then_goes_on(family: str, tmp_path: Path):
    model, store = tiny_model(family), PrefixStore(tmp_path)
    live, document = FORMS["quantized"](model.config), random_prompt(1, 20)
    store.prefill(model, document, live, document_tokens=20, progress=False)
    short = say(model, document, live, random_prompt(1, 20, 1))
    own_id = store.keep(model, short, live, document_tokens=20)
    longer = say(model, short, live, random_prompt(1, 20, 2))
    last_id = store.keep(model, longer, live, document_tokens=20, replaces=own_id)
    stored = next(each for each in store.prompts() if each.id == last_id)
    resumed = FORMS["quantized"](model.config)
    store.resume(model, stored, resumed)
    assert are_equal(held(resumed), held(live))
    question = random_prompt(1, 200, 3)
    assert torch.equal(say(model, longer, resumed, question), say(model, longer, live, question))


def test_document_when_too_short_to_choose_codecs_then_hit_is_exact(tmp_path: Path):
    model, document = tiny_model("gemma3"), random_prompt(1, 150)
    first, second = (torch.cat([document, random_prompt(1, count, count)], dim=1) for count in (20, 200))
    _, cold = read(tmp_path / "cold", model, second, FORMS["quantized"](model.config), 150)
    read(tmp_path / "store", model, first, FORMS["quantized"](model.config), 150)
    reused, states = read(tmp_path / "store", model, second, FORMS["quantized"](model.config), 150)
    assert reused == 150
    assert are_equal(states, cold)
