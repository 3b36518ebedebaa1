"""Answers with a form have it, whatever the model would rather say, or are cut off and say so."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
import torch
from hypothesis import given
from pydantic import BaseModel
from transformers import GenerationConfig, PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.chat import AnswerSettings, SettingError
from hf_hybrid_cache.chat.choosing import Forming, Sampling
from hf_hybrid_cache.chat.forms import tokenizer_of_forms
from hf_hybrid_cache.chat.thinking import ThoughtTokens

from chat import thoughts
from chat.talks import QUESTIONS, chat_of, model_of, tokenizer_of_tests
from chat.test_thinking import talk_of, writing
from common.modes import lookup
from common.soak import count, search_at_random

SHORT = {"type": "string", "maxLength": 4}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": SHORT,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["a", 2, None]},
        "tags": {"type": "array", "items": SHORT, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
LONG = 150


class Person(BaseModel):
    name: str
    age: int | None = None


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A random model that would not end an answer before long, and may."""
    shared = model_of()
    monkeypatch.setattr(shared, "generation_config", GenerationConfig(eos_token_id=2, pad_token_id=0))
    return shared


@contextmanager
def counting_passes(model: PreTrainedModel, seen: list[int]) -> Iterator[None]:
    """Add a number for each pass of a model."""
    hook = model.model.register_forward_pre_hook(lambda *_: seen.append(1))
    try:
        yield
    finally:
        hook.remove()


def leaves() -> Any:
    numbers = st.integers(-20, 20).map(lambda least: {"type": "integer", "minimum": least, "maximum": least + 99})
    texts = st.integers(0, 3).map(lambda most: {"type": "string", "maxLength": most})
    values = st.lists(st.sampled_from(["a", "b c", 7, None, True]), min_size=1, unique_by=repr)
    return st.one_of(numbers, texts, values.map(lambda each: {"enum": each}), st.just({"type": "boolean"}))


def schemas() -> Any:
    def objects(inner: Any) -> Any:
        properties = st.dictionaries(st.sampled_from(["x", "y", 'a "b"']), inner, max_size=2)
        return properties.map(
            lambda each: {"type": "object", "properties": each, "required": [*each], "additionalProperties": False}
        )

    def lists(inner: Any) -> Any:
        return inner.map(lambda each: {"type": "array", "items": each, "maxItems": 2})

    return st.recursive(leaves(), lambda inner: objects(inner) | lists(inner), max_leaves=4)


@search_at_random(10)
@given(schema=schemas(), temperature=st.sampled_from([0.0, 1.0, 1e10]), tokens=st.integers(1, LONG))
def test_answers_of_a_schema_are_json_of_it_or_cut_off(schema: Any, temperature: float, tokens: int):
    shared = model_of()
    before, shared.generation_config = shared.generation_config, GenerationConfig(eos_token_id=2, pad_token_id=0)
    try:
        settings = AnswerSettings(
            schema=schema, temperature=temperature, seed=1 if temperature else None, max_new_tokens=tokens
        )
        answers = list(chat_of(shared, settings=settings).ask_all(QUESTIONS, at_once=3))
    finally:
        shared.generation_config = before
    for answer in answers:
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema)
            count("an answer has its schema")
        else:
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", tokens)


