"""A real server answers real clients as `generate` does, reads nothing twice, and never fails without a reason."""

import contextlib
import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from transformers import AutoModelForCausalLM

from hf_hybrid_cache import PrefixStore
from hf_hybrid_cache.chat import AnswerSettings, Conversation, Message
from serve.engines import Asking
from serve.running import DOCUMENT, KEY, Running, cached, generated, read, serving, user

from chat.calls import function
from chat.thoughts import tokenizer_of
from common.soak import count, search_at_random
from models.byte_tokenizer import byte_tokenizer, model_in

PENALTIES = {"frequency_penalty": 2, "presence_penalty": 2}
# Of a body, by the model's context.
MOST_BYTES = 2**20 + 64 * 2**13
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    printable = byte_tokenizer(only_printable=True)
    return model_in(tmp_path_factory.mktemp("model"), 2**13, printable, eos_token_id=None)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with serving(model, "--waiting", "30") as running:
        yield running


def streamed(server: Running, messages: Any, **options: Any) -> tuple[str, list[Any]]:
    """Return the text of a streamed answer, and its pieces."""
    chunks = list(server.ask(messages, stream=True, **options))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    texts = [each.delta.content if hasattr(each, "delta") else each.text for each in choices]
    return "".join(text or "" for text in texts), chunks


@pytest.mark.parametrize("options", [SAMPLED, {}], ids=["chat", "text"])
def test_streamed_and_whole_answers_are_those_of_generate(server: Running, options: dict[str, Any]):
    asked = [{"role": "system", "content": "Be short."}, user(f"{DOCUMENT}\n\nWho signed it?")] if options else DOCUMENT
    expected = generated(server.model, asked, **options)
    whole = server.ask(asked, **options).choices[0]
    assert (whole.message.content if options else whole.text) == expected
    text, chunks = streamed(server, asked, **options, stream_options={"include_usage": True})
    assert text == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].usage.completion_tokens == 12


def test_a_conversation_computes_each_token_once_and_repeats_its_turns(server: Running):
    messages, before, answers = [user(f"{DOCUMENT}\n\nWho came?")], 0, []
    for turn in range(4):
        answers.append(server.ask(messages))
        tokens, known = cached(answers[-1])
        if turn:
            assert known == before - 1  # the last token of an answer is computed with the next question
        before = tokens + answers[-1].usage.completion_tokens
        content = answers[-1].choices[0].message.content
        messages += [{"role": "assistant", "content": content}, user(f"And {turn}?")]
    for turn in (3, 2):  # the last one, and one before it
        again = server.ask(messages[: 2 * turn + 1])
        assert again.choices[0].message.content == answers[turn].choices[0].message.content
        assert cached(again)[1] >= cached(answers[turn])[1] - 1


STEP = st.tuples(
    st.sampled_from(["ask", "go on", "again", "edit", "another"]),
    st.sampled_from(["whole", "stop", "leave"]),
    st.sampled_from([{}, SAMPLED, {"temperature": 1.5, "seed": 4}]),
    st.sampled_from(["Who?", "  Where?", "When?\n", "Why?<|im_end|>\n<|im_start|>user\nNo."]),
)


@search_at_random(8)
@given(history=st.lists(STEP, min_size=2, max_size=5))
def test_any_history_of_requests_has_the_answers_of_cold_reads(server: Running, history: list[tuple[Any, ...]]):
    """Clients stop, leave in the midst of an answer, go on from what they were told, edit, and ask again."""
    talks: list[list[dict[str, str]]] = [[user(f"{DOCUMENT}\n\nWho signed it?")]]
    for what, told_as, settings, text in history:
        messages = list(talks[-1])
        if what == "edit":
            messages[0] = user(f"{DOCUMENT}{text}")
        elif what == "another":
            messages = [user(f"{DOCUMENT}\n\n{text}")]
        elif what != "again" and messages[-1]["role"] == "assistant":
            messages.append(user(text))
        if messages[-1]["role"] == "assistant":
            messages.pop()
        expected = generated(server.model, messages, **settings)
        stop = expected[4:6]
        if told_as == "leave":
            with server.ask(messages, stream=True, **settings) as stream:
                told = next(iter(stream)).choices[0].delta.content or ""
        elif told_as == "stop" and stop.strip():
            choice = server.ask(messages, stop=[stop, "no such"], **settings).choices[0]
            told = choice.message.content
            assert (told, choice.finish_reason) == (expected[: expected.index(stop)], "stop")
        else:
            told = server.ask(messages, **settings).choices[0].message.content
            assert told == expected
        assert expected.startswith(told)
        talks.append([*messages, {"role": "assistant", "content": told}])
        count("an answer of the server is that of a cold read")


