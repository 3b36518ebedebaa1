"""Any line of a file of questions is a question that an answer can repeat, or is named as none."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fuzz.altered import NO_JSON, altered
from hf_hybrid_cache.cli.batch_files import RESULT_FIELDS, read_questions
from hf_hybrid_cache.cli.console import UsageError

from common.soak import search_at_random

pytestmark = pytest.mark.soak
QUESTION = {"document": ["a", "b"], "question": "Who?", "id": 1, "topic": {"a": [1.5]}}
ODD = {"document": [], "question": " ", "id": True}, {"document": ["a", " "], "id": 1.5}, dict.fromkeys(RESULT_FIELDS)
FIELDS = [(name, value) for fields in ODD for name, value in fields.items()]
LINES = st.one_of(
    altered(QUESTION).map(json.dumps),
    st.sampled_from(FIELDS).map(lambda field: json.dumps(QUESTION | dict([field]))),
    altered(QUESTION).map(lambda fields: '{"id": 7, ' + json.dumps(fields)[1:]),
).map(str.encode) | NO_JSON.map(lambda line: b" ".join(line.splitlines())).filter(bytes.strip)


@search_at_random(200)
@given(line=LINES)
def test_a_line_is_a_question_that_answers_repeat_or_is_named(line: bytes, tmp_path: Path):
    path, message = tmp_path / "questions.jsonl", "has 1 line that cannot be used:\n  line {}: "
    path.write_bytes(line)
    try:
        (question,) = read_questions(path)
    except UsageError as error:
        assert message.format(1) in str(error)  # noqa: PT017
        return
    fields = question.fields
    assert json.loads(json.dumps(fields, allow_nan=False, ensure_ascii=False).encode()) == fields
    assert len(json.loads(line, object_pairs_hook=list)) == len(fields)
    assert question.documents
    assert all(text.strip() for text in (*question.documents, fields["question"]))
    assert type(fields.get("id", 1)) in (str, int)
    assert not fields.keys() & {*RESULT_FIELDS}
    path.write_bytes(line + b"\n\n" + line)
    with pytest.raises(UsageError, match=message.format(3)):
        read_questions(path)
