"""Generation with drafts gives what decoding one by one gives, and leaves the cache as that does."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor, StoppingCriteria

from hf_hybrid_cache import (
    DecodeOnCPU,
    DynamicHybridCache,
    HybridCache,
    PrefixStore,
    PromptLookup,
    QuantizedHybridCache,
)
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT
from hf_hybrid_cache.chat import AnswerSettings, SettingError

from common import modes
from common.caches import CACHES
from common.interruptions import Interruption
from common.modes import Copying, ListStreamer, lookup
from common.soak import count, search_at_random
from models.tiny_models import FAMILIES, random_prompt, tiny_model

WORDS = random_prompt(1, 12)
PROMPT = WORDS.repeat(1, 8)
KINDS: dict[str, Callable[[Any], HybridCache]] = CACHES | {
    f"{bits} bits": partial(QuantizedHybridCache, bits=bits) for bits in (8, 4, 2)
}


class Counting(LogitsProcessor):
    """Changes scores by how often it was called, and notes the lengths that it was called with."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.lengths.append(input_ids.shape[1])
        scores[:, len(self.lengths) % scores.shape[1]] += 3
        return scores


class Given(LogitsProcessor):
    """Lets each token of a text be the next one, after a prompt of so many tokens."""

    def __init__(self, text: list[int], start: int):
        self._text, self._start = text, start

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, self._text[input_ids.shape[1] - self._start]] = torch.inf
        return scores


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Collect the calls of functions in a block, those of C, too."""
    calls = list[str]()
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    try:
        yield calls
    finally:
        sys.setprofile(None)


class AtLength(StoppingCriteria):
    """Stops at a length, and notes those at which it was asked."""

    def __init__(self, length: int):
        self.length, self.lengths = length, list[int]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def answer(
    cache: HybridCache, prompt: torch.Tensor = PROMPT, drafts: Any = None, model: Any = None, **options: Any
) -> Any:
    """Return the output of a generation that copies most of its prompt."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"max_new_tokens": 70, "logits_processor": [Copying()], "custom_generate": drafts} | options
    return modes.answer(model or tiny_model("llama"), prompt, cache, **given)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "sampled": lambda: {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "penalties": lambda: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 30},
    "a processor with a state": lambda: {"logits_processor": [Copying(), Counting()], "do_sample": True},
    "least tokens": lambda: {"min_new_tokens": 40, "eos_token_id": [*range(3, 128, 9)]},
    "an end": lambda: {"eos_token_id": [3, 96]},
    "a criterion": lambda: {"stopping_criteria": [AtLength(PROMPT.shape[1] + 37)]},
    "chunks": lambda: {"prefill_chunk_size": 32},
    "a length in all": lambda: {"max_new_tokens": None, "max_length": PROMPT.shape[1] + 33},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_and_cache_are_those_of_decoding_one_by_one(options: str):
    config, make, drafts = tiny_model("llama").config, OPTIONS[options], lookup()
    ours, plain = QuantizedHybridCache(config, bits=8), QuantizedHybridCache(config, bits=8)
    assert torch.equal(answer(ours, drafts=drafts, **make()), answer(plain, **make()))
    assert 0 < drafts.accepted_tokens < drafts.drafted_tokens
    assert ours.get_seq_length() == plain.get_seq_length()
    for mine, other in zip(ours.layers, plain.layers, strict=True):
        assert (mine.keys - other.keys).abs().max() < 0.05 * other.keys.abs().max()