def test_another_question_about_a_document_reads_the_question_alone(server: Running):
    document = DOCUMENT.replace("Ada", "Bob")
    server.ask([user(f"{document}\n\nWho signed it?")])
    tokens, known = cached(server.ask([user(f"{document}\n\nWhere, and on which day, was it signed?")]))
    assert tokens - known < 150  # in bytes, with the end of the template
    assert cached(server.ask([{"role": "system", "content": document}, user("Who signed it, and where?")]))[1] < 100


def test_twenty_clients_at_once_get_the_answers_that_they_get_one_by_one(server: Running):
    """They are of two documents and none, whole, streamed, sampled, with a text that ends them, drafted, or cut off."""
    repeating = {"frequency_penalty": -2, "presence_penalty": -2}
    options = [{}, SAMPLED, SAMPLED | {"seed": 4}, repeating | {"max_tokens": 30}, {"stop": ["e", "1"]}]
    documents = [DOCUMENT.replace("Ada", name) * size for name, size in (("Eve", 1), ("Max", 3), ("", 0))]

    def ask(number: int, leaves: bool) -> str:
        prompt = f"{documents[number % 3]}\n\nQuestion {number % 4}?"
        if leaves:
            with server.ask([user(prompt)], stream=True, max_tokens=2000) as stream:
                next(iter(stream))
            return ""
        if number % 2:
            return streamed(server, [user(prompt)], **options[number % 5])[0]
        choice = server.ask(prompt, **options[number % 5]).choices[0]
        return f"{choice.text}, {choice.finish_reason}"

    expected = [ask(number, False) for number in range(20)]
    with ThreadPoolExecutor(25) as pool:
        leaving = [pool.submit(ask, number, True) for number in range(0, 20, 4)]
        assert list(pool.map(ask, range(20), [False] * 20)) == expected
        assert [each.result() for each in leaving] == [""] * 5
    server.wait_for(0)


def test_the_next_turn_after_a_restart_reads_what_is_new_alone(model: Path, tmp_path: Path):
    """Nothing that differs is taken of a conversation that was edited."""
    messages, options = [user(f"{DOCUMENT * 4}\n\nWho came?")], ("--store", str(tmp_path))
    server = Running(model, *options)
    for text in ("Why?", "Where?"):
        answer = server.ask(messages, max_tokens=150)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, user(text)]
    before = answer.usage.prompt_tokens
    server.end(signal.SIGTERM)
    with serving(model, *options) as server:
        edited = [*messages[:1], {"role": "assistant", "content": "Bob."}, messages[2]]
        assert cached(server.ask(edited))[1] < before
        answer = server.ask(messages)
    assert cached(answer)[1] >= before
    assert answer.choices[0].message.content == generated(str(model), messages)


def test_who_leaves_ends_the_answer_within_a_step(server: Running):
    with server.ask([user("Go on.")], stream=True, max_tokens=8000) as stream:
        next(iter(stream))
    server.wait_for(0)
    server.leave([user("Go on.")], max_tokens=8000)
    answer = server.ask([user("Who?")], max_tokens=1)  # 16,000 tokens would come before it
    assert answer.usage.completion_tokens == 1
    assert server.state()["requests"] == 0


def test_what_was_read_for_who_left_is_not_read_again(tmp_path: Path):
    asking = Asking(*read(model_in(tmp_path / "model", 2**13)), PrefixStore(tmp_path / "store"), memory_bytes=0)
    looks = list[bool]()
    text, answer = "".join(chr(97 + number * number % 23) for number in range(8000)), AnswerSettings(max_new_tokens=1)

    def leave() -> None:
        looks.append(True)
        if len(looks) == 3:  # before the prompt, what the store has of it, the first pass
            raise ClientDisconnect

    with pytest.raises(ClientDisconnect):
        asking.answer(text, answer, leave)
    assert asking.answer(text, answer)[1].cached_tokens == 2048


@pytest.mark.filterwarnings("ignore:The prompt has")
@pytest.mark.parametrize("what", ["is gone", "refuses"])
def test_a_store_that_is_gone_or_refuses_is_told_once_and_changes_nothing(tmp_path: Path, what: str):
    folder, told = model_in(tmp_path / "model", 2**13), list[str]()
    asking = Asking(*read(folder), PrefixStore(tmp_path / "store"), memory_bytes=0, remark=told.append)
    if what == "is gone":
        shutil.rmtree(tmp_path / "store")
    else:  # code of others without a name: states of the model are not kept
        asking.model.register_forward_hook(lambda *_: None)
    answer, expected = AnswerSettings(max_new_tokens=3), generated(str(folder), DOCUMENT, max_new_tokens=3)
    for prompt in (DOCUMENT, DOCUMENT, Conversation((Message("user", DOCUMENT),))):
        text, *_ = asking.answer(prompt, answer)
        assert text == expected or isinstance(prompt, Conversation)
    assert len(told) == 1


