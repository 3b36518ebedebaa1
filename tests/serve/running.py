"""A server in a process of its own, as a user starts it, and what it is asked."""

import functools
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hybrid_cache.chat import AnswerSettings

from chat import talks

DOCUMENT = "It was signed by Ada in London, on a Tuesday; the witness came from Turin. " * 20
NEW_TOKENS, KEY = 12, "a key"


class Running:
    """
    A server, ready to answer.

    Args:
        model: folder of the model.
        options: of the command.
    """

    def __init__(self, model: Path, *options: str):
        command = [sys.executable, "-m", "hf_hybrid_cache.cli", "serve", "--model", str(model), "--port", "0", *options]
        self._log = tempfile.TemporaryFile("a+")  # noqa: SIM115 - a pipe that nobody reads would be full soon
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert " answers at http" in said, (self.process.communicate(), self.log())
        self.model, self.url = str(model), said.split()[-1]
        self.client = openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=120)
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=self.url, timeout=120, headers=headers)

    def ask(self, messages: list[dict[str, str]] | str, **options: Any) -> Any:
        """Return a whole answer, as the client of OpenAI gives it."""
        given: Any = {"model": self.model, "max_tokens": NEW_TOKENS} | options
        if isinstance(messages, str):
            return self.client.completions.create(prompt=messages, **given)
        return self.client.chat.completions.create(messages=messages, **given)

    def connect(self, path: str = "", *headers: str, body: bytes = b"") -> socket.socket:
        """Begin a request of a path below `/v1`, or with "" only connect."""
        at = urlsplit(self.url)
        connection = socket.create_connection((at.hostname, at.port), timeout=120)
        if path:
            head = (f"POST /v1{path} HTTP/1.1", "Host: localhost", f"authorization: bearer {KEY}", *headers)
            connection.sendall("\r\n".join((*head, "", "")).encode() + body)
        return connection

    def leave(self, messages: list[dict[str, str]], requests: int = 1, **options: Any) -> None:
        """Ask for a whole answer, and go away once the server has so many requests."""
        body = json.dumps({"messages": messages} | options).encode()
        with self.connect("/chat/completions", f"Content-Length: {len(body)}", body=body):
            self.wait_for(requests)

    def wait_for(self, requests: int) -> None:
        """Wait until the server has so many requests."""
        end = time.monotonic() + 120
        while self.state()["requests"] != requests:
            assert time.monotonic() < end

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.http.get(self.url.removesuffix("/v1") + "/health").json()
        return state

    def end(self, number: int = signal.SIGINT) -> str:
        """End the process by a signal, if it has not ended; return what it said on standard error."""
        self.process.send_signal(number)
        self.process.communicate(timeout=120)
        self.client.close()
        self.http.close()
        said = self.log()
        self._log.close()
        return said

    def log(self) -> str:
        """Return what it has said on standard error."""
        self._log.seek(0)
        return self._log.read()


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Running]:
    """Run a server, which Ctrl-C ends after the block, if nothing has; it has said nothing of an error then."""
    server, has_passed = Running(model, *options), False
    try:
        yield server
        has_passed = True
    finally:
        said = server.end(signal.SIGINT if has_passed else signal.SIGKILL)
    assert "Traceback" not in said, said
    assert server.process.returncode in (130, -signal.SIGKILL)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def cached(answer: Any) -> tuple[int, int]:
    """Return the tokens of an answer's prompt, and how many of them were not computed for it."""
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


def generated(folder: str, prompt: list[dict[str, str]] | str, **options: Any) -> str:
    """Return the text that transformers generates after a prompt with its own cache, by settings of an answer."""
    model, tokenizer = loaded(folder)
    if isinstance(prompt, str):
        token_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    else:
        token_ids = talks.prompt_tokens(((each["role"], each["content"]) for each in prompt), tokenizer)
    settings = AnswerSettings(**{"max_new_tokens": NEW_TOKENS} | options)
    return str(tokenizer.decode(talks.generated(model, token_ids, settings), skip_special_tokens=True))


def read(folder: Path | str) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


loaded = functools.cache(read)
