"""A table of the answers of a batch, for spreadsheets."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..system.durable_files import replaced_when_whole
from .batch_files import Question, Record
from .console import UsageError

# The columns that are no properties of an answer.
_BEFORE, _AFTER = ("document", "line", "id", "question"), ("answer", "finish_reason", "error")
# A spreadsheet takes a text for a formula that begins so; a quote before it says that it is none.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_table(path: Path, questions: Sequence[Question], answers: Mapping[tuple[Any, ...], Record]) -> str:
    """
    Write a row for each question that has an answer: its document and line, and the properties of the answer.

    Args:
        path: of the file, as CSV in UTF-8 with a byte order mark, which spreadsheets look for.
        questions: in the order of the rows.
        answers: by the key of their question.

    Returns:
        a sentence on what is in the table, and what is not as it was.

    Raises:
        UsageError: the file cannot be written.
    """
    rows = [_row(question, answers[question.key]) for question in questions if question.key in answers]
    properties = dict.fromkeys(name for row in rows for name in row if name not in (*_BEFORE, *_AFTER))
    columns = [name for name in (*_BEFORE, *properties, *_AFTER) if any(name in row for row in rows)]
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(map(_cell, columns))
    table.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    try:
        with replaced_when_whole(path) as file:
            file.write(text.getvalue().encode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}.") from error
    nested = ", ".join(name for name in columns if any(isinstance(row.get(name), dict | list) for row in rows))
    said = f"{len(rows):,} of {len(questions):,} questions have a row in {path}"
    return said + (f"; nested, and so JSON in a cell: {nested}" if nested else "")


def _row(question: Question, answer: Record) -> Record:
    """The cells of an answer by their columns; a property with the name of another column is called answer.NAME."""
    row = {name: question.fields[name] for name in ("document", "id", "question") if name in question.fields}
    row["line"] = question.line
    given = answer.get("answer")
    if isinstance(given, dict):
        row |= {f"answer.{name}" if name in (*_BEFORE, *_AFTER) else name: value for name, value in given.items()}
    elif given is not None:
        row["answer"] = given
    return row | {name: answer[name] for name in ("finish_reason", "error") if name in answer}


def _cell(value: Any) -> str:
    """The text of a value: a text as it is, nothing for nothing, else JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    return json.dumps(value, ensure_ascii=False)
