"""Options of all commands: some exclude each other, and texts are UTF-8."""

import sys

import pytest
import typer

from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.cli.console import UsageError
from hf_hybrid_cache.cli.options import EXCLUDING, AnswerOptions, Prompt, given_text

from .commands import error_of

# Of options that do not take a number.
VALUES = {"--cache": "dynamic", "--cpu-decode": "yes", "--weights": "8", "--experts": "host"}
# What a command must be given besides.
GIVEN = {"batch": ["questions", "--out", "answers"], "store": ["folder"]}


@pytest.mark.parametrize(("first", "second", "way_out"), EXCLUDING)
def test_options_that_exclude_each_other_are_refused_with_the_way_out(first: str, second: str, way_out: str):
    refused = 0
    for name, command in vars(typer.main.get_command(app))["commands"].items():
        flags = {each.opts[0]: each.is_flag for each in command.params if each.param_type_name == "option"}
        if {first, second} <= flags.keys():
            words = [
                word
                for option in (first, second)
                for word in ([option] if flags[option] else [option, VALUES.get(option, "1")])
            ]
            assert error_of(name, *GIVEN.get(name, ()), *words) == f"error: {way_out}\n"
            refused += 1
    assert refused


@pytest.mark.skipif(sys.getfilesystemencoding() != "utf-8", reason="bytes are passed on otherwise")
def test_a_text_that_the_locale_could_not_decode_is_read_from_its_bytes():
    undecoded = "Wer prüfte?".encode().decode("ascii", "surrogateescape")  # as Python has it with LC_ALL=C
    assert given_text("--question", undecoded) == Prompt(system=undecoded).system == "Wer prüfte?"
    assert AnswerOptions(stop=[undecoded, "ä\t"]).stop == ["Wer prüfte?", "ä\t"]
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        given_text("--question", "pr\udcfcfte")
