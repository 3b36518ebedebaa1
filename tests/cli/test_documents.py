"""Documents of the command line: several, folders of them, and those that cannot be used."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.documents import read_documents

from models.word_tokenizer import word_model_in


def invoke(*arguments: object, input: bytes | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a tokenizer for texts such as "w1 w2"."""
    return word_model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of two texts, 20 words and 30."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.md").write_text(" ".join(f"w{index}" for index in range(50, 80)))
    (folder / "a.txt").write_text(" ".join(f"w{index}" for index in range(1, 21)))
    return folder


def test_an_answer_about_several_documents_is_that_about_their_text(model: Path, texts: Path, tmp_path: Path):
    options = ["--question", "w3", "--model", model, "--device", "cpu", "--max-new-tokens", 5]
    several = invoke("generate", "--document", texts / "b.md", "--document", texts / "a.txt", *options)
    assert several.exit_code == 0, several.stderr
    assert re.search(r"2 documents: read (\d+) of \1 tokens", several.stderr)
    (tmp_path / "both.txt").write_text(read_documents([str(texts / "b.md"), str(texts / "a.txt")], print).text)
    assert several.stdout == invoke("generate", "--document", tmp_path / "both.txt", *options).stdout
    assert several.stdout != invoke("generate", "--document", texts, *options).stdout


def test_standard_input_is_read(model: Path):
    options = ["--document", "-", "--question", "w3", "--model", model, "--device", "cpu", "--max-new-tokens", 2]
    result = invoke("generate", *options, input=b"It was signed by Ada.")
    assert result.exit_code == 0, result.stderr
    assert "document: read 5 of 5 tokens" in result.stderr


def test_the_answer_says_which_documents_were_read_whole_cut_and_left_out(
    model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(texts.parent)  # names are part of the text, and have as many tokens wherever this is
    (texts / "c.txt").write_text("w9")
    generate = ["generate", "--question", "w3", "--max-new-tokens", "2"]
    for command in (generate, ["chat"]):
        result = invoke(
            *command, "--document", "texts", "--context", "30", "--model", model, "--device", "cpu", input=b""
        )
        assert result.exit_code == 0, result.stderr
        said = re.match(
            r"\[Only the first 30 of the 3 documents' (\d+) tokens were read \(--context 30\)\. Whole: texts/a\.txt\. "
            r"Cut: texts/b\.md \((\d+) of (\d+) tokens\)\. Left out: texts/c\.txt\. "
            r"The answer knows nothing of the last (\d+)\.\]",
            result.stdout,
        )
        assert said is not None, result.stdout
        total, kept, whole, lost = map(int, said.groups())
        assert total - lost == 30
        assert 0 < kept < whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--document", "", "--question", "Who?"],
            "'' is not the name of a document: give that of a file or a folder.",
        ),
        (["--prompt-file", "a.pdf"], "a.pdf is a PDF, not text: pass it as a document, or a file of its text."),
        (["--document", "a.pdf", "--document", "b.txt", "--question", "Who?"], "Cannot read b.txt: No such file"),
    ],
)
def test_documents_that_cannot_be_used_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4")
    monkeypatch.chdir(tmp_path)
    result = invoke("generate", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")


def test_questions_can_be_about_a_folder_or_a_list_of_documents(model: Path, texts: Path, tmp_path: Path):
    (texts / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    lines = [
        {"document": "texts", "question": "w3"},
        {"document": ["texts/b.md", "texts/a.txt"], "question": "w3"},
        {"document": ["texts/b.md", "missing"], "question": "w3"},
    ]
    asked, out = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["batch", asked, "--out", out, "--model", model, "--device", "cpu", "--max-new-tokens", 4]
    result = invoke(*command, "--store", tmp_path / "prompts", "--context", "50")
    assert result.exit_code == 1, result.stderr
    failed, of_folder, of_list = map(json.loads, out.read_text().splitlines())  # what is missing is told first
    assert of_folder["left_out"] == ["texts/picture.png is not UTF-8 text (byte 0 is 0x89)."]
    assert of_folder["documents"] == [
        {"document": "texts/a.txt", "tokens": 22, "read_tokens": 22},
        {"document": "texts/b.md", "tokens": 32, "read_tokens": 28},
    ]
    assert [each["read_tokens"] for each in of_list["documents"]] == [32, 18]
    assert "left_out" not in of_list
    assert "missing: No such file" in failed["error"]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    written = out.read_bytes().splitlines(keepends=True)[1:]
    again = invoke(*command, "--context", "50")
    assert again.exit_code == 0, again.stderr
    assert out.read_bytes().splitlines(keepends=True) == written


@pytest.mark.parametrize("document", [[], [""], ["a", 1], 7, {"a": "b"}, None])
def test_questions_about_what_is_no_name_are_refused(document: object, tmp_path: Path):
    asked = tmp_path / "questions.jsonl"
    asked.write_text(json.dumps({"document": document, "question": "w1"}))
    result = invoke("batch", asked, "--out", tmp_path / "answers.jsonl")
    assert result.exit_code == 2
    assert "line 1: 'document' must be the name of a file or a folder, or a list of names, got" in result.stderr
