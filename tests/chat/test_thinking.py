"""Models that think: thoughts are kept from answers, end in time, and later prompts are those of the template."""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_hybrid_cache import PrefixStore
from hf_hybrid_cache.chat import AnswerSettings, Chat, ChatTemplate, PromptError, Thought

from chat import talks
from chat.talks import chat_of, generated, prompt_of, said
from chat.thoughts import FORMS, tokenizer_of
from common.soak import search_at_random
from models.byte_tokenizer import model_for

CUTS = st.lists(st.integers(1, 5), max_size=60)
SETTINGS = AnswerSettings(max_new_tokens=16, max_thinking_tokens=30)


@functools.cache
def model_of(name: str, context: int = 4096) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A random model, and a tokenizer with a form of thoughts."""
    tokenizer = tokenizer_of(name)
    model = model_for(tokenizer, context)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def talk_of(name: str, *, of_model: Any = (), **options: Any) -> Chat:
    model, tokenizer = model_of(name, **dict(of_model))
    return chat_of(model, tokenizer=tokenizer, **{"settings": SETTINGS} | options)


def writing(name: str, text: str, **context: int) -> AbstractContextManager[None]:
    """Let a model write a text, and its end, before it goes on by itself."""
    return talks.writing(*model_of(name, **context), text)


def asked(tokenizer: PreTrainedTokenizerFast, turns: Sequence[str], **values: Any) -> list[int]:
    """Return the prompt that a template makes of questions, and of answers as clients repeat them."""
    answers = [
        {"role": "assistant", "content": text, "reasoning_content": "Old.", "thinking": "Old."} for text in turns
    ]
    messages = [answers[n] if n % 2 else {"role": "user", "content": text} for n, text in enumerate(turns)]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **values))


def expected(name: str, prompt: list[int], settings: AnswerSettings = SETTINGS) -> list[int]:
    """Return what the random model writes: a thought that is begun and never ends is closed, and an answer follows."""
    model, tokenizer = model_of(name)
    most = 0 if settings.thinking is False else settings.max_thinking_tokens
    before: list[int] = []
    if tokenizer.decode(prompt).rstrip().endswith(("<think>", "((ponder:")):
        before = generated(model, prompt, replace(settings, max_new_tokens=most)) if most else []
        mark, lengths = FORMS[name].end.strip(), range(len(before) + 1)
        if ends := [n for n in lengths if mark in tokenizer.decode(before[:n])]:  # it ends by chance
            before = before[: ends[0]]
        else:
            before += tokenizer(FORMS[name].end)["input_ids"]
    return before + generated(model, prompt + before, settings)


@pytest.mark.parametrize("name", FORMS)
def test_thought_when_written_then_is_apart_and_not_in_later_prompts(name: str, tmp_path: Path):
    form, shown, store = FORMS[name], list[str](), PrefixStore(tmp_path, identity="with a hook")
    model, tokenizer = model_of(name)
    chat = talk_of(name, documents=(), thoughts=shown.append, store=store)
    with writing(name, f"{form.begin}Who was\n there?{form.end}Ada  was."):
        assert "".join(chat.ask("Who?")) == "Ada  was."
    first = chat.last
    assert (first.text, first.thinking, first.finish_reason) == ("Ada  was.", "Who was\n there?", "stop")
    assert all(shown[:-1])
    assert ("".join(shown), shown[-1]) == ("Who was\n there?", "")
    answer = tokenizer.decode(first.token_ids[first.thinking_tokens :], skip_special_tokens=True)
    assert answer.strip() == first.text
    turns = ["Who?", "Ada  was.", "Sure?"]
    without = replace(SETTINGS, thinking=False)
    "".join(chat.ask("Sure?", without))
    assert chat.last.thinking == ""
    assert prompt_of(chat) == asked(tokenizer, turns, enable_thinking=False)
    assert chat.last.token_ids == expected(name, prompt_of(chat), without)
    turns += [chat.turns[-1].answer, "When?"]
    for each in (chat, Chat.resume(model, tokenizer, store, settings=SETTINGS, progress=False)):
        token_ids = said(each, "When?")
        assert prompt_of(each) == asked(tokenizer, turns)
        assert token_ids == expected(name, prompt_of(each))
        each.cache.require_prefix(torch.tensor([each.token_ids]))


@pytest.mark.parametrize("name", ["R1", "R1, of many tokens", "Qwen3, begun"])
def test_thoughts_when_several_come_together_then_end_by_themselves(name: str):
    chat = talk_of(name, settings=replace(SETTINGS, max_thinking_tokens=7, temperature=5.0, seed=3))
    questions = ["Who?", "Where was it?", "On which day of the week?"]
    alone = list(chat.ask_all(questions))
    together = list(chat.ask_all(questions, at_once=3))
    assert [each.together for each in together] == [3, 3, 3]
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.thinking, one.text) == (other.token_ids, other.thinking, other.text)
        assert len(one.token_ids) - one.thinking_tokens == SETTINGS.max_new_tokens


@pytest.mark.parametrize("most", [0, 1, 64])
@pytest.mark.parametrize("name", ["R1, of many tokens", "gpt-oss"])
def test_thought_when_too_long_then_is_closed_and_an_answer_follows(name: str, most: int):
    form, tokenizer = FORMS[name], model_of(name)[1]
    chat = talk_of(name, settings=replace(SETTINGS, max_thinking_tokens=most))
    begun = f"{form.begin}{'Hm. ' * 30}"
    thought = tokenizer(begun)["input_ids"][: len(tokenizer(form.begin)["input_ids"]) + most]
    thought += tokenizer(form.end)["input_ids"]
    with writing(name, begun):
        chat.ask("Who?").close()
        list(chat.ask("Who?", replace(chat.settings, max_new_tokens=1)))
    assert chat.last.thinking == ("Hm. " * 30)[:most].rstrip()
    assert chat.last.token_ids[:-1] == thought
    assert (chat.last.thinking_tokens, chat.last.finish_reason) == (len(thought), "length")


def test_thought_when_the_context_is_short_then_leaves_room():
    chat = talk_of("R1, of many tokens", of_model={"context": 400}, leave=80)
    with writing("R1, of many tokens", "Hm. " * 200, context=400):
        list(chat.ask("Who?", replace(SETTINGS, max_thinking_tokens=1000)))
    assert len(chat.last.token_ids) - chat.last.thinking_tokens == SETTINGS.max_new_tokens
    assert chat.num_free < 20
    chat = talk_of(
        "R1, of many tokens", of_model={"context": 1000}, settings=replace(SETTINGS, max_thinking_tokens=1000)
    )
    assert chat.num_free >= 250 + SETTINGS.max_new_tokens  # a quarter, and the answer


def test_texts_that_end_an_answer_do_not_end_its_thought():
    chat = talk_of("R1", settings=replace(SETTINGS, stop=("was",)))
    with writing("R1", "It was so.\n</think>\n\nAda was."):
        assert "".join(chat.ask("Who?")) == "Ada "
    assert (chat.last.text, chat.last.thinking, chat.last.finish_reason) == ("Ada", "It was so.", "stop")


@pytest.mark.parametrize("values", [{"messages": []}, {"chat_template": "x"}, {"tokenize": True}])
def test_values_of_the_template_that_are_not_variables_are_refused(values: dict[str, Any]):
    with pytest.raises(PromptError, match=f"chat_template_kwargs has no place for {next(iter(values))}"):
        talk_of("gpt-oss", settings=replace(SETTINGS, chat_template_kwargs=values))


def test_document_when_a_value_changes_what_is_before_it_then_begins_anew():
    low = replace(SETTINGS, chat_template_kwargs={"reasoning_effort": "low"})
    chat, expected = talk_of("gpt-oss"), talk_of("gpt-oss", settings=low)
    said(chat, "Who?")
    list(chat.ask("Why?", low))
    list(expected.ask("Who?"))
    answer = chat.turns[0].answer
    expected.turns[0] = expected.turns[0]._replace(answer=answer, thinking=chat.turns[0].thinking)
    list(expected.ask("Why?"))
    assert prompt_of(chat) == prompt_of(expected)
    assert "low" in model_of("gpt-oss")[1].decode(prompt_of(chat))
    assert chat.last.token_ids == expected.last.token_ids


@search_at_random(60)
@given(
    name=st.sampled_from(["Qwen3", "R1", "GLM", "gpt-oss"]),
    thought=st.text("ab<>/| \n", min_size=1, max_size=12).filter(str.strip),
    answer=st.text("ab<>/| \n", min_size=1, max_size=12).filter(str.strip),
    cuts=CUTS,
)
def test_parts_of_a_text_are_the_same_however_it_is_cut(name: str, thought: str, answer: str, cuts: list[int]):
    form = ChatTemplate(model_of(name)[1]).thought
    text, pieces = f"{FORMS[name].begin}{thought}{FORMS[name].end}{answer}", list[str]()
    for size in cuts:
        pieces.append(text[:size])
        text = text[size:]
    parts = list(form.parts([*pieces, text]))
    assert "".join(part for part in parts if isinstance(part, Thought)) == thought.strip()
    assert "".join(part for part in parts if not isinstance(part, Thought)) == answer.lstrip()


@pytest.mark.parametrize("name", FORMS)
def test_a_thought_after_a_thought_is_no_part_of_the_answer(name: str):
    template, form = ChatTemplate(model_of(name)[1]), FORMS[name]
    texts = [f"Hm.{template.thought.close}{form.begin or template.thought.begin}Or?{form.end}Ada."]
    if template.thought.answer:  # what is neither a thought nor an answer
        texts.append(f"Hm.{template.thought.close}Or?{form.end}Ada.")
    for text in texts:
        parts = list(template.thought.parts(form.begin + text))
        assert "".join(part for part in parts if isinstance(part, Thought)) == "Hm.\n\nOr?"
        assert "".join(part for part in parts if not isinstance(part, Thought)) == "Ada."


def test_template_that_marks_no_thought_has_none():
    tokenizer = tokenizer_of("Qwen3")
    plain = "{% for m in messages %}{{ m.role }}: {{ m.thinking }} {{ m.content }}\n{% endfor %}assistant:"
    tokenizer.chat_template = plain
    assert ChatTemplate(tokenizer).thought.begin == "<think>"  # a token of the tokenizer
    tokenizer = tokenizer_of("gpt-oss")
    tokenizer.chat_template = plain
    assert ChatTemplate(tokenizer).thought is None