@pytest.mark.parametrize("settings", [{}, {"temperature": 5.0, "seed": 4}], ids=["greedy", "sampled"])
def test_answers_together_have_the_forms_and_tokens_that_they_have_alone(
    settings: dict[str, Any], model: PreTrainedModel
):
    """They end at different steps, and those that have ended take what follows for nothing."""
    chat = chat_of(model, settings=AnswerSettings(schema=SCHEMA, max_new_tokens=LONG, **settings))
    alone = [next(iter(chat.ask_all([question]))) for question in QUESTIONS]
    together = list(chat.ask_all(QUESTIONS, at_once=3))
    assert [answer.together for answer in together] == [3, 3, 3]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    for answer in together:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_answer_has_one_of_the_choices_or_the_expression_or_the_grammar(model: PreTrainedModel):
    chat = chat_of(model, settings=AnswerSettings(temperature=100.0))
    odd = ("yes", "yes, but", 'q"\\n', "/", "\n-")
    forms: list[tuple[dict[str, Any], str]] = [
        ({"choices": odd}, "|".join(map(re.escape, odd))),
        ({"regex": "[0-9]{1,3}/(a|bc)?"}, "[0-9]{1,3}/(a|bc)?"),
        ({"grammar": 'start: "<" inner ">"\ninner: /[xy]{0,3}/'}, "<[xy]{0,3}>"),
    ]
    for form, pattern in forms:
        for answer in chat.ask_all(QUESTIONS, 2, replace(chat.settings, **form)):
            token_ids = answer.token_ids
            assert re.fullmatch(pattern, str(tokenizer_of_tests().decode(token_ids[:-1]))), answer
            assert (answer.finish_reason, token_ids[-1]) == ("stop", 2)


def test_answer_when_a_stop_text_comes_then_ends_before_it_beside_others(model: PreTrainedModel):
    settings = AnswerSettings(regex="a{9}b{9}|c{3}", stop=("aaab",), repetition_penalty=1.0)
    for answer in chat_of(model, settings=replace(settings, temperature=5.0, seed=3)).ask_all(QUESTIONS, 3):
        assert (answer.text, answer.finish_reason) in [("a" * 6, "stop"), ("ccc", "stop")]


def test_answer_when_tokens_of_the_form_are_suppressed_then_has_the_form(model: PreTrainedModel):
    model.generation_config.suppress_tokens = [*range(3, 97)]
    [answer] = chat_of(model, settings=AnswerSettings(choices=("yes",))).ask_all(["Who?"])
    assert answer.text == "yes"