@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@search_at_random(6)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    kind=st.sampled_from(sorted(KINDS)),
    turns=st.lists(st.tuples(st.integers(20, 60), st.booleans()), min_size=2, max_size=3),
    is_sampled=st.booleans(),
    max_tokens=st.integers(1, 15),
    seconds=st.just([0.0]) | st.lists(st.floats(1e-3, 1), min_size=20, max_size=20),  # without time it drafts the most
)
def test_history_of_drafted_and_plain_answers_is_that_of_plain_steps(
    family: str,
    kind: str,
    turns: Sequence[tuple[int, bool]],
    is_sampled: bool,
    max_tokens: int,
    seconds: Sequence[float],
):
    """Any cache and model may draft; where layers cannot go back, nothing is drafted."""
    model, text = tiny_model(family), PROMPT
    ours, plain = KINDS[kind](model.config), KINDS[kind](model.config)
    for length, is_drafted in turns:
        options = {"max_new_tokens": length, "do_sample": is_sampled, "model": model}
        clock = itertools.accumulate(itertools.cycle(seconds)).__next__
        drafts = PromptLookup(max_tokens, clock=clock) if is_drafted else None
        drafted = answer(ours, text, drafts, **options)
        assert torch.equal(drafted, answer(plain, text, **options))
        assert ours.get_seq_length() == plain.get_seq_length()
        text = torch.cat([drafted, WORDS[:, :5]], dim=1)
        count("an answer with drafts is that of plain steps", is_drafted)


def test_streamer_processor_and_criterion_get_one_token_after_the_other():
    heard: list[tuple[list[int], ...]] = []
    for drafts in (lookup(), None):
        streamer, counting, criterion = ListStreamer(), Counting(), AtLength(200)
        options = {"streamer": streamer, "logits_processor": [Copying(), counting], "stopping_criteria": [criterion]}
        answer(DynamicHybridCache(tiny_model("llama").config), drafts=drafts, **options)
        heard.append((streamer.tokens, counting.lengths, criterion.lengths))
    assert heard[0] == heard[1]


def test_scores_and_logits_of_each_token_are_returned():
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": True}
    config = tiny_model("llama").config
    ours, plain = (answer(DynamicHybridCache(config), drafts=drafts, **options) for drafts in (lookup(), None))
    assert torch.allclose(torch.stack(ours.logits), torch.stack(plain.logits), atol=1e-4)
    assert torch.allclose(torch.stack(ours.scores), torch.stack(plain.scores), atol=1e-4)
    assert ours[CACHE_ARGUMENT].get_seq_length() == plain[CACHE_ARGUMENT].get_seq_length()


def test_filled_cache_and_prefix_store_go_on_with_drafts(tmp_path: Any):
    config, expected = tiny_model("llama").config, answer(DynamicHybridCache(tiny_model("llama").config))
    filled, drafts = DynamicHybridCache(config), lookup()
    answer(filled, PROMPT[:, :60], max_new_tokens=1)
    assert torch.equal(answer(filled, drafts=drafts), expected)
    store = PrefixStore(tmp_path, drafts=drafts)
    before = drafts.accepted_tokens
    assert torch.equal(answer(DynamicHybridCache(config), drafts=store, progress=False), expected)
    assert drafts.accepted_tokens == 2 * before > 0


def test_draft_goes_on_after_a_token_that_an_edit_has_changed():
    """A match has three tokens in a row, so without that only the last two of five would be drafted."""
    prompt, drafts = torch.randperm(96, generator=torch.Generator().manual_seed(0))[None], lookup()
    edited = prompt[0].tolist()
    edited[5::6] = [96 + place for place in range(len(edited[5::6]))]
    given = Given(edited, 96)
    answer(DynamicHybridCache(tiny_model("llama").config), prompt, drafts, logits_processor=[given], max_new_tokens=90)
    assert drafts.accepted_tokens > 60


TAKES_DRAFTS: dict[str, Callable[[Any], Any]] = {
    "PromptLookup": PromptLookup,
    "PrefixStore": lambda drafts: PrefixStore("prompts", drafts=drafts),
    "DecodeOnCPU": lambda drafts: DecodeOnCPU(drafts=drafts),
    "Chat": lambda drafts: AnswerSettings(drafts=drafts),
}


