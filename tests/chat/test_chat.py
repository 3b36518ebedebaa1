"""Conversations: answers are those of transformers, and what was taken back leaves no trace."""

import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_hybrid_cache import PrefixStore
from hf_hybrid_cache.chat import AnswerSettings, Chat, PromptError

from chat.talks import (
    CACHES,
    LONG,
    QUESTIONS,
    SETTINGS,
    TEXT,
    before_each_pass,
    chat_of,
    generated,
    model_of,
    prompt_of,
    said,
)
from chat.talks import tokenizer_of_tests as tokenizer

TESTS = Path(__file__).parents[1]


# In full precision test_histories.py compares any history with transformers' answers.
@pytest.mark.parametrize(("cache", "family"), [("4 bits", "llama"), ("8 bits", "qwen3_next")])
def test_what_is_taken_back_leaves_no_trace_in_few_bits(cache: str, family: str):
    def talk(*steps: str) -> list[list[int]]:
        chat, answers = chat_of(model_of(family), **CACHES[cache]), []
        for step in steps:
            if step == "undo":
                chat.undo()
            elif step == "forget":
                chat.forget()
            elif step == "all":
                list(chat.ask_all(QUESTIONS, at_once=2))
            else:
                answers.append(said(chat, step))
        return answers

    one, two, three = QUESTIONS
    plain = talk(one, two)
    assert talk(three, two, "undo", "undo", "all", one, "all", two, "forget", one)[-3:] == [*plain, plain[0]]


# Whole prompts


def test_text_when_completed_then_is_the_whole_prompt_and_no_turn():
    model = model_of()
    chat = chat_of(model)
    said(chat, QUESTIONS[0])
    pieces = "".join(chat.complete(TEXT))
    assert chat.last is not None
    assert chat.last.token_ids == generated(model, tokenizer()(TEXT)["input_ids"])
    assert pieces.strip() == chat.last.text
    assert [turn.question for turn in chat.turns] == [QUESTIONS[0]]


# Several at once


def test_questions_at_once_when_memory_ends_then_are_halved():
    remarks: list[str] = []
    questions = [f"Was it number {number}?" for number in range(1, 10)]  # without padding codes are equal, too
    expected = [answer.token_ids for answer in chat_of(bits=4).ask_all(questions)]
    chat, passes = chat_of(remark=remarks.append, bits=4), []

    def refuse(_: int, sequences: int) -> None:
        passes.append(sequences)
        if sequences > 2 and passes.count(sequences) == 4:  # in the midst of an answer
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with before_each_pass(model_of().model.layers[1], refuse):
        answers = list(chat.ask_all(questions, at_once=9))
    assert [answer.token_ids for answer in answers] == expected
    assert [answer.together for answer in answers] == [2] * 8 + [1]
    assert remarks == [f"memory ended with {count} answers at once: from here on {count // 2}" for count in (9, 4)]


# Ends


def test_an_answer_that_ctrl_c_ends_stays_and_the_conversation_goes_on():
    model = model_of()
    chat = chat_of(model, settings=replace(SETTINGS, max_new_tokens=3000))
    with closing(chat.ask("Why not?")) as pieces:
        next(pieces)
        threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            list(pieces)
    assert 1 < len(chat.last.token_ids) < 3000
    assert chat.last.finish_reason == "interrupted"
    assert chat.turns[-1].token_ids == chat.last.token_ids
    chat.settings = SETTINGS
    assert said(chat, "Who?") == generated(model, prompt_of(chat))


