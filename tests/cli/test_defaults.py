"""A file with defaults of options: what holds, what is set aside, and what is refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .commands import SHORT, error_of, lines, run
from chat.thoughts import tokenizer_of
from models.byte_tokenizer import model_in

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the file where it is looked for."""
    path = tmp_path / "config" / "hf_hybrid_cache" / "defaults.toml"
    path.parent.mkdir(parents=True)
    monkeypatch.delenv("HF_HYBRID_CACHE_DEFAULTS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def written(text: str) -> Path:
        path.write_text(text)
        return path

    return written


def test_what_is_typed_comes_first_and_sets_aside_defaults_it_excludes(
    model: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write(
        f'model = "{model}"\nbits = 8\nmax_new_tokens = 3\nstop = ["é", "ü"]\nstore = "{tmp_path}/prompts"\n'
        '[generate]\nweights = 8\njson = true\n[chat]\nmax-new-tokens = 2\n[plan]\ncontext = "1K"\n'
    )
    result = run("generate", "Who?", *SHORT)
    (found,) = lines(result)
    assert (found["model"], found["bits"], found["weights"], found["answer_tokens"]) == (str(model), 8, 8, 3)
    assert f"{path}: model = {model}, bits = 8, max_new_tokens = 3, stop = ['é', 'ü'], store = " in result.stderr
    (typed,) = lines(run("generate", "Who?", *SHORT, "--bits", 4, "--max-new-tokens=4", "--quiet"))
    assert (typed["bits"], typed["answer_tokens"]) == (4, 4)
    (other,) = lines(run("generate", "Who?", *SHORT, "--cache", "offloaded"))
    assert (other["cache"], other["bits"]) == ("offloaded", None)
    (tmp_path / "text").write_text("Ada.")
    assert len(lines(run("generate", "Who?", "--compare", "--document", tmp_path / "text", *SHORT))) == 4
    assert "going on with Who?" in run("chat", "--resume", "--device", "cpu", typed="").stderr
    assert str(path) not in run("store", tmp_path / "prompts").stderr
    monkeypatch.setenv("HF_HYBRID_CACHE_DEFAULTS", os.devnull)
    assert "model = " not in run("generate", "Who?", "--model", model, *SHORT, "--max-new-tokens", 1).stderr


@pytest.mark.parametrize(("said", "typed"), [("false", []), ("true", ["--no-thinking"])])
def test_a_switch_of_the_file_holds_when_off_and_gives_way_to_its_opposite(
    said: str, typed: list[str], write: Write, tmp_path: Path
):
    folder = model_in(tmp_path / "model", 1024, tokenizer_of("R1, of many tokens"), eos_token_id=None)
    write(f"thinking = {said}\nmax-new-tokens = 2")
    (found,) = lines(run("generate", "Who?", "--model", folder, *SHORT, *typed, "--json"))
    assert found["thinking"] == ""
    (found,) = lines(run("generate", "Who?", "--model", folder, *SHORT, "--thinking", "--json"))
    assert found["thinking"]


REFUSED = {
    "modle = 'a'": ": modle is not an option. Did you mean model?",
    "folder = 'a'": ": folder is not an option.",
    "[generat]\nbits = 8": ": generat is not a command. Did you mean generate?",
    "[chat]\nat_once = 8": ": at-once is not an option of chat.",
    "bits = ": "defaults.toml: Invalid value (at end of document)",
    "[generate]\njson = 1": ": json is true or false, got 1.",
    "bits = 3": "'3' is not one of '8', '4', '2'.",
    "bits = [8, 4]": "'[8, 4]' is not one of '8', '4', '2'.",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_file_with_what_is_no_default_is_refused_by_name(text: str, write: Write):
    write(text)
    assert REFUSED[text] in error_of("generate", "Who?")
    assert run("generate", "--help").stderr == ""