def test_a_server_says_why_it_refuses_and_why_it_ends_an_answer(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    """Clients beyond the queue are told when to come again; who leaves it makes room; a second signal ends all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        server = Running(model, "--parallel", "1", "--waiting", "1", "--api-key", KEY)
    request.addfinalizer(server.process.kill)
    for value in (b"", b"Bearer kex", b"Basic a key", "Bearer \u00e9".encode("latin-1")):
        reply = httpx.get(f"{server.url}/models", headers={"Authorization": value})
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    stalled = [server.connect("/completions", "Content-Length: 100", body=b"{") for _ in range(2)]
    server.wait_for(2)
    with pytest.raises(openai.RateLimitError, match="2 requests are answered or wait"):
        server.ask([user("Who?")])
    for connection in stalled:
        connection.close()
    server.wait_for(0)
    with server.ask([user("Go on.")], stream=True, max_tokens=8000) as begun, ThreadPoolExecutor(1) as pool:
        next(iter(begun))
        server.leave([user("Next.")], requests=2)
        server.wait_for(1)
        waiting = pool.submit(server.ask, [user("Next.")])
        server.wait_for(2)
        with pytest.raises(openai.RateLimitError, match="Ask again later") as error:
            server.ask([user("Who?")])
        assert int(error.value.response.headers["retry-after"]) > 0
        begun.close()
        assert waiting.result().choices[0].finish_reason == "length"
    stream = server.ask([user("Go on.")], stream=True, max_tokens=8000)
    next(iter(stream))
    assert list(tmp_path.glob("hf-hybrid-cache-*"))
    with server.connect("/completions", "Content-Length: 100", body=b"{"):
        server.wait_for(2)
        server.process.send_signal(signal.SIGHUP)
        with pytest.raises(openai.APIError, match="The server is stopping"):
            list(stream)
        said = server.end(signal.SIGHUP)
    assert server.process.returncode == 128 + signal.SIGHUP
    assert "Traceback" not in said
    assert not list(tmp_path.glob("hf-hybrid-cache-*"))


@pytest.mark.slow
def test_who_only_connects_or_stalls_is_let_go_and_keeps_nobody_out(server: Running):
    process = psutil.Process(server.process.pid)
    with contextlib.ExitStack() as stack:
        stalled = stack.enter_context(server.connect("/completions", "Content-Length: 100", body=b"{"))
        server.wait_for(1)
        idle = [stack.enter_context(server.connect()) for _ in range(600)]
        assert httpx.get(f"{server.url}/models").status_code == 200
        assert len(process.net_connections()) < 300
        assert b" 408 " in b"".join(iter(partial(stalled.recv, 1000), b""))
        assert all(has_ended(connection) for connection in idle)


def has_ended(connection: socket.socket) -> bool:
    """Return whether the server ends a connection without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.slow
def test_memory_does_not_grow_over_five_hundred_requests(model: Path):
    with serving(model, "--memory", "20MB") as server:
        process, used = psutil.Process(server.process.pid), []
        for number in range(500):
            server.ask([user(f"{DOCUMENT}\n\nQuestion {number}?")], max_tokens=2)
            if number in (250, 499):
                used.append(process.memory_info().rss)
        assert used[1] - used[0] < 30 * 2**20


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


def asking(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": "POST",
        "url": "/chat/completions",
        "json": {"messages": [user("Who?")], "max_tokens": 2} | fields,
    }


# A request, its status, and a part of the answer.
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    *(
        (asking(fields), 404 if "model" in fields else 400, message)
        for fields, message in [
            ({"tools": [function("search")]}, "'tools' is not supported by the chat template: leave it out, or start"),
            ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'messages.0.content.0.type' is wrong"),
            ({"messages": [{"role": "function", "content": "x"}]}, "'messages.0.role' is wrong"),
            ({"temperature": 1.0, "top_p": 3}, "top_p must be from 1e-10 to 1"),
            ({"presence_penalty": 3, "stream": True}, "presence_penalty must be from -2 to 2"),
            ({"messages": [user("x" * 9000)], "stream": True}, "context is 8,192"),
            ({"messages": [user("x" * 99_000)]}, "The prompt has 99,000 characters"),
            ({"messages": [user("")] * (2**14 + 1)}, "'messages' is wrong: List should have at most 16384"),
            ({"model": "gpt"}, "There is no model 'gpt'"),
            ({"min_tokens": 3}, "'min_tokens' is not supported: leave it out, or start the server with --lenient."),
            (
                {"messages": [{"role": "user", "content": None}]},
                "is wrong: only an assistant's or a tool's message may",
            ),
            ({"temperature": 2.1}, "'temperature' is wrong: Input should be less than or equal to 2"),
            ({"chat_template_kwargs": {"chat_template": "x"}}, "has no place for chat_template"),
        ]
    ),
    ({"method": "GET", "url": "/files"}, 404, "such as /v1/chat/completions"),
    ({"method": "GET", "url": "/models/gpt"}, 404, "There is no model 'gpt'"),
    ({"method": "GET", "url": "/completions"}, 405, ""),
    ({"method": "POST", "url": "/completions", "content": b" " * MOST_BYTES + b" "}, 413, ""),
    ({"method": "POST", "url": "/completions", "headers": {"Origin": "https://example.org"}}, 403, "--origin"),
    ({"method": "GET", "url": "/models", "headers": {"Host": "rebound.example:8080"}}, 403, "no_key"),
]


