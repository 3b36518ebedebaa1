"""
Seconds to the first token from a server: `hf-hybrid-cache serve`, and llama.cpp's for Python with its prompt cache.

Both have the same model: ours with weights in 4 bits and keys and values in 8; llama.cpp with its own file of 4-bit
weights, and keys and values in 16 bits, as it took 150 s for such a prompt with 8. A client asks about a document of
English text, each of some questions in a conversation of its own, which both servers get in turns; then it goes on with
one conversation. Ours starts anew with the same store, too, and asks once more.

`--large` takes the shape of Llama 3.2-1B with random weights and the tokenizer of the small model. Its record has no
first question: both servers read for many minutes, so that nobody has to leave the machine alone meanwhile.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.common import records
from experiments.common.harness import finish, rounded
from experiments.common.options import plain_parser
from experiments.common.texts import english_ids
from experiments.peers import llama_cpp
from experiments.peers.gguf_files import gguf_file
from hf_hybrid_cache.models import load, load_config
from hf_hybrid_cache.models.loading import random_llama

MODEL, LARGE = "smollm2-135m", "llama-3.2-1b-random"
OURS, PEER = "ours", "llama.cpp"
BITS = 8
QUESTIONS = ("What is this text about?", "Which statement is named first?", "What is a module?", "What is a class?")
TURNS = ("And why is that so?", "Say it in one sentence.", "Name an example.")
LONG_TURN = 64  # tokens, of the large model
NEW_TOKENS = 24


def save_large_model(tokenizer: Any, folder: Path) -> Any:
    """Write the large shape with the tokens of the small model to a folder; return the model."""
    config: Any = load_config(LARGE)
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model = random_llama(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


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


def our_server(folder: str, weights: int) -> list[str]:
    """The command of our server, at port 8181, with a store in a folder."""
    ours = [sys.executable, "-m", "hf_hybrid_cache.cli", "serve", "--port", "8181", "--store", folder]
    return [*ours, "--weights", str(weights), "--bits", str(BITS)]


def ask(url: str, messages: list[dict[str, str]], new_tokens: int = NEW_TOKENS, **fields: object) -> dict[str, Any]:
    """Ask a server; return the answer, the seconds from the request to each of its pieces, and its tokens if told."""
    with urllib.request.urlopen(f"{url}/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {"model": model, "messages": messages, "max_tokens": new_tokens, "stream": True, "temperature": 0}
    body |= fields
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    start, times, text, usage = time.perf_counter(), list[float](), "", dict[str, Any]()
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                choices, usage = event["choices"], event.get("usage") or usage
                piece = choices[0].get("delta", {}).get("content") if choices else None
                if piece:
                    times.append(time.perf_counter() - start)
                    text += piece
    return {"text": text, "times": times, "tokens": usage.get("completion_tokens")}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def main() -> None:
    parser = plain_parser("serving", __doc__)
    parser.add_argument("--llama-cpp-python", default=sys.executable, help="that has llama-cpp-python[server]")
    parser.add_argument("--large", action="store_true", help="a model of 1.1 billion weights, which are random")
    parser.add_argument("--tokens", type=int, help="of the document (default: 7400, and 32768 with --large)")
    parser.add_argument("--weights", type=int, default=4, choices=(4, 8), help="bits (default: %(default)s)")
    arguments = parser.parse_args()
    tokens_read = arguments.tokens or (32768 if arguments.large else 7400)
    threads = str(records.num_cores())
    (_, tokenizer), small = load(MODEL), llama_cpp.gguf_file()
    assert tokenizer is not None
    assert small is not None, llama_cpp.INSTALL_MODEL
    (ids,) = english_ids(tokenizer, tokens_read + LONG_TURN * len(TURNS))
    text, *turns = (str(tokenizer.decode(part)).strip() for part in ids.split([tokens_read] + [LONG_TURN] * len(TURNS)))
    seconds: dict[str, dict[str, list[float]]] = {OURS: {}, PEER: {}}

    def note(server: str, what: str, answer: dict[str, Any]) -> str:
        first = answer["times"][0]
        seconds[server].setdefault(what, []).append(first)
        print(f"{server:10} {what:24} {first:7.3f} s", flush=True)
        return str(answer["text"])

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ours = our_server(folder, arguments.weights)
        file = small
        if arguments.large:
            model_folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = save_large_model(tokenizer, Path(model_folder))
            file = gguf_file(f"{LARGE}-with-tokens", arguments.weights, model, small)
            ours += ["--model", model_folder]
        peer = [arguments.llama_cpp_python, "-m", "llama_cpp.server", "--model", str(file), "--port", "8182"]
        peer += ["--n_ctx", str(tokens_read + 1024), "--n_threads", threads, "--n_threads_batch", threads]
        peer += ["--flash_attn", "true", "--cache", "true", "--cache_size", str(2**33), "--host", "127.0.0.1"]
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
            for number, turn in enumerate(turns if arguments.large else TURNS):
                for server in (OURS, PEER) if number % 2 else (PEER, OURS):
                    talks[server].append(user(turn))
                    said = note(server, "next turn", ask(urls[server], talks[server]))
                    talks[server].append({"role": "assistant", "content": said})
        with serving(ours, "http://127.0.0.1:8181/v1", {}) as urls[OURS]:
            ask(urls[OURS], [user("Hello.")])
            for question in ("What is a function?", "What is an expression?"):
                note(OURS, "after a restart", ask(urls[OURS], [user(f"{text}\n\n{question}")]))
    if arguments.large:
        for by_question in seconds.values():
            del by_question["first question"]
    record = {
        "model": LARGE if arguments.large else MODEL,
        "document_tokens": tokens_read,
        "weights_bits": arguments.weights,
        "kv_bits": {OURS: BITS, PEER: 16},
        "first_token_seconds": seconds,
    }
    finish("serving", record, rounded(seconds), arguments.out)


if __name__ == "__main__":
    main()
