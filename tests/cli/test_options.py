"""Options of all commands: a field of a dataclass each, checked before anything heavy is imported."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.cli.app import app as commands
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
    UsageError,
    option,
    with_options,
)

from models.byte_tokenizer import model_in
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


def invoke(*arguments: str | Path, of: typer.Typer = app) -> Any:
    return CliRunner().invoke(of, [str(argument) for argument in arguments])


def taken(*arguments: str) -> dict[type, Any]:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    return {type(each): each for each in given}


def test_option_when_it_is_one_new_field_then_commands_have_it():
    shown = " ".join(invoke("--help").stdout.split())
    assert "Toys" in shown
    assert "--size" in shown
    assert "How many." in shown
    assert taken("--size", "3")[Toy] == Toy(3)
    assert taken()[Toy] == Toy()


def test_options_when_given_then_are_fields_of_their_dataclasses():
    options = ["--document", "a", "--document", "b", "--context", "9", "--bits", "8", "--weights", "4", "--stop", "."]
    of = taken(*options, "--store", "f", "--store-max", "20GiB", "--top-k", "5", "--temperature", "0.7")
    assert of[list] == ["a", "b"]
    assert of[Prompt] == Prompt(context=9)
    assert (of[Cache].name, of[Cache].quantized_bits) == ("quantized", 8)
    assert (of[Model].name, of[Model].quantized_bits, of[Model].only_experts) == ("smollm2-135m", 4, False)
    assert of[Store] == Store(Path("f"), "20GiB")
    settings = of[Answer].settings(64)
    assert (settings.max_new_tokens, settings.top_k, settings.stop) == (64, 5, (".",))


@pytest.mark.parametrize(
    ("options", "name", "bits"),
    [
        ((), "dynamic", None),
        (("--cache", "quantized"), "quantized", 4),
        (("--bits", "2"), "quantized", 2),
        (("--cache", "stock"), "stock", None),
    ],
)
def test_cache_when_named_or_not_then_is_the_one_of_the_options(options: tuple[str, ...], name: str, bits: int | None):
    cache = taken(*options)[Cache]
    assert (cache.name, cache.quantized_bits) == (name, bits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cache static", "--cache 'static' is not one of stock, dynamic, offloaded, quantized."),
        ("--bits 3", "--bits 3 is not one of 8, 4, 2."),
        ("--cache offloaded --bits 4", "--bits is for --cache quantized, and the cache is offloaded"),
        ("--cpu-decode 0.6", "--cpu-decode '0.6' is not one of yes, no."),
        ("--cache stock --cpu-decode yes", "--cache stock is transformers' own: drop --cpu-decode."),
        ("--weights 2", "--weights 2 is not one of 8, 4."),
        ("--expert-bits 4", "--expert-bits 4 is for experts in host memory: add --experts host."),
        ("--experts disk", "--experts 'disk' is not one of host."),
        ("--dtype float64", "--dtype 'float64' is not one of float32, bfloat16, float16."),
        ("--top-p 0.9", "--top-p is for sampling"),
        ("--seed 0", "--seed is for sampling"),
        ("--temperature 1 --top-p 1.5", "--top-p must be above 0 and at most 1, got 1.5."),
        ("--temperature nan", "--temperature must be a number from 0 on, got nan."),
        ("--repetition-penalty 0", "--repetition-penalty must be a number above 0, got 0.0."),
        ("--max-new-tokens 0", "--max-new-tokens must be 1 or more, got 0."),
        ("--system \udcff", "--system '\\udcff' is not UTF-8 text."),
        ("--stop \udcff", "--stop '\\udcff' is not UTF-8 text."),
        ("--store-max 20GiB", "--store-max is the limit of a prefix store: name its folder with --store."),
        ("--store f --store-max many", "--store-max: 'many' is not a size in bytes"),
    ],
)
def test_option_when_its_value_is_none_that_there_is_then_error(options: str, message: str):
    result = invoke(*options.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")


VALUES = {"--temperature": "1", "--repetition-penalty": "1.1", "--seed": "1", "--top-p": "0.5", "--top-k": "5"}
VALUES |= {"--cache": "dynamic", "--cpu-decode": "yes", "--context": "9", "--weights": "8", "--experts": "host"}
VALUES |= dict.fromkeys(("--document", "--store", "--prompt-file", "--question", "--remove", "--system"), "x")


@pytest.mark.parametrize(("first", "second", "way_out"), EXCLUDING)
def test_options_when_they_exclude_each_other_then_error(first: str, second: str, way_out: str):
    result = invoke(*f"{first} {VALUES.get(first, '')} {second} {VALUES.get(second, '')}".split())
    assert (result.exit_code, result.stderr) == (2, f"error: {way_out}\n")


def test_cache_of_transformers_when_one_of_ours_is_needed_then_error():
    with pytest.raises(UsageError, match="--cache stock is transformers' own, and --store needs one of dynamic"):
        Cache("stock").require_ours("--store")


@pytest.mark.filterwarnings("default:The prompt is read, and not kept", "ignore:The prompt has .* context is 512")
def test_store_when_it_has_no_room_then_message_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store, model = Store(tmp_path / "prompts", "1KiB").open(), tiny_model("llama")
    assert store is not None
    assert Store().open() is None
    with exit_codes(consoles()[1]):
        store.prefill(model, random_prompt(1, 200), DynamicHybridCache(model.config), progress=False)
    assert "Raise --store-max, " in capsys.readouterr().err


@pytest.fixture(scope="module")
def about(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a question about a short text to a tiny model that answers in bytes."""
    folder = tmp_path_factory.mktemp("model")
    document = folder / "a.txt"
    document.write_text("Ada signed the contract in the presence of two witnesses. " * 4)
    model = ["--model", str(model_in(folder, 2048)), "--device", "cpu", "--dtype", "float32"]
    return [*model, "--document", str(document), "--question", "Who signed?", "--max-new-tokens", "6"]


def answered(about: list[str], *options: str) -> dict[str, Any]:
    result = invoke("generate", *about, "--json", "--quiet", *options, of=commands)
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def test_seed_when_the_same_then_samples_are_the_same(about: list[str]):
    hot = ["--temperature", "3", "--max-new-tokens", "12"]
    first, again, other = (answered(about, *hot, "--seed", seed)["answer"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_sample_when_it_is_of_the_likeliest_token_then_is_greedy(about: list[str]):
    narrow = ["--temperature", "1", "--top-p", "0.0001", "--seed", "3"]
    assert answered(about, *narrow)["answer"] == answered(about)["answer"]


def test_system_message_when_given_then_stands_in_the_prompt(about: list[str]):
    plain, told = answered(about), answered(about, "--system", "Answer in capital letters, please, always.")
    assert plain["prompt_tokens"] < told["prompt_tokens"]
