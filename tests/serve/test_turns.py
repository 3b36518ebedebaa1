"""Answers at once are those of each alone; they read what they share once, and let each other have turns."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.requests import ClientDisconnect

from hf_hybrid_cache import DynamicHybridCache, PrefixStore
from hf_hybrid_cache.cache_argument import cache_argument, passed_cache
from hf_hybrid_cache.chat import AnswerSettings
from hf_hybrid_cache.chat.turns import Steps, Turns
from hf_hybrid_cache.decode_step import fuse_decode
from hf_hybrid_cache.serve.engine import Answered
from hf_hybrid_cache.serve.protocol import APIError
from serve.engines import Asking
from serve.running import read

from models.byte_tokenizer import model_in

DOCUMENT = "".join(chr(97 + number * number % 23) for number in range(7000)) + "\n\n"
# Tokens of a chunk of a prompt.
CHUNK = 2048


class Asked(Asking):
    """An engine, and the passes of its model: the id of the cache, and the tokens."""

    def __init__(self, folder: Path, memory_bytes: int = 2**30):
        model, tokenizer = read(model_in(folder / "model", 2**14, eos_token_id=None))
        self.log = list[tuple[int, list[int]]]()
        self.before: Callable[[int], object] = lambda _: None  # is called with the tokens of each pass
        model.register_forward_pre_hook(self._note, with_kwargs=True)
        self.looks = 0
        store = PrefixStore(folder / "store", identity="notes passes")
        super().__init__(model, tokenizer, store, memory_bytes=memory_bytes)

    def _note(self, _module: Any, _: Any, inputs: dict[str, Any]) -> None:
        [token_ids] = inputs["input_ids"].tolist()
        self.before(len(token_ids))
        self.log.append((id(passed_cache(inputs)), token_ids))

    def ask(self, prompt: str, tokens: int = 5, look: Callable[[], object] = lambda: None) -> tuple[str, Answered]:
        text, end, _ = self.answer(prompt, AnswerSettings(max_new_tokens=tokens, drafts=0), look)
        return text, end

    def until_left(self, prompt: str, others_are_done: threading.Event) -> None:
        """Ask for an answer that goes on until others are done."""

        def look() -> None:
            self.looks += 1
            if others_are_done.is_set():
                raise ClientDisconnect

        with pytest.raises(ClientDisconnect):
            self.ask(prompt, 4000, look)

    def require_same_alone(self, prompt: str, passes: list[list[int]]) -> None:
        """Compare what came after a prompt, of which the last token is a pass of its own, with the answer alone."""
        _, *generated = [token for token_ids in passes if len(token_ids) == 1 for token in token_ids]
        assert self.ask(prompt, len(generated))[1].answers[0].token_ids == generated


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_what_prompts_at_once_begin_with_is_read_once_whoever_leaves(asked: Asked, leaves: bool):
    have_left = list[int]()

    def ask(number: int) -> tuple[str, Answered] | None:
        def look() -> None:
            if leaves and len(asked.log) == 2 and not have_left:
                have_left.append(number)
                raise ClientDisconnect

        try:
            return asked.ask(f"{DOCUMENT}Question {number}?", look=look)
        except ClientDisconnect:
            return None

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    read = sum(len(token_ids) for _, token_ids in asked.log)
    assert len(DOCUMENT) < read < len(DOCUMENT) + 300
    assert [number for number in range(4) if answers[number] is None] == have_left
    assert len(have_left) == leaves
    for number, answer in enumerate(answers):
        assert answer is None or answer[0] == asked.ask(f"{DOCUMENT}Question {number}?")[0]


def test_a_token_comes_after_each_chunk_and_a_short_question_waits_for_one(asked: Asked):
    """An answer goes on while a long prompt is read, beside which a short question is asked."""
    are_done, first_turn = threading.Event(), list[int]()
    long, short = list[Any](), list[Any]()

    def look() -> None:
        first_turn.append(len(asked.log))

    def begin(tokens: int) -> None:
        if len(asked.log) == 3 and not long:
            long.append(pool.submit(asked.ask, DOCUMENT))
        if tokens == CHUNK and not short:
            short.append(pool.submit(asked.ask, "Who?", look=look))

    asked.before = begin
    with ThreadPoolExecutor(3) as pool:
        talking = pool.submit(asked.until_left, "Go on.", are_done)
        while not short:
            assert not talking.done()
        texts = [each[0].result()[0] for each in (short, long)]
        are_done.set()
        talking.result()
    log = asked.log.copy()
    assert texts == [asked.ask(prompt)[0] for prompt in ("Who?", DOCUMENT)]
    talker, reader = log[0][0], next(cache for cache, token_ids in log if len(token_ids) == CHUNK)
    asked.require_same_alone("Go on.", [token_ids for cache, token_ids in log if cache == talker])
    asker = next(cache for cache, _ in log if cache not in (talker, reader))
    of_talk = [index for index, (cache, _) in enumerate(log) if cache == talker]
    chunks = [index for index, (cache, token_ids) in enumerate(log) if cache == reader and len(token_ids) > 1]
    asker_passes = [index for index, (cache, _) in enumerate(log) if cache == asker]
    assert (len(chunks), len(asker_passes)) == (4, 6)
    for chunk, following in pairwise(chunks):
        assert any(chunk < index < following for index in of_talk)
    for step, following in pairwise(asker_passes[1:]):
        assert sum(step < index < following for index in of_talk) == 1
    assert sum(first_turn[0] <= chunk < asker_passes[1] for chunk in chunks) <= 1


def test_a_short_prompt_that_is_read_is_answered_before_the_next_chunk(asked: Asked):
    """Nobody else is answered beside it and the long prompt."""
    chunks, settings, short = list[int](), AnswerSettings(max_new_tokens=1, drafts=0), list[Any]()

    def note() -> None:
        chunks.append(sum(len(token_ids) == CHUNK for _, token_ids in asked.log))

    def answer() -> None:
        for piece in asked.engine.answer("Who?", settings, lambda: None):
            if isinstance(piece, Answered):
                note()

    def begin(tokens: int) -> None:
        if tokens == CHUNK and not short:
            short.append(pool.submit(answer))
        if tokens < CHUNK and not chunks:  # of the short prompt
            note()

    asked.before = begin
    with ThreadPoolExecutor(2) as pool:
        pool.submit(asked.ask, DOCUMENT).result()
        short[0].result()
    at_its_pass, at_its_end = chunks
    assert at_its_pass == at_its_end


def test_memory_that_ends_in_one_answer_leaves_the_others_theirs(asked: Asked):
    are_done = threading.Event()

    def end_memory(tokens: int) -> None:
        if tokens == CHUNK:
            raise MemoryError

    asked.before = end_memory
    with ThreadPoolExecutor(1) as pool:
        talking = pool.submit(asked.until_left, "Go on.", are_done)
        while len(asked.log) < 3:
            assert not talking.done()
        with pytest.raises(APIError, match="Memory has ended") as error:
            asked.ask(DOCUMENT)
        are_done.set()
        talking.result()
    assert error.value.status == 503
    talker = asked.log[0][0]
    asked.require_same_alone("Go on.", [token_ids for cache, token_ids in asked.log if cache == talker])


@pytest.mark.parametrize("has_room", [True, False])
def test_conversations_leave_memory_as_soon_as_one_that_runs_needs_it(tmp_path: Path, has_room: bool):
    asked, again = Asked(tmp_path, 2**30 if has_room else 2**20), list[Any]()
    known, chunks = asked.ask("Go on.", 1)[1].answers[0].prompt_tokens - 1, list[int]()

    def ask_again(tokens: int) -> None:
        chunks.append(tokens)
        if chunks.count(CHUNK) == 3:
            again.append(pool.submit(asked.ask, "Go on."))

    asked.before = ask_again
    with ThreadPoolExecutor(1) as pool:
        asked.ask(DOCUMENT)
        assert again[0].result()[1].cached_tokens == known * has_room


def test_tokens_of_several_answers_come_in_one_pass_as_each_alone(asked: Asked):
    fused, are_done = fuse_decode(asked.model), threading.Event()
    prompts = ["Who?", "Where was it?", f"{DOCUMENT[:100]}\n\nWhy?"]
    with ThreadPoolExecutor(4) as pool:
        talking = pool.submit(asked.until_left, "Go on.", are_done)
        while not asked.looks:
            assert not talking.done()
        ends = [end for _, end in pool.map(asked.ask, prompts, [70] * 3)]
        are_done.set()
        talking.result()
    # The one that outlasts them looks after each of its own; apart there would be 210 more.
    assert fused.fused_steps < asked.looks + 30
    assert [end.answers[0].token_ids for end in ends] == [
        asked.ask(prompt, 70)[1].answers[0].token_ids for prompt in prompts
    ]


@torch.no_grad()
def test_a_token_is_told_before_the_pass_for_the_next_one(asked: Asked):
    cache, told, known = DynamicHybridCache(asked.model.config), list[int](), list[list[int]]()
    asked.before = lambda _: known.append([*told])
    turns = Turns(asked.model)

    def steps() -> Steps:
        asked.model(input_ids=torch.tensor([[65] * 20]), **cache_argument(cache))
        for token in (66, 67):
            turns.tell(partial(told.append, token))
            yield {"input_ids": torch.tensor([[token]]), **cache_argument(cache)}

    turns.run(steps()).result()
    turns.end()
    assert known == [[], [66], [66, 67]]
