"""Any command line gives an answer, or a message and exit code 2, never a traceback."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import typer
from hypothesis import example, given
from typer.testing import CliRunner

from hf_hybrid_cache.cli.app import app

from common.soak import count, search_at_random
from models.word_tokenizer import word_model_in

pytestmark = pytest.mark.soak
# It would bind this process.
LEFT_OUT = ("cpu_node",)
ODD = [
    "0", "-5", "1e999GiB", "8GiB8", "NaN", "inf", "~nobody-of-this-name", "./none", "/", ".", "/dev/null", "cpu:0",
    "cpu:7", "cuda", "cuda:-1", "cuda:" + "9" * 30, "meta", "--", "%s{}", "[red]", "", " ", "1" * 30, "9" * 5000,
    "a" * 5000, "\0", "\ud800", "\udcff", "\uff18", "8\u212a",
]  # fmt: skip
GOOD = ["1", "2", "4", "8", "100", "8GiB", "30GB/s", "128", "1K", "cpu", "float32", "quantized", "stock", "Why?"]
VALUES = st.one_of(
    st.sampled_from(GOOD), st.sampled_from(ODD), st.text(st.characters(categories=None)), st.integers().map(str)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Holds a tiny model, and texts; the user's own folder is elsewhere."""
    path = word_model_in(tmp_path_factory.mktemp("model"))
    (path / "text").write_text("w5 w7 w11 w13 " * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HYBRID_CACHE_HOME", str(path / "home"))
        patch.chdir(path)
        yield path


@functools.cache
def built() -> Any:
    """The command with all its options; Typer's own runner builds it each time, which takes longer than most runs."""
    return typer.main.get_command(app)


def options_of(command: str) -> list[Any]:
    """Return all options that the command's own help lists."""
    parameters = built().commands[command].params
    return [each for each in parameters if each.param_type_name == "option" and each.name not in LEFT_OUT]


@st.composite
def arguments_of(draw: st.DrawFn, command: str, start: list[str]) -> list[str]:
    """`start` and a few options of a command, each with some value."""
    arguments = [*start]
    for option in draw(st.lists(st.sampled_from(options_of(command)), max_size=3)):
        name = draw(st.sampled_from(option.opts))
        if option.is_flag:
            arguments.append(name)
        elif draw(st.booleans()):
            arguments += [name, draw(VALUES)]
        else:
            arguments.append(f"{name}={draw(VALUES)}")
    return arguments


def check(command: str, arguments: list[str]) -> None:
    with CliRunner().isolation() as (out, err, _):
        with pytest.raises(SystemExit) as ended:
            built().main([command, *arguments], prog_name="hf-hybrid-cache")
        sys.stdout.flush()
        sys.stderr.flush()
        stdout, stderr = (stream.getvalue().decode(errors="replace") for stream in (out, err))
    count("command lines")
    assert ended.value.code in (0, 2) or (ended.value.code == 1 and "Nothing fits." in stdout), (arguments, stderr)
    assert "Traceback" not in stderr
    if ended.value.code == 2:
        assert "rror: " in stderr  # ours begins small


STARTS = (
    "plan --model .",
    "generate --model . --device cpu --max-new-tokens 3 --question=w5 --document text",
    "generate --model . --device cpu --max-new-tokens 3 --store=prompts --document text",
)


@search_at_random(16)
@given(data=st.data(), start=st.sampled_from(STARTS))
def test_a_command_answers_or_says_what_is_wrong(data: st.DataObject, start: str, folder: Path):
    command, *arguments = start.split()
    check(command, data.draw(arguments_of(command, arguments)))


@pytest.mark.parametrize("command", ["plan", "generate"])
def test_every_option_tells_odd_values_from_good_ones(command: str, folder: Path):
    for option in options_of(command):
        start = [] if option.name == "model" else ["--model", "./none"]
        for value in [] if option.is_flag else ODD:
            check(command, [*start, option.opts[0], value])


@search_at_random(8)
@given(content=st.one_of(st.binary(max_size=300), st.text(max_size=100).map(lambda text: text.encode())))
@example(content=b"\xef\xbb\xbf")
@example(content=b"w1 \xff")
def test_any_file_is_a_document_or_no_text(content: bytes, folder: Path):
    (folder / "any").write_bytes(content)
    start = ["--model", str(folder), "--device", "cpu", "--max-new-tokens", "1"]
    check("generate", [*start, "--question=w5", "--document", str(folder / "any")])
