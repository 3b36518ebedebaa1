"""Options of all commands: each is a field of a dataclass, and some exclude each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cli.console import consoles, exit_codes
from hf_hybrid_cache.cli.options import (
    EXCLUDING,
    Answer,
    AsJson,
    Cache,
    DocumentOption,
    Model,
    Prompt,
    Store,
    option,
    with_options,
)

from models.tiny_models import random_prompt, tiny_model

app = typer.Typer()
given: list[Any] = []


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
    answer: Answer,
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
    given[:] = [toy, prompt, cache, model, answer, store, document]


def taken(options: str) -> dict[type, Any]:
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.stderr
    return {type(each): each for each in given}


def test_option_when_it_is_one_new_field_then_commands_have_it():
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert all(each in shown for each in ("Toys", "--size", "How many."))
    assert taken("--size 3")[Toy] == Toy(3)
    assert taken("")[Toy] == Toy()


def test_options_when_given_then_are_fields_of_their_dataclasses():
    options = "--document a --document b --context 9 --bits 8 --weights 4 --stop ."
    of = taken(f"{options} --store f --store-max 20GiB --top-k 5 --temperature 0.7")
    assert of[list] == ["a", "b"]
    assert of[Prompt] == Prompt(context=9)
    assert (of[Model].name, of[Model].quantized_bits, of[Model].only_experts) == ("smollm2-135m", 4, False)
    assert of[Store] == Store(Path("f"), "20GiB")
    settings = of[Answer].settings(64)
    assert (settings.max_new_tokens, settings.top_k, settings.stop) == (64, 5, (".",))


@pytest.mark.parametrize(
    ("options", "name", "bits"),
    [
        ("", "dynamic", None),
        ("--cache quantized", "quantized", 4),
        ("--bits 2", "quantized", 2),
        ("--cache stock", "stock", None),
    ],
)
def test_cache_when_named_or_not_then_is_the_one_of_the_options(options: str, name: str, bits: int | None):
    cache = taken(options)[Cache]
    assert (cache.name, cache.quantized_bits) == (name, bits)


VALUES = {"--temperature": "1", "--repetition-penalty": "1.1", "--seed": "1", "--top-p": "0.5", "--top-k": "5"}
VALUES |= {"--cache": "dynamic", "--cpu-decode": "yes", "--context": "9", "--weights": "8", "--experts": "host"}
VALUES |= dict.fromkeys(("--document", "--store", "--prompt-file", "--question", "--remove", "--system"), "x")


@pytest.mark.parametrize(("first", "second", "way_out"), EXCLUDING)
def test_options_when_they_exclude_each_other_then_error(first: str, second: str, way_out: str):
    options = f"{first} {VALUES.get(first, '')} {second} {VALUES.get(second, '')}"
    result = CliRunner().invoke(app, options.split())
    assert (result.exit_code, result.stderr) == (2, f"error: {way_out}\n")


@pytest.mark.filterwarnings("default:The prompt is read, and not kept", "ignore:The prompt has .* context is 512")
def test_store_when_it_has_no_room_then_message_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store, model = Store(tmp_path / "prompts", "1KiB").open(), tiny_model("llama")
    assert store is not None
    assert Store().open() is None
    with exit_codes(consoles()[1]):
        store.prefill(model, random_prompt(1, 200), DynamicHybridCache(model.config), progress=False)
    assert "Raise --store-max, " in capsys.readouterr().err