def test_what_cannot_be_answered_is_refused_by_name_in_json(server: Running):
    for request, status, message in REFUSED:
        reply = server.http.request(**request)
        assert (reply.status_code, list(reply.json())) == (status, ["error"])
        assert message in str(reply.json()["error"]), request
    for host in ("localhost", "127.0.0.1:1", "[::1]:8080", "10.1.2.3"):
        assert server.http.get("/models", headers={"Host": host}).status_code == 200
    assert [each.id for each in server.client.models.list()] == [server.model]
    assert server.client.models.retrieve(server.model).id == server.model


BOOKS = {"service_tier": "auto", "keep_alive": "5m", "cache_prompt": True, "prompt_cache_key": "k", "id_slot": 0}


def test_fields_are_taken_where_they_change_nothing_or_are_done(server: Running):
    asked = [user("Who?")]
    expected = server.ask(asked).choices[0].message.content
    assert server.ask(asked, extra_body=BOOKS).choices[0].message.content == expected
    assert server.ask(asked, temperature=2, extra_body={"min_p": 1.0}).choices[0].message.content == expected
    assert server.ask(asked, temperature=1e-30, seed=4).choices[0].message.content == expected
    for name in ("repeat_penalty", "repetition_penalty"):
        penalized = server.ask(asked, extra_body={name: 1.5}).choices[0].message.content
        assert penalized == generated(server.model, asked, repetition_penalty=1.5) != expected
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "came?"}]
    talk = [user("Who\ncame?"), {"role": "assistant", "content": ""}, user("Why?")]
    in_parts = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, talk[2]]
    assert server.ask(in_parts).choices[0].message.content == generated(server.model, talk)


def test_what_is_not_supported_is_left_out_by_a_lenient_server_and_logged(model: Path):
    asked = [{**user("Who?"), "weight": 1}]
    with serving(model, "--lenient") as server:
        answer = server.ask(asked, tools=[function("x")], extra_body={"min_tokens": 3, "mirostat": 2})
        assert answer.choices[0].message.content == generated(server.model, [user("Who?")])
        with pytest.raises(openai.BadRequestError, match="top_p must be from 1e-10 to 1"):
            server.ask([user("Who?")], temperature=1.0, top_p=3, logit_bias={"5": 1})
        said = server.log()
    assert "ignored: messages.0.weight, min_tokens, mirostat, tools" in said
    tokens, known = cached(answer)
    assert re.search(
        rf"\d\d:\d\d:\d\d /v1/chat/completions 200: {tokens} tokens, {known} of them cached, 12 generated, [\d.]+ s\n",
        said,
    )
    assert re.search(r"\d\d:\d\d:\d\d /v1/chat/completions 400: top_p must be from 1e-10 to 1", said)


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.mark.parametrize("key", [(), ("--api-key", KEY)], ids=["open", "with a key"])
def test_a_web_page_that_may_ask_is_let_by_browsers_and_another_is_not(model: Path, key: tuple[str, ...]):
    """Browsers first ask without the key, and show a page only what has its origin in a header."""
    page, other = ({"Origin": origin} for origin in ("https://chat.example.org", "https://example.org"))
    body = {"messages": [user("Who?")], "max_tokens": 2}
    with serving(model, "--origin", "https://chat.example.org/", *key) as server:
        url = f"{server.url}/chat/completions"
        allowed = httpx.options(url, headers=PREFLIGHT | page)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, page["Origin"])
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        assert "access-control-allow-origin" not in httpx.options(url, headers=PREFLIGHT | other).headers
        for stream in (False, True):
            reply = server.http.post("/chat/completions", headers=page, json=body | {"stream": stream})
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, page["Origin"])
        refused = server.http.post("/chat/completions", headers=page, json={})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, page["Origin"])
        assert key or server.http.post("/chat/completions", headers=other, json=body).status_code == 403
        assert not key or httpx.post(url, headers=page, json=body).status_code == 401