@pytest.mark.parametrize("name", TAKES_DRAFTS)
def test_drafts_given_as_a_number_are_so_many_tokens_at_most(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make = TAKES_DRAFTS[name]
    for wrong in (True, 2.0, "15", object()):
        with pytest.raises((TypeError, SettingError), match=r"(drafts|max_tokens) must be an integer, got "):
            make(wrong)
    for wrong in (-1, 16):
        with pytest.raises(ValueError, match=rf"(drafts|max_tokens) must be from 0 to 15, got {wrong}"):
            make(wrong)
    if name != "Chat":
        cache = DynamicHybridCache(tiny_model("llama").config)
        extra = {"progress": False} if name == "PrefixStore" else {}
        expected = answer(DynamicHybridCache(tiny_model("llama").config))
        assert torch.equal(answer(cache, drafts=make(15), **extra), expected)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_beams": 2}, "_beam_search"),
        ({"num_return_sequences": 2, "do_sample": True}, "several sequences"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states are asked for"),
        ({"use_cache": False}, "cache that grows"),
    ],
)
def test_generation_without_drafts_is_as_before_and_tells_why(options: dict[str, Any], why: str):
    model, drafts = tiny_model("llama"), lookup()
    common = {"max_new_tokens": 9, "logits_processor": [Copying()], "do_sample": False} | options
    torch.manual_seed(0)
    ours = model.generate(PROMPT, **common, custom_generate=drafts)
    torch.manual_seed(0)
    plain = model.generate(PROMPT, **common)
    assert torch.equal(*(each if isinstance(each, torch.Tensor) else each.sequences for each in (ours, plain)))
    assert why in str(drafts)
    assert not drafts.drafted_tokens


def test_layers_that_cannot_go_back_have_no_drafts_and_it_says_so():
    model, drafts = tiny_model("qwen3_next"), lookup()
    model.generate(PROMPT, max_new_tokens=9, custom_generate=drafts)
    assert "LinearAttentionLayer cannot go back" in str(drafts)


def test_drafts_are_as_many_as_asked_for_at_most():
    drafts = lookup(2)
    answer(DynamicHybridCache(tiny_model("llama").config), drafts=drafts)
    assert 0 < drafts.drafted_tokens <= 2 * drafts.passes
    assert str(drafts).startswith(f"{drafts.accepted_tokens} of {drafts.drafted_tokens} drafted tokens")
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny_model("llama", seed=1)}):
        with pytest.raises(ValueError, match="drafts tokens, and so would"):
            answer(DynamicHybridCache(tiny_model("llama").config), drafts=drafts, **options)


def test_a_step_without_a_match_calls_little_beside_the_plain_step():
    """Calls of functions, of Python and of C, for each of a hundred tokens that have no match."""
    text = random_prompt(1, 400)
    counts = {}
    for name, most in (("drafts", 15), ("plain", 0)):
        for tokens in (20, 120):
            given = Given(text[0, 100:].tolist(), 100)
            with counted_calls() as calls:
                answer(
                    DynamicHybridCache(tiny_model("llama").config),
                    text[:, :100],
                    PromptLookup(most),
                    logits_processor=[given],
                    max_new_tokens=tokens,
                )
            counts[name, tokens] = len(calls)
    drafts, plain = ((counts[name, 120] - counts[name, 20]) / 100 for name in ("drafts", "plain"))
    assert plain < drafts < plain + 40


def test_interrupted_generation_leaves_what_was_chosen_and_goes_on():
    config = tiny_model("llama").config
    expected = answer(DynamicHybridCache(config), max_new_tokens=90)

    def interrupted(at_line: int | None, cache: HybridCache) -> Interruption:
        interruption = Interruption(KeyboardInterrupt, at_line, "drafts")
        interruption.run(lambda: answer(cache, drafts=lookup(), max_new_tokens=30))
        return interruption

    lines = interrupted(None, DynamicHybridCache(config)).lines
    for line in range(lines // 4, lines, lines // 25):
        interrupted(line, cache := DynamicHybridCache(config))
        cache.drop_unfinished()
        held = max(PROMPT.shape[1], cache.get_seq_length())
        rest = answer(cache, expected[:, : held + 1], max_new_tokens=20)
        assert torch.equal(rest, expected[:, : held + 21])
