"""Forms on the command line: answers are values of JSON, and a table has their properties."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from .commands import error_of, lines, run
from models.byte_tokenizer import byte_tokenizer, model_in

SHORT = {"type": "string", "maxLength": 3, "pattern": "^[=a-c]*$"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"who": SHORT, "line": {"type": "integer", "minimum": 0, "maximum": 9}, "tags": {"const": ["=x"]}},
    "required": ["who", "line", "tags"],
    "additionalProperties": False,
}
ASKED = [
    {"document": "b.txt", "question": "Who?"},
    {"document": "a.txt", "question": "Who?", "choices": ["=1+1", "yes"]},
    {"document": "b.txt", "question": "When?", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "id": 7},
    {"document": "a.txt", "question": "Where?", "regex": "[ab]{2}"},
    {"document": "none.txt", "question": "Who?"},
    {"document": "b.txt", "question": "Is it?"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that writes any text, and can end it."""
    return model_in(tmp_path_factory.mktemp("model"), 2**13, byte_tokenizer(only_printable=True), eos_token_id=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"It was signed by {name}.")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    ask(tmp_path, ASKED)
    return tmp_path


def ask(folder: Path, questions: list[dict[str, Any]]) -> None:
    (folder / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "answers.csv").open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def batch(folder: Path, model: Path, *options: object, code: int = 0) -> str:
    """Return what the command remarks."""
    files = [folder / "questions.jsonl", "--out", folder / "answers.jsonl", "--csv", folder / "answers.csv"]
    return run("batch", *files, "--model", model, "--device", "cpu", *options, code=code).stderr