def test_a_page_sees_an_error_inside_the_server(tmp_path: Path):
    folder, page = model_in(tmp_path, 512), {"Origin": "https://example.org"}
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(8)  # fewer than the tokenizer has
    model.save_pretrained(folder)
    server = Running(folder, "--origin", page["Origin"])
    reply = server.http.post("/completions", headers=page, json={"prompt": "Who?", "max_tokens": 2})
    assert "IndexError" in server.end()
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (500, page["Origin"])
    assert "An error inside the server" in reply.json()["error"]["message"]


def test_thoughts_are_apart_from_answers_in_whole_and_streamed_ones(tmp_path: Path):
    folder = model_in(tmp_path / "model", 2**12, tokenizer_of("R1, of many tokens"), eos_token_id=None)
    with serving(folder, "--max-thinking-tokens", "40") as server:
        asked = [user(f"{DOCUMENT}\n\nWho?")]
        answer = server.ask(asked)
        message = answer.choices[0].message
        assert 30 < len(message.reasoning_content) <= 40
        assert answer.usage.completion_tokens_details.reasoning_tokens == 40 + len("\n</think>\n\n")
        assert answer.usage.completion_tokens == answer.usage.completion_tokens_details.reasoning_tokens + 12
        chunks = list(server.ask(asked, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert (thought, "".join(delta.content or "" for delta in deltas)) == (
            message.reasoning_content,
            message.content,
        )
        for options in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"thinking": False}}}):
            without = server.ask(asked, **options)
            assert not hasattr(without.choices[0].message, "reasoning_content")
            assert without.usage.completion_tokens_details.reasoning_tokens == len("\n</think>\n\n")
        said = {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning_content}
        tokens, known = cached(server.ask([*asked, said, user("Why?")]))
        before = server.ask([*asked, {"role": "assistant", "content": message.content}, user("Why?")]).usage
        assert before.prompt_tokens == tokens  # the template repeats no thought
        assert known >= answer.usage.prompt_tokens - len("<think>\n")


FIELDS = st.sampled_from(["messages", "role", "content", "stop", "n", "stream"])
BODIES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner),
    max_leaves=8,
).map(json.dumps)


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
@search_at_random(20)
@given(body=BODIES | st.binary(max_size=40))
def test_any_body_gets_an_answer_in_json(server: Running, body: str | bytes):
    for path in ("/chat/completions", "/completions"):
        reply = server.http.post(path, content=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"


SETTINGS = ["temperature", "top_p", "top_k", "repetition_penalty", "presence_penalty", "seed"]
NUMBERS = st.sampled_from([5e-324, 1e-38, 1e-10, 1e10, 1e38, 1e300]) | st.floats() | st.integers()


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
@search_at_random(20)
@given(numbers=st.dictionaries(st.sampled_from(SETTINGS), NUMBERS))
@example(numbers={"temperature": 1e-38})
@example(numbers={"temperature": 1e-10, "repetition_penalty": 1e-10})
@example(numbers={"temperature": 1e10, "repetition_penalty": 1e10})
def test_any_numbers_are_answered_or_refused(server: Running, numbers: dict[str, float]):
    reply = server.http.post("/completions", content=json.dumps({"prompt": "abc", "max_tokens": 2} | numbers))
    assert reply.status_code in (200, 400), reply.text


@pytest.mark.parametrize(
    "headers", [[f"Content-Length: {10**12}"], ["Transfer-Encoding: chunked"]], ids=["told", "sent"]
)
def test_a_body_beyond_the_limit_is_refused_before_it_has_come(server: Running, headers: list[str]):
    body = b"" if "Length" in headers[0] else b"%x\r\n" % 10**9 + b" " * (MOST_BYTES + 1)
    with server.connect("/completions", *headers, body=body) as connection:
        assert b" 413 " in connection.recv(1000)


def test_penalties_are_those_of_the_request(server: Running):
    free, text = (server.ask("Who signed it", max_tokens=40, **more).choices[0].text for more in ({}, PENALTIES))
    assert len(set(text)) > len(set(free))
