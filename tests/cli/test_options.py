"""Options of all commands: each is a field of a dataclass, and some exclude each other."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from hf_hybrid_cache.cli.console import UsageError
from hf_hybrid_cache.cli.options import (
    EXCLUDING,
    AnswerOptions,
    AsJson,
    Cache,
    DocumentOption,
    Model,
    Prompt,
    Store,
    given_text,
    option,
    with_options,
)

app = typer.Typer()
given: dict[type, Any] = {}


@dataclass(frozen=True)
class Toy:
    """Options that a command could be given beside."""

    size: Annotated[int, option("Toys", "How many.")] = 1


@app.command()
@with_options
def all_options(
    toy: Toy,
    prompt: Prompt,
    cache: Cache,
    model: Model,
    answer: AnswerOptions,
    store: Store,
    document: DocumentOption = None,
    question: str | None = None,
    prompt_file: str | None = None,
    compare: bool = False,
    resume: bool = False,
    remove: Annotated[list[str] | None, typer.Option()] = None,
    remove_all: bool = False,
    verify: bool = False,
    as_json: AsJson = False,
) -> None:
    """Take all options."""
    given.update((type(each), each) for each in (toy, prompt, cache, model, answer, store, document))


def taken(options: str) -> dict[type, Any]:
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.stderr
    return given


def test_options_are_fields_of_dataclasses_and_a_new_field_is_one():
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert all(each in shown for each in ("Toys", "--size", "How many."))
    of = taken("--size 3 --document a --document b --context 9 --weights 4 --stop . --top-k 5 --temperature 0.7")
    assert (of[Toy], of[list], of[Prompt]) == (Toy(3), ["a", "b"], Prompt(context=9))
    assert (of[Model].name, of[Model].quantized_bits, of[Model].only_experts) == ("smollm2-135m", 4, False)
    settings = of[AnswerOptions].settings(64)
    assert (settings.max_new_tokens, settings.top_k, settings.stop) == (64, 5, (".",))
    assert taken("--store f --store-max 20GiB")[Store] == Store(Path("f"), "20GiB")
    assert of[Toy] == Toy()
    caches = {
        "": ("dynamic", None),
        "--cache quantized": ("quantized", 4),
        "--bits 2": ("quantized", 2),
        "--cache stock": ("stock", None),
    }
    found = {options: taken(options)[Cache] for options in caches}
    assert {options: (cache.name, cache.quantized_bits) for options, cache in found.items()} == caches


VALUES = {"--temperature": "1", "--repetition-penalty": "1.1", "--seed": "1", "--top-p": "0.5", "--top-k": "5"}
VALUES |= {"--cache": "dynamic", "--cpu-decode": "yes", "--context": "9", "--weights": "8", "--experts": "host"}
VALUES |= dict.fromkeys(("--document", "--store", "--prompt-file", "--question", "--remove", "--system"), "x")


@pytest.mark.parametrize(("first", "second", "way_out"), EXCLUDING)
def test_options_that_exclude_each_other_are_refused_with_the_way_out(first: str, second: str, way_out: str):
    options = f"{first} {VALUES.get(first, '')} {second} {VALUES.get(second, '')}"
    result = CliRunner().invoke(app, options.split())
    assert (result.exit_code, result.stderr) == (2, f"error: {way_out}\n")


@pytest.mark.skipif(sys.getfilesystemencoding() != "utf-8", reason="bytes are passed on otherwise")
def test_a_text_that_the_locale_could_not_decode_is_read_from_its_bytes():
    undecoded = "Wer prüfte?".encode().decode("ascii", "surrogateescape")  # as Python has it with LC_ALL=C
    assert given_text("--question", undecoded) == Prompt(system=undecoded).system == "Wer prüfte?"
    assert AnswerOptions(stop=[undecoded, "ä\t"]).stop == ["Wer prüfte?", "ä\t"]
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        given_text("--question", "pr\udcfcfte")
