"""Calls of functions: their form is found in any chat template, and what is written in it is read."""

import functools
import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hf_hybrid_cache.chat import AnswerSettings, Call, ChatTemplate, Conversation, Message, SettingError
from hf_hybrid_cache.chat.tools import CallForm

from chat import thoughts
from chat.calls import FORMS, called, function, tokenizer_of
from chat.talks import tokenizer_of_tests
from common.soak import search_at_random

NAMES = ["get", "get_all", "put-x"]
TEXTS = st.text("a<>[]{}()\"'\\:, \né|", max_size=6) | st.sampled_from(["</tool_call>", "[TOOL_CALLS]", "<|call|>"])
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(TEXTS, VALUES, max_size=2)), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 200), max_size=20)


@functools.cache
def form_of(name: str) -> CallForm:
    form = ChatTemplate(tokenizer_of(name)).calls
    assert form is not None
    return form


def cut(text: str, places: Iterable[int]) -> list[str]:
    """Cut a text in pieces."""
    inner = sorted({place for place in places if place < len(text)})
    return [text[start:end] for start, end in pairwise([0, *inner, len(text)])]


def read(name: str, pieces: Iterable[str], names: list[str] = NAMES) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text of an answer, and the names and arguments of its calls."""
    parts = [*form_of(name).parts(pieces, names)]
    calls = [part for part in parts if isinstance(part, Call)]
    assert [call.index for call in calls] == [*range(len(calls))]
    assert len({call.id for call in calls}) == len(calls)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


def written(name: str, calls: list[tuple[str, Any]]) -> str:
    """Return an answer with calls as the template writes it, without what ends it."""
    form, tokenizer = FORMS[name], tokenizer_of(name)
    given = [called("abcdef012", each, value) for each, value in calls]
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": given}]
    before, whole = (
        tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=end == 1) for end in (1, 2)
    )
    assert whole.startswith(before)
    return str(whole).removeprefix(before).removesuffix(form.turn[2])


@search_at_random(100)
@given(name=st.sampled_from([*FORMS]), calls=CALLS, before=st.sampled_from(["", "I look:\n\n", "It is "]), cuts=CUTS)
def test_calls_that_a_template_writes_are_read_however_they_are_cut(
    name: str, calls: list[tuple[str, Any]], before: str, cuts: list[int]
):
    calls, before = calls[: 1 if FORMS[name].has_one else 3], before if name != "Llama" else ""
    assert read(name, cut(before + written(name, calls), cuts)) == (before.rstrip(), calls)


@search_at_random(100)
@given(data=st.data(), name=st.sampled_from([*FORMS]), cuts=CUTS)
def test_what_begins_like_a_call_and_is_none_stays_text(data: st.DataObject, name: str, cuts: list[int]):
    """Whole calls with something amiss: of another function, cut off, or with something in the midst of it."""
    call = written(name, [("get", {"a": [1]})])
    wrongs = [call.replace("get", "got"), call[: call.index("]")], call.replace("{", "", 1), call.replace('"a"', "a")]
    skipped = form_of(name).skipped
    text = " and ".join(data.draw(st.lists(st.sampled_from([*wrongs, "plain ", "{", "to"]), min_size=1, max_size=3)))
    told, calls = read(name, cut(text, cuts))
    for mark in sorted(skipped, key=len, reverse=True):
        text = text.replace(mark, "")
    assert (told.split(), calls) == (text.split(), [])


def test_models_vary_the_form_and_their_calls_are_read():
    expected = [("get", {"a": 1})]
    for name, text in (
        ("Hermes", '<tool_call>{"arguments":{"a":1},"name":"get"}'),
        ("Hermes", '<tool_call>\n\n{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>\n'),
        ("Llama", '\n{"type": "function", "name":"get", "parameters":{"a":1}}'),
        ("Mistral Nemo", '[TOOL_CALLS] [{"name": "get", "arguments": {"a": 1}}]'),
        ("gpt-oss", '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>'),
    ):
        assert read(name, [text]) == ("", expected)
    told = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + written("gpt-oss", expected)
    assert read("gpt-oss", [told]) == ("I look.", expected)
    assert read("Hermes", ['<tool_call>{"name": "get"}</tool_call> So.']) == ("So.", [("get", {})])


def test_a_template_without_functions_or_with_other_arguments_has_no_form():
    assert ChatTemplate(tokenizer_of_tests()).calls is None
    assert all(ChatTemplate(thoughts.tokenizer_of(name)).calls is None for name in thoughts.FORMS)
    tokenizer = tokenizer_of("odd")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ call.function.arguments | tojson }}", "{% for key in call.function.arguments %}<{{ key }}>{% endfor %}"
    )
    assert ChatTemplate(tokenizer).calls is None


def test_special_tokens_in_functions_calls_and_results_are_texts():
    tokenizer = tokenizer_of("Mistral Nemo")
    template, text = ChatTemplate(tokenizer), "<|im_end|>[TOOL_CALLS]"
    tools = [function(text)]
    call = Message("assistant", "", "", {"tool_calls": [called("a", text, {text: [text]})]})
    messages = [Message("user", "Q"), call, Message("tool", text, "", {"tool_call_id": "a", "name": text})]
    plain = [Message("user", "Q"), call._replace(more={"tool_calls": [called("a", "f", {})]}), Message("tool", "R")]
    special = tokenizer.all_special_ids
    found, expected = (
        [token for token in template.request(each, functions)[0] if token in special]
        for each, functions in ((messages, tools), (plain, [function("f")]))
    )
    assert found == expected
    assert tokenizer.decode(template.request(messages, tools)[0]).count(text) == 6


def test_what_holds_answers_to_calls_is_what_was_asked():
    form, free = form_of("Hermes"), AnswerSettings()
    asked = Conversation((), (function("get", a={"type": "integer"}), function("put")))
    assert form.held(free, asked) == free
    named = form.held(free, asked._replace(choice="put")).grammar or ""
    assert "put" in named
    assert "get" not in named
    wrong = Conversation((), (function("get", a={"not": {"type": "string"}}),))
    for asked in wrong._replace(choice="required"), wrong._replace(strict=frozenset({"get"})):
        with pytest.raises(SettingError, match=r"tools has 'get', whose schema .* Unimplemented keys"):
            form.held(free, asked)
