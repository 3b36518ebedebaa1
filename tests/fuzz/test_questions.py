"""Any line of a file of questions is a question that an answer can repeat, or is named as none."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from fuzz.altered import ANY_JSON, NO_JSON, altered
from hf_hybrid_cache.cli.console import UsageError
from hf_hybrid_cache.cli.questions import RESULT_FIELDS, Question, read_questions

from common.soak import count, search_at_random

pytestmark = pytest.mark.soak
QUESTION = {"document": ["a", "b"], "question": "Who?", "id": 1, "topic": {"a": [1.5]}}
LINES = st.one_of(
    altered(QUESTION).map(json.dumps),
    ANY_JSON.map(json.dumps),
    st.sampled_from(RESULT_FIELDS).map(lambda name: json.dumps({**QUESTION, name: 1})),
    altered(QUESTION).map(lambda fields: '{"id": 7, ' + json.dumps(fields)[1:]),
).map(str.encode) | NO_JSON.map(lambda line: b" ".join(line.splitlines()))


def question_of(path: Path, *lines: bytes) -> Question | None:
    """Return the question of a file of one; or `None`, where its last line is named as none."""
    path.write_bytes(b"\n\n".join(lines))
    try:
        (question,) = read_questions(path)
        return question
    except UsageError as error:
        said = str(error)
    assert f"has 1 line that cannot be used:\n  line {2 * len(lines) - 1}: " in said or not lines[-1].strip()
    return None


@search_at_random(100)
@given(line=LINES)
@example(line=json.dumps(QUESTION).encode())
def test_a_line_is_a_question_that_answers_repeat_or_is_named(line: bytes, tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    question = question_of(path, line)
    count("lines of questions")
    if question is None:
        assert line != json.dumps(QUESTION).encode()
        return
    fields = question.fields
    assert json.loads(json.dumps(fields, allow_nan=False, ensure_ascii=False).encode()) == fields
    assert len(json.loads(line, object_pairs_hook=list)) == len(fields)
    for text in (*question.documents, question.text):
        assert isinstance(text, str)
        assert text.strip()
    assert question.documents
    assert type(fields.get("id", 1)) in (str, int)
    assert not fields.keys() & {*RESULT_FIELDS}
    assert question_of(path, line, line) is None
