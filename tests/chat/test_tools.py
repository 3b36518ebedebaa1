"""Calls of functions: their form is found in any chat template, and what is written in it is read."""

import functools
import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import llguidance
import pytest
from hypothesis import given

from hf_hybrid_cache.chat import AnswerSettings, Call, ChatTemplate, Conversation, Message, SettingError
from hf_hybrid_cache.chat.tools import CallForm

from chat import thoughts
from chat.calls import FORMS, called, function, tokenizer_of
from chat.talks import tokenizer_of_tests
from common.soak import search_at_random

NAMES = ["get", "get_all", "put-x"]
MARKS = ["</tool_call>", "[TOOL_CALLS]", "<|call|>", "<parameter=", "</parameter>", "</arg_value>\n", "</function>"]
TEXTS = st.text("a<>[]{}()\"'\\:, \né|", max_size=6) | st.sampled_from(MARKS)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
TYPED = {"a": TEXTS, "text-b": TEXTS, "c.d": VALUES.filter(lambda value: not isinstance(value, str))}
PARAMETERS = {name: {"properties": {key: {"type": "string"} for key in ("a", "text-b")}} for name in NAMES}
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


@st.composite
def calls_in(draw: st.DrawFn) -> tuple[str, list[tuple[str, Any]]]:
    """Draw a form and calls in it; names that are not in quotes are simple."""
    name = draw(st.sampled_from([*FORMS]))
    wild = st.dictionaries(TEXTS, VALUES, max_size=2)
    arguments = st.fixed_dictionaries({}, optional=TYPED) if FORMS[name].argument else wild
    calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
    return name, draw(calls)[: 1 if FORMS[name].has_one else 3]


def read(name: str, pieces: Iterable[str], parameters: dict[str, Any] = PARAMETERS) -> tuple[str, list[Any]]:
    """Return the text of an answer, and the names and arguments of its calls."""
    return read_by(form_of(name), pieces, parameters)


def read_by(form: CallForm, pieces: Iterable[str], parameters: dict[str, Any]) -> tuple[str, list[Any]]:
    parts = [*form.parts(pieces, parameters)]
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
@given(given=calls_in(), before=st.sampled_from(["", "I look:\n\n", "It is "]), cuts=CUTS)
def test_calls_that_a_template_writes_are_read_however_they_are_cut(
    given: tuple[str, list[tuple[str, Any]]], before: str, cuts: list[int]
):
    name, calls = given
    before = before if name != "Llama" else ""
    assert read(name, cut(before + written(name, calls), cuts)) == (before.rstrip(), calls)


@search_at_random(100)
@given(data=st.data(), name=st.sampled_from([*FORMS]), cuts=CUTS)
def test_what_begins_like_a_call_and_is_none_stays_text(data: st.DataObject, name: str, cuts: list[int]):
    """Whole calls with something amiss: of another function, cut off, or with something in the midst of it."""
    call = written(name, [("get", {"a": [1]})])
    begun, wrongs = call[: call.index("]")], [call.replace("get", "got"), call.replace("get", "get ?")]
    if not FORMS[name].argument:
        wrongs += [begun, call.replace("{", "", 1), call.replace('"a"', "a")]
    skipped = form_of(name).skipped
    wrong = data.draw(st.lists(st.sampled_from([*wrongs, "plain ", "{", "to"]), min_size=1, max_size=3))
    text = " and ".join([*wrong, *data.draw(st.sampled_from([[], [begun]]))])
    told, calls = read(name, cut(text, cuts))
    for mark in sorted(skipped, key=len, reverse=True):
        text = text.replace(mark, "")
    assert (told.split(), calls) == (text.split(), [])


def test_models_vary_the_form_and_their_calls_are_read():
    expected = [("get", {"a": 1})]
    parameters = {"get": {"properties": {"a": {"type": "integer"}}}}
    for name, text in (
        ("Hermes", '<tool_call>{"arguments":{"a":1},"name":"get"}'),
        ("Hermes", '<tool_call>\n\n{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>\n'),
        ("Llama", '\n{"type": "function", "name":"get", "parameters":{"a":1}}'),
        ("Mistral Nemo", '[TOOL_CALLS] [{"name": "get", "arguments": {"a": 1}}]'),
        ("Qwen3-Coder", "<tool_call>\n<function=get><parameter=a>1</parameter></function>\n"),
        ("GLM", "<tool_call>get<arg_key>a</arg_key> <arg_value> 1 </arg_value></tool_call>"),
        ("gpt-oss", '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>'),
    ):
        assert read(name, [text], parameters) == ("", expected)
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
    for name, text, other in (
        ("odd, marked", "@{{ key }}", "@{{ value is string }} {{ key }}"),
        ("odd, marked", " with ", " with {{ call.function.name }}: "),
        ("Mistral Small", "[TOOL_CALLS]", "[TOOL_CALLS]{{ call.id }}"),
    ):
        tokenizer = tokenizer_of(name)
        tokenizer.chat_template = tokenizer.chat_template.replace(text, other)
        assert ChatTemplate(tokenizer).calls is None


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", STRING, "5"),
        ("5", {}, 5),
        ("five", {"type": "integer"}, "five"),
        ("None", {"anyOf": [STRING, {"type": "null"}]}, None),
        ("5", {"anyOf": [STRING, {"type": "null"}]}, "5"),
        ("5", {"type": ["integer", "string"]}, 5),
        ("5", {"anyOf": [STRING, {}]}, 5),
        ("True", {"$ref": "#/$defs/text"}, "True"),
        ("True", {"$ref": "#/$defs/loop"}, True),
        ("{'a': [1, \"'\"]}", {"type": "object"}, {"a": [1, "'"]}),
        ("{1}", {"type": "object"}, "{1}"),
        ("Infinity", {}, "Infinity"),
        ("1e999", {}, "1e999"),
        ("3", {"const": 3}, 3),
    ],
)
def test_a_marked_value_has_a_type_of_its_schema(text: str, schema: dict[str, Any], value: Any):
    named = {"text": {"enum": ["True", "x"]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
    parameters = {"get": {"properties": {"a": schema}, "$defs": named}}
    assert read("odd, marked", [f"((call get with @a is {text};))"], parameters) == ("", [("get", {"a": value})])


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.argument])
def test_marks_in_a_text_are_of_it(name: str):
    begin, equals, end = FORMS[name].argument or ("", "", "")
    calls = [("get", {"a": f"{begin}a{equals}1{end}", "text-b": f"{end}{equals}{FORMS[name].call}"})]
    assert read(name, written(name, calls)) == ("", calls)


