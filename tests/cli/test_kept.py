"""Conversations that are kept in a folder and go on another day, and the list of what a folder keeps."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.prefix_store import PrefixStore

from .terminals import CTRL_D, ENTER, PROMPT, Terminal

TEXT = "Nobody said a word. " * 12 + "It was signed by Ada in London."


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "report.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


def command(model: Path, *options: str | Path) -> list[str]:
    return ["chat", "--model", str(model), "--device", "cpu", "--max-new-tokens", "5", *map(str, options)]


def converse(model: Path, options: list[str | Path], *lines: str) -> Any:
    result = CliRunner().invoke(app, command(model, *options), input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.stderr
    return result


def kept(*options: str | Path) -> Any:
    return CliRunner().invoke(app, ["kept", *map(str, options)])


def listed(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in kept(folder, "--json").stdout.splitlines()]


@pytest.mark.parametrize("form", [[], ["--bits", "4"], ["--cache", "offloaded"]])
def test_conversation_when_resumed_then_goes_on_where_it_ended(
    form: list[str], model: Path, report: Path, folder: Path
):
    whole = converse(model, ["--document", report, *form], "Who?", "Where?", "Why?", "/undo", "When?")
    talk = converse(model, ["--document", report, "--keep", folder, *form], "Who?", "Where?")
    assert whole.stdout.startswith(talk.stdout)
    (only,) = listed(folder)
    assert (only["kind"], only["title"]) == ("conversation", "report.txt: Who?")
    later = converse(model, ["--keep", folder, "--resume", *form], "Why?", "/undo", "When?")
    assert talk.stdout + later.stdout == whole.stdout
    assert "last question: Where?" in later.stderr
    assert [each["kind"] for each in listed(folder)] == ["conversation"]
    last = converse(model, ["--keep", folder, "--resume", "1", *form], "/undo", "/retry")
    assert re.findall("taken back: (.*)", last.stderr) == ["When?"]
    assert (
        last.stdout
        == whole.stdout[len(converse(model, ["--document", report, *form], "Who?").stdout) :][: len(last.stdout)]
    )


def test_conversation_when_turns_are_taken_back_then_has_them_no_more(model: Path, report: Path, folder: Path):
    options = ["--keep", folder, "--resume"]
    talk = converse(model, ["--document", report, "--keep", folder], "Who?", "A question of many words? " * 9, "/undo")
    (only,) = listed(folder)
    again = converse(model, options, "/retry")
    assert again.stdout == talk.stdout.splitlines(keepends=True)[0]
    (same,) = listed(folder)
    assert (same["tokens"], same["document_tokens"]) == (only["tokens"], only["document_tokens"])
    assert "Nobody" not in converse(model, options, "/forget").stdout
    (document,) = listed(folder)
    assert (document["kind"], document["tokens"]) == ("prompt", only["document_tokens"])


def test_system_message_when_set_then_document_is_kept_with_it(model: Path, report: Path, folder: Path):
    lines = ["Who?", "/system Be brief.", "Where?"]
    unkept = converse(model, ["--document", report], *lines)
    talk = converse(model, ["--document", report, "--keep", folder], *lines)
    assert talk.stdout == unkept.stdout
    kinds = {each["kind"]: each for each in listed(folder)}
    assert len(listed(folder)) == len(kinds) == 2
    more = kinds["conversation"]["document_tokens"] - kinds["prompt"]["tokens"]
    assert more == len("system\nBe brief.\n") + 2
    again = converse(model, ["--keep", folder, "--resume", kinds["conversation"]["id"][:6]], "/retry")
    assert again.stdout == unkept.stdout.splitlines(keepends=True)[-1]


def test_document_when_talked_about_again_then_is_not_read(model: Path, report: Path, folder: Path):
    first = converse(model, ["--document", report, "--keep", folder], "Who?")
    second = converse(model, ["--document", report, "--keep", folder], "/quit")
    length = listed(folder)[0]["document_tokens"]
    assert f"0 of {length:,} tokens from {folder}" in first.stderr
    assert f"{length:,} of {length:,} tokens from {folder}" in second.stderr


@pytest.mark.filterwarnings("default:The prompt is read, and not kept")
def test_conversation_when_disk_is_full_then_goes_on(
    model: Path, report: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    unkept = converse(model, ["--document", report], "Who?", "Where?")
    full = shutil.disk_usage(report)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    talk = converse(model, ["--document", report, "--keep", folder], "Who?", "Where?")
    assert talk.stdout == unkept.stdout
    assert talk.stderr.count("the conversation is not kept: ") == 1
    assert listed(folder) == []


def test_conversation_when_there_are_several_then_is_chosen_at_a_terminal(model: Path, report: Path, folder: Path):
    for question in ("Who?", "Where?"):
        converse(model, ["--document", report, "--keep", folder], question)
    program = command(model, "--keep", folder, "--resume", "--no-history")
    with Terminal("-m", "hf_hybrid_cache.cli", *program, OMP_NUM_THREADS="1") as terminal:
        shown = terminal.wait_for("which one?")
        assert [title in shown for title in ("report.txt: Who?", "report.txt: Where?")] == [True, True]
        terminal.wait_for(PROMPT)
        terminal.type(f"7{ENTER}")
        terminal.wait_for("'7' names none of 2")
        terminal.wait_for(PROMPT)
        terminal.type(f"2{ENTER}")
        terminal.wait_for("last question: Who?")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "--resume goes on with a conversation of a folder: name that with --keep."),
        (["report.txt"], "'report.txt' names a conversation to go on with: add --resume, or --document before it."),
        (["--keep", "k", "--load-cache", "x.kv"], "--load-cache goes on with a file, --keep with a folder"),
        (["--keep", "k", "--resume", "--document", "x"], "the document of the conversation: drop --document."),
        (["--keep", "k", "--resume", "--context", "9"], "the document of the conversation: drop --context."),
        (["--keep", "k", "--prefill-chunk-size", "64"], "drop --prefill-chunk-size, or --keep."),
        (["--keep", "missing", "--resume"], "There is no folder missing"),
    ],
)
def test_options_of_chat_when_they_do_not_go_together_then_error(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["chat", *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_resume_when_it_names_no_conversation_then_error(model: Path, report: Path, folder: Path):
    converse(model, ["--document", report, "--keep", folder], "/quit")
    for which, message in ([], "has no conversation"), (["1"], "'1' is a prompt"), (["9"], "'9' names none of 1"):
        result = CliRunner().invoke(app, command(model, "--keep", folder, "--resume", *which))
        assert result.exit_code == 2
        assert message in result.stderr


def test_conversation_when_cache_has_another_form_then_error_says_so(model: Path, report: Path, folder: Path):
    converse(model, ["--document", report, "--keep", folder], "Who?")
    result = CliRunner().invoke(app, command(model, "--keep", folder, "--resume", "--bits", "4"))
    assert result.exit_code == 2
    assert "is of another model or another form of cache" in result.stderr


def test_list_when_prompts_are_kept_then_has_a_line_for_each(model: Path, report: Path, folder: Path):
    converse(model, ["--document", report, "--keep", folder], "Who?")
    heading, line = kept(folder).stdout.splitlines()
    assert heading.split() == ["id", "kind", "model", "tokens", "MiB", "last", "use", "title"]
    (fields,) = listed(folder)
    assert line.split()[:5] == ["1", fields["id"][:8], "conversation", model.name, str(fields["tokens"])]
    assert line.endswith("report.txt: Who?")
    assert fields["bytes"] == sum(path.stat().st_size for path in (folder / "nodes").iterdir())


def test_prompts_when_removed_then_are_gone_and_others_stay(model: Path, report: Path, folder: Path):
    for question in ("Who?", "Where?", "Why?"):
        converse(model, ["--document", report, "--keep", folder], question)
    first, _, last = listed(folder)
    assert kept(folder, "--remove", "2", "--remove", "9").exit_code == 2
    assert len(listed(folder)) == 3
    assert kept(folder, "--remove", "2", "--remove", first["id"][:9]).exit_code == 0
    (left,) = listed(folder)
    assert left["id"] == last["id"]
    assert converse(model, ["--keep", folder, "--resume"], "/retry").stdout
    assert kept(folder, "--remove-all").exit_code == 0
    assert list((folder / "nodes").iterdir()) == []
    assert "keeps nothing" in kept(folder).stderr


@pytest.mark.filterwarnings("default:.* was removed from the store")
def test_files_when_verified_then_damaged_ones_are_removed(model: Path, report: Path, folder: Path):
    converse(model, ["--document", report, "--keep", folder], "Who?")
    whole = kept(folder, "--verify")
    assert (whole.exit_code, "damaged files: 0" in whole.stderr) == (0, True)
    for path in (folder / "nodes").iterdir():
        path.write_bytes(path.read_bytes()[:-9] + b"altered!!")
    assert kept(folder, "--verify").exit_code == 1
    assert PrefixStore(folder).kept_prompts() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing"], "There is no folder missing: generate, batch and chat make it with --keep missing."),
        ([".", "--json", "--verify"], "--json is of the list"),
    ],
)
def test_folder_when_it_cannot_be_listed_then_error_and_none_is_made(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = kept(*options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_kept_when_a_title_has_control_characters_then_none_is_printed(model: Path, tmp_path: Path, folder: Path):
    document = tmp_path / "a\x1b[2J\x9bb.txt"
    document.write_text(TEXT)
    talk = converse(model, ["--document", document, "--keep", folder], "Who?")
    said = [talk.stderr, converse(model, ["--keep", folder, "--resume"]).stderr]
    said += [kept(folder).stdout, kept(folder, "--json").stdout, kept(folder, "--remove-all").stderr]
    assert all("[2Jb.txt" in each or "\\u009bb.txt" in each for each in said[1:])
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(said))