def test_equal_schemas_are_equal_settings_whatever_they_are_given_as(tmp_path: Path):
    path = tmp_path / "person.json"
    path.write_text(json.dumps(Person.model_json_schema(), indent=2))
    given = [Person, Person.model_json_schema(), path, str(path), path.read_text()]
    settings = {AnswerSettings(schema=each) for each in given}
    assert len(settings) == 1
    assert replace(*settings) == settings.pop()
    assert AnswerSettings(choices=["a", "b"]) == AnswerSettings(choices=("a", "b"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"schema": {"not": {}}}, r'^schema .*change what this names: Unimplemented keys: \["not"\]'),
        ({"schema": {"not": {}, "x-guidance": {"lenient": True}}}, "Unimplemented keys"),
        ({"schema": {"type": "strin"}}, "Invalid type: strin"),
        ({"schema": {"minimum": 5, "maximum": 3, "type": "integer"}}, "Unsatisfiable schema"),
        ({"schema": "no.json"}, "^schema no.json cannot be read: No such file"),
        ({"schema": "{"}, "^schema is not JSON"),
        ({"schema": '{"items":' * 9000 + "{}" + "}" * 9000}, "^schema is not JSON"),
        ({"schema": [1]}, "^schema must be an object"),
        ({"schema": {"const": {1, 2}}}, "^schema is not JSON"),
        ({"choices": "yes"}, "^choices must be texts"),
        ({"choices": ("yes", "")}, "^choices must be texts"),
        ({"regex": "(a"}, "^regex .*unclosed group"),
        ({"regex": ""}, "^regex must be a text"),
        ({"grammar": "start: other"}, '^grammar .*unknown name: "other"'),
        ({"regex": "a", "choices": ("a",)}, "^regex is a form of answers, and choices another one: drop one"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_done_is_refused_when_settings_are_made(form: dict[str, Any], message: str):
    with pytest.raises(SettingError, match=re.compile(message, re.DOTALL)):
        AnswerSettings(**form)


def test_a_form_that_a_model_cannot_write_is_refused_before_it_reads(model: PreTrainedModel):
    chat = chat_of(model)
    for settings in AnswerSettings(choices=("\u00e4",)), AnswerSettings(grammar="start: <|none|>"):
        with pytest.raises(SettingError, match=r"^(choices|grammar) is a form that no tokens of this model can go on"):
            chat.ask("Who?", settings)
        with pytest.raises(SettingError):
            chat_of(model, settings=settings)
    model.generation_config.eos_token_id = None
    with pytest.raises(SettingError, match=r"^choices needs an end-of-text token"):
        chat.ask_all(["Who?"], settings=AnswerSettings(choices=("yes",)))
    assert chat.num_missing == len(chat.token_ids)


@pytest.mark.parametrize("name", thoughts.FORMS)
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_answer_after_a_thought_has_the_form_and_the_thought_is_free(name: str, temperature: float):
    form = thoughts.FORMS[name]
    settings = AnswerSettings(schema=SCHEMA, temperature=temperature, max_new_tokens=LONG, max_thinking_tokens=30)
    chat = talk_of(name, documents=(), settings=settings)
    for thought, written in ("Who was\n there?", f"{form.begin}Who was\n there?{form.end}Ada was."), (None, "Ada"):
        with writing(name, written):
            "".join(chat.ask("Who?"))
        assert thought in (None, chat.last.thinking)
        assert chat.last.finish_reason == "stop"
        jsonschema.validate(json.loads(chat.last.text), SCHEMA)


WORD = st.text("abcd", max_size=5)


@search_at_random(30)
@given(words=st.lists(WORD, min_size=2, max_size=6))
def test_tokens_when_taken_back_then_leave_those_of_a_first_call(words: list[str]):
    """Drafts are checked token after token, and what is not chosen is replaced."""
    tokenizer = tokenizer_of_tests()
    of_forms = tokenizer_of_forms(tokenizer, len(tokenizer), (2,))

    def forming() -> Forming:
        return Forming("regex", "(ab|cd)*d?", of_forms, [ThoughtTokens(None, 0, tokenizer.decode)], 1)

    def left(by: Forming, text: str) -> torch.Tensor:
        token_ids = torch.tensor([[3, *tokenizer(text)["input_ids"]]])
        return by(token_ids, torch.zeros(1, len(tokenizer))).isfinite()  # type: ignore[arg-type]

    ours = forming()
    for word in words:
        for size in range(len(word) + 1):
            assert torch.equal(left(ours, word[:size]), left(forming(), word[:size]))
            count("tokens are those of a first call")


@search_at_random(6)
@given(
    names=st.lists(st.text("abcdefgh", min_size=8, max_size=12), min_size=2, max_size=4, unique=True),
    values=st.lists(leaves(), min_size=4, max_size=4),
    seed=st.integers(0, 9),
)
def test_what_a_form_leaves_no_choice_about_is_drafted_and_accepted(names: list[str], values: list[Any], seed: int):
    """The names of properties, and what stands between them, are most of these answers."""
    model, tokenizer, settings = model_of(), tokenizer_of_tests(), AnswerSettings(temperature=1.0, seed=seed)
    properties = dict(zip(names, values, strict=False))
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    form = AnswerSettings(schema=schema).form["schema"]
    of_forms, prompt = tokenizer_of_forms(tokenizer, len(tokenizer), (2,)), torch.tensor([[7, 8, 9]])
    answers, passes = list[Any](), list[int]()
    for most in (15, 0):
        forming = Forming("schema", form, of_forms, [ThoughtTokens(None, 0, tokenizer.decode)], 3)
        seen = list[int]()
        with counting_passes(model, seen):
            answers += model.generate(
                prompt,
                **cache_argument(DynamicHybridCache(model.config)),
                custom_generate=lookup(most, forming.forced),
                logits_processor=[forming, Sampling(settings, [seed], model.device)],
                eos_token_id=2,
                pad_token_id=0,
                max_new_tokens=LONG,
            )
        passes.append(len(seen))
    assert torch.equal(*answers)
    jsonschema.validate(json.loads(tokenizer.decode(answers[0][3:], skip_special_tokens=True)), schema)
    assert passes[1] == len(answers[1]) - 3
    assert passes[0] < 0.6 * passes[1]
