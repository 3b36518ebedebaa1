"""The form of an answer: JSON of a schema, one of some choices, or text of a regular expression or a grammar."""

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase

# The settings of answers that are forms, of which an answer has one at most.
FORMS = ("schema", "choices", "regex", "grammar")
# Small models fill an answer with white space where they may. A schema may say otherwise by "x-guidance", but not that
# it holds in part.
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_WHOLE: Any = {"lenient": False}
Form = str | tuple[str, ...]


def checked_form(name: str, given: Any) -> Form:
    """
    Return a form so that it can be compared and hashed; files are read.

    Args:
        name: one of `FORMS`.
        given: for a schema an object, JSON text, the path of a file, or a class of pydantic; for choices texts; else a
            text.

    Raises:
        ValueError: it is no such form, or answers cannot be held to it; the message follows its name.
    """
    form: Form
    if name == "schema":
        form = _schema_text(given)
    elif name == "choices":
        if isinstance(given, str) or not isinstance(given, Sequence) or not given or not all(map(_is_text, given)):
            raise ValueError(f"must be texts, such as 'yes' and 'no', got {given!r}.")
        form = tuple(given)
    elif _is_text(given):
        form = given
    else:
        raise ValueError(f"must be a text that is not empty, got {given!r}.")
    grammar_of(name, form)
    return form


@lru_cache(64)
def grammar_of(name: str, form: Form) -> str:
    """Return the grammar of a form that was checked, as llguidance takes it."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise ValueError(f'needs {error.name}: pip install "hf_hybrid_cache[serve]".') from error

    if isinstance(form, tuple):
        grammar = LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json_text, form))}")
    elif name == "schema":
        try:
            grammar = LLMatcher.grammar_from_json_schema(form, _COMPACT, _WHOLE)
        except ValueError as error:
            raise ValueError(f"cannot be read: {error}.") from None
    else:
        grammar = LLMatcher.grammar_from_regex(form) if name == "regex" else LLMatcher.grammar_from_lark(form)
    is_wrong, [*messages] = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        raise ValueError(f"is not supported as it is; change what this names: {messages[0].strip()}")
    return grammar


def json_rule(schema: dict[str, Any]) -> str:
    """Return what stands in a grammar for JSON of a schema."""
    guidance = _COMPACT | schema.get("x-guidance", {}) | _WHOLE
    return f"%json {json_text(schema | {'x-guidance': guidance})}"


def json_text(value: object) -> str:
    """Return a value as JSON, with the characters that it has."""
    return json.dumps(value, ensure_ascii=False)


@lru_cache(2)
def tokenizer_of_forms(tokenizer: "PreTrainedTokenizerBase", vocabulary: int, ends: tuple[int, ...]) -> "LLTokenizer":
    """
    Return a tokenizer as llguidance has it, which takes a second the first time.

    Args:
        tokenizer: of the model.
        vocabulary: number of logits.
        ends: end-of-text tokens, with which an answer of a form ends.

    Raises:
        ValueError: the tokenizer cannot be used.
    """
    from llguidance.hf import from_tokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"needs a fast tokenizer, with a tokenizer.json, and {type(tokenizer).__name__} is none.")

    return from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)), eos_token=list(ends) or [0])


def _is_text(given: object) -> bool:
    return isinstance(given, str) and bool(given)


def _schema_text(given: Any) -> str:
    """Return a schema as one line of JSON."""
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    if isinstance(given, str | os.PathLike):
        is_file = not str(given).lstrip().startswith("{")
        where = f"{given} " if is_file else ""
        try:
            given = json.loads(Path(given).read_bytes() if is_file else str(given))
        except OSError as error:
            raise ValueError(f"{where}cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}is not JSON: {error}.") from None
    if not isinstance(given, dict):
        raise ValueError(f"must be an object of JSON, a file with one, or a class of pydantic, got {given!r}.")
    try:
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}.") from None