def test_an_answer_that_is_open_at_the_end_of_the_program_ends_with_it():
    program = """if True:
        from dataclasses import replace
        from chat.talks import SETTINGS, chat_of, model_of
        chat = chat_of(model_of("llama", 10**7), settings=replace(SETTINGS, max_new_tokens=10**6))
        answer = chat.ask("Why?")
        next(answer)
    """
    ended = subprocess.run([sys.executable, "-c", program], cwd=TESTS, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_ctrl_c_while_a_document_is_read_keeps_what_was_read():
    expected = said(chat_of(documents=LONG), "Who?")
    chat = chat_of(documents=LONG)
    press = before_each_pass(model_of(), lambda number, _: number == 1 and signal.raise_signal(signal.SIGINT))
    with press, pytest.raises(KeyboardInterrupt):
        chat.read()
    assert 0 < chat.cache.get_seq_length() < len(chat.token_ids)
    assert said(chat, "Who?") == expected


def test_documents_that_are_added_come_before_all_questions(tmp_path: Path):
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for number, path in enumerate(paths):
        path.write_text(f"{TEXT} {number}")
    chat = chat_of(documents=paths[:1], bits=8, store=tmp_path / "prompts")
    asked = chat_of(documents=paths, bits=8)
    answers = [said(each, "Who?") for each in (chat, asked)]
    chat.attach(paths[1:])
    assert (len(chat.turns), [part.document for part in chat.document.parts]) == (1, [*map(str, paths)])
    assert prompt_of(chat) == prompt_of(asked)
    chat.undo()
    assert said(chat, "Who?") == answers[1] != answers[0]
    resumed = Chat.resume(model_of(), tokenizer(), tmp_path / "prompts", progress=False)
    with pytest.raises(PromptError, match="The text of this conversation's document is not kept"):
        resumed.attach(paths[1:])
    alone = chat_of(documents=(), context=50)
    said(alone, "Who?")
    alone.attach(paths[:1])
    assert (alone.document.read_tokens, alone.cut_at, len(alone.turns)) == (50, 50, 1)
    full = chat_of(model_of("llama", 400), documents=())
    said(full, "Who? " * 68)
    before = full.token_ids
    with pytest.raises(PromptError, match="tokens are left for the document"):
        full.attach(paths[:1])
    assert (full.token_ids, full.documents) == (before, None)


def test_a_full_context_ends_answers_and_refuses_questions_and_messages():
    chat = chat_of(model_of("llama", 400), leave=60)
    before = list(chat.token_ids)
    with pytest.raises(PromptError, match="context is 400: the message is not set"):
        chat.system = "Be brief. " * 80
    assert (chat.system, chat.token_ids) == (None, before)
    list(chat.ask("Who?", replace(SETTINGS, max_new_tokens=1000)))
    assert (chat.last.finish_reason, chat.num_free) == ("context", 0)
    for ask in (chat.ask, chat.require_room):
        with pytest.raises(PromptError, match="the context is 400: no room is left for an answer"):
            ask("Why?")
    chat.undo()
    assert len(said(chat, "Why?")) == SETTINGS.max_new_tokens


def test_penalties_count_what_the_answer_has_and_not_the_prompt():
    settings = replace(SETTINGS, max_new_tokens=20, presence_penalty=1.5, frequency_penalty=0.5)
    chat, model = chat_of(settings=settings), model_of()
    answer = said(chat, "Who?")
    prompt, expected = chat.token_ids[: -len(answer)], list[int]()
    with torch.no_grad():
        for _ in answer:
            logits = model(torch.tensor([prompt + expected])).logits[0, -1]
            for token in set(expected):
                logits[token] -= 1.5 + 0.5 * expected.count(token)
            expected.append(int(logits.argmax()))
    assert answer == expected


def test_texts_that_end_an_answer_are_never_shown():
    settings = AnswerSettings(max_new_tokens=120, temperature=10.0, seed=0)
    chat = chat_of(settings=settings)
    text = "".join(chat.ask("Who?"))
    # Pieces are words, and some of these texts begin in one and end in the next.
    ends_of_words = [end for end in range(4, len(text) - 6) if text[end].isspace()]
    assert ends_of_words
    for start in (2, len(text) // 2, *(end - 3 for end in ends_of_words[:3])):
        stop = text[start : start + 6]
        chat.undo()
        chat.settings = replace(settings, stop=("never there", stop))
        assert "".join(chat.ask("Who?")) == text[: text.index(stop)]
        assert chat.last.text == text[: text.index(stop)].strip()
        assert chat.last.finish_reason == "stop"


def test_the_same_question_asked_again_is_kept_once_unless_it_has_a_name(tmp_path: Path):
    store, named = PrefixStore(tmp_path), {"name": "letters"}
    for details in ({}, named, {}, {}, named):
        said(chat_of(store=store, details=details), QUESTIONS[0])
    assert [each.details.get("name") for each in store.prompts() if each.is_conversation] == ["letters", None]
    chat = chat_of(store=store)
    first = store.prompts()[1].details["id"]
    said(chat, QUESTIONS[0])
    said(chat, QUESTIONS[1])
    talks = [each for each in store.prompts() if each.is_conversation]
    assert [(each.details["id"] == first, each.details.get("name")) for each in talks] == [
        (True, None),
        (False, "letters"),
    ]