def test_marks_that_a_template_writes_around_some_texts_are_none_of_them():
    tokenizer, shown = tokenizer_of("odd, marked"), "value if value is string"
    assert shown in tokenizer.chat_template
    quoted = f"('[[' ~ value ~ ']]') if value is string and '<' in value else {shown}"
    tokenizer.chat_template = tokenizer.chat_template.replace(shown, quoted)
    form = ChatTemplate(tokenizer).calls
    assert form is not None
    call = "((call get with @a is [[<;))]];@text-b is x]];))"
    expected = ("", [("get", {"a": "<;))", "text-b": "x]]"})])
    assert all(read_by(form, cut(call, [end]), PARAMETERS) == expected for end in range(1, len(call)))


@pytest.mark.parametrize(
    ("schema", "good", "wrong"),
    [
        (STRING, ["", "a\n<", "@b is c"], []),
        (STRING | {"pattern": "^a.$"}, ["ab"], ["b", "abc"]),
        (STRING | {"pattern": "b/", "minLength": 3}, ["ab/c", "b//"], ["b/"]),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, ["x", "y z", "null"], ['"x"', "y"]),
        ({"type": "array", "items": {"$ref": "#/$defs/text"}}, ['["x"]', "[]"], ["x", '["y"]']),
        ({"enum": ["x", 3]}, ["x", "3"], ['"x"', "4"]),
    ],
)
def test_forced_marked_values_are_those_of_their_schema(schema: dict[str, Any], good: list[str], wrong: list[str]):
    get = function("get", a=schema, b={"type": "integer"})
    get["function"]["parameters"] |= {"required": ["a"], "$defs": {"text": {"enum": ["x", "y z"]}}}
    asked = Conversation((), (get, function("put")), choice="get")
    held = form_of("odd, marked").held(AnswerSettings(), asked).grammar
    assert held is not None
    for text in good:
        assert is_of(held, f"((call get with @a is {text};@b is 3; ))")
        assert is_of(held, f"((call get with @a is {text}; )) ((call get with @a is {text}; ))")
    for text in (*(f"@a is {each};" for each in wrong), "@b is 3;", ""):
        assert not is_of(held, f"((call get with {text} ))")
    free = form_of("odd, marked").held(AnswerSettings(), asked._replace(choice="auto", strict=frozenset({"put"})))
    assert free.grammar is not None
    assert is_of(free.grammar, "So.\n((call get with @e is f;@g is ; )) ((call put with  ))")
    assert not is_of(free.grammar, "((call put with @a is b; ))")


def test_a_line_end_before_the_token_of_a_call_begins_none():
    form, asked = form_of("MiniMax"), Conversation((), (function("get"),), strict=frozenset({"get"}))
    free, forced = (form.held(AnswerSettings(), asked._replace(choice=each)).grammar or "" for each in ("auto", "get"))
    assert is_of(free, "a\nb")
    assert 'start: "\\n" <[' in forced


def test_the_end_of_a_thought_that_the_prompt_begins_is_of_no_call():
    tokenizer, begin = tokenizer_of("GLM"), FORMS["GLM"].turn[0]
    calls, prompt = "{% if m.tool_calls %}", "{% if add_generation_prompt %}" + begin
    template = tokenizer.chat_template.replace(calls, "{% if not m.thinking %}</think>{% endif %}" + calls)
    tokenizer.chat_template = template.replace(prompt, f"{prompt}<think>")
    form = ChatTemplate(tokenizer).calls
    assert form is not None
    assert (form.begin, form.marks) == ("<tool_call>", {"<tool_call>"})


def is_of(grammar: str, text: str) -> bool:
    """Return whether a text has a grammar, all of it."""
    matcher, token_ids = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar), [*text.encode()]
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


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