def answers(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the answers by the lines of their questions."""
    given = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    keys = [(each["document"], each["question"]) for each in given]
    return {line: given[keys.index(key)] for line, asked in enumerate(ASKED, 1) if (key := _key(asked)) in keys}


def _key(asked: dict[str, Any]) -> tuple[str, str]:
    return asked["document"], asked["question"]


def test_batch_answers_in_the_form_of_each_line_and_writes_a_table(folder: Path, model: Path):
    said = batch(folder, model, "--schema", folder / "schema.json", "--at-once", 4, code=1)
    given = answers(folder)
    assert given[1]["answer"].keys() == given[6]["answer"].keys() == {"who", "line", "tags"}
    assert [given[line]["at_once"] for line in (1, 6, 2)] == [2, 2, 1]  # of a form, and about a document
    assert given[2]["answer"] in ASKED[1]["choices"]
    assert given[3]["answer"] in range(10)
    rows = table(folder)
    assert list(rows[0]) == [
        *("document", "line", "id", "question", "who", "answer.line", "tags", "answer", "finish_reason", "error")
    ]
    assert [row["line"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    for row, asked in zip(rows, ASKED, strict=True):
        assert (row["document"], row["question"], row["id"]) == (*_key(asked), str(asked.get("id", "")))
    assert rows[0]["answer.line"] == str(given[1]["answer"]["line"])
    assert rows[0]["tags"] == '["=x"]'
    assert rows[0]["who"].lstrip("'") == given[1]["answer"]["who"]
    assert (rows[2]["answer"], rows[3]["answer"]) == (str(given[3]["answer"]), given[4]["answer"])
    assert "none.txt" in rows[4]["error"]
    assert not any(value.startswith("=") for row in rows for value in row.values())
    assert "6 of 6 questions have a row" in said
    assert "nested, and so JSON in a cell: tags" in said


def test_batch_asks_a_line_without_a_document_about_each_that_is_named(folder: Path, model: Path):
    own = {"document": "b.txt", "question": "Is it?"}
    ask(folder, [{"question": "Who?", "choices": ["yes"]}, own, {"question": "When?", "id": 3}])
    named = ["--document", folder / "a.txt", "--document", folder / "b.txt", "--max-new-tokens", 2]
    batch(folder, model, *named)
    asked = [("a.txt", "1"), ("b.txt", "1"), ("b.txt", "2"), ("a.txt", "3"), ("b.txt", "3")]
    assert [(row["document"], row["line"]) for row in table(folder)] == asked
    assert "5 of 5 questions were answered before" in batch(folder, model, *named)
    ask(folder, [own])
    assert "has a document of its own: drop --document" in batch(folder, model, *named, code=2)
    ask(folder, [{"question": "Who?"}])
    assert "line 1: no 'document'; give it one, or --document for all lines" in batch(folder, model, code=2)


def test_batch_when_a_form_changes_then_asks_again_only_if_told(folder: Path, model: Path):
    ask(folder, ASKED[:4])
    batch(folder, model, "--schema", folder / "schema.json")
    before = answers(folder)
    (folder / "schema.json").write_text('{"type": "boolean"}')
    ask(folder, [ASKED[0], ASKED[1] | {"choices": ["no"]}, ASKED[2], ASKED[3] | {"schema": None}])
    refused = batch(folder, model, "--schema", folder / "schema.json", code=2)
    assert "has 2 answers that were given with --schema " in refused
    assert 'not with --schema {"type": "boolean"}. Add --again' in refused
    assert answers(folder) == before
    said = batch(folder, model, "--schema", folder / "schema.json", "--again")
    assert "2 of 4 questions are asked again" in said
    after = answers(folder)
    assert (type(after[1]["answer"]), after[2]["answer"]) == (bool, "no")
    assert [after[line]["answer"] for line in (3, 4)] == [before[line]["answer"] for line in (3, 4)]


def test_batch_when_answers_are_cut_off_then_says_how_many(folder: Path, model: Path):
    ask(folder, [ASKED[0], ASKED[5], {"document": "a.txt", "question": "Say?", "choices": ["a"]}])
    said = batch(folder, model, "--schema", folder / "schema.json", "--max-new-tokens", 2)
    assert "2 answers are cut off before they have their form: --max-new-tokens 2 may be raised" in said
    assert [(row["answer"], row["finish_reason"]) for row in table(folder)] == [('{"', "length")] * 2 + [("a", "stop")]


def test_generate_when_choices_follow_the_option_then_has_one_of_them(model: Path):
    of_model = ("--model", model, "--device", "cpu")
    said = run("generate", "Who?", "--choices", "no way", "maybe", *of_model).stdout
    assert said.strip() in ("no way", "maybe")
    assert run("generate", "--choices=a", "a", "-q", "Who?", *of_model).stdout.strip() == "a"
    [given] = lines(run("generate", "Who?", "--regex", "[ab]{3}", "--json", *of_model))
    assert set(given["answer"]) <= {"a", "b"}


def test_generate_when_the_answer_is_json_then_its_record_has_the_value(model: Path, folder: Path):
    options = ("--schema", folder / "schema.json", "--json", "--model", model, "--device", "cpu")
    [given] = lines(run("generate", "Who?", *options))
    assert given["answer"].keys() == SCHEMA["properties"].keys()


def test_chat_sets_a_form_and_takes_it_back(model: Path, folder: Path):
    (folder / "digits.json").write_text('{"type": "integer", "minimum": 0, "maximum": 9}')
    typed = [f"/set schema {folder / 'digits.json'}", "One?", "/set choices a b", "/set schema", "/set choices yes"]
    done = run("chat", "--model", model, "--device", "cpu", typed="\n".join([*typed, "Two?"]))
    first, second = done.stdout.split()
    assert (first in list("0123456789"), second) == (True, "yes")
    assert "choices is a form of answers, and schema another one" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": "yes"}, "line 1: choices must be texts"),
        ({"schema": {"not": {}}}, "line 1: schema is not supported as it is; change what this names: Unimplemented"),
        ({"schema": "none.json"}, "none.json cannot be read: No such file"),
        ({"regex": "a", "choices": ["b"]}, "line 1: regex is a form of answers, and choices another one"),
    ],
    ids=str,
)
def test_batch_when_the_form_of_a_line_is_wrong_then_names_it(changes: dict[str, Any], message: str, folder: Path):
    ask(folder, [ASKED[0] | changes])
    assert message in error_of("batch", folder / "questions.jsonl", "--out", folder / "answers.jsonl")
