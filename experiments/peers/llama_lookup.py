"""
A process in which llama-cpp-python answers prompts, greedily, with `LlamaPromptLookupDecoding` or without.

As a program it is given `Settings` as JSON, and quantizes the weights first. Then each line is a prompt, a list of
tokens; it answers with the tokens of the answer. What a prompt and the one before have in common is not read again.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from experiments.common.told_process import ToldProcess, failure_of, tell
from experiments.peers.llama_cpp import INSTALL, quantize, report

# Tokens that are drafted; its page recommends 10 in general and 2 on processors.
PEERS = {"llama.cpp": 0, "llama.cpp, 2 drafted": 2, "llama.cpp, 10 drafted": 10}


@dataclass(frozen=True)
class Settings:
    """
    Weights, sizes and drafts of a process.

    Attributes:
        file: of the weights, in 16 bits.
        drafted: tokens that are drafted; 0 for none.
        context: tokens of a prompt and its answer, at most.
        new_tokens: of an answer, at most.
        threads: to compute with.
    """

    file: str
    drafted: int
    context: int
    new_tokens: int
    threads: int


class Lookups:
    """
    The processes of all `PEERS`, which wait for prompts.

    Args:
        python: that has llama-cpp-python.
        settings: of each; their number of drafted tokens is that of the peer.

    Attributes:
        library: its versions, and what it was built for.
    """

    def __init__(self, python: str, settings: Settings):
        self._processes = dict[str, ToldProcess]()
        for name, drafted in PEERS.items():
            told = json.dumps(asdict(settings) | {"drafted": drafted})
            self._processes[name] = ToldProcess([python, "-m", "experiments.peers.llama_lookup", told])
        self.library: Mapping[str, Any] = self._processes["llama.cpp"].first

    def answer(self, name: str, prompt: list[int]) -> list[int]:
        """Return the tokens of an answer of one of `PEERS`."""
        answer: list[int] = self._processes[name].ask(prompt)
        return answer

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.close()


def reason_to_leave_out(python: str) -> str | None:
    """Return why another Python cannot be asked; `None` if it can."""
    failure = failure_of([python, "-c", "import llama_cpp"])
    return f"not installed: {INSTALL}" if failure and "ModuleNotFoundError" in failure else failure


def answers(settings: Settings) -> Iterator[Any]:
    """Yield the answers of the process: first its library, then tokens for each line of input."""
    api = import_module("llama_cpp")
    lookup = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.gguf"
        quantize(Path(settings.file), file, "Q4_0")
        model = api.Llama(
            str(file),
            n_ctx=settings.context,
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
            type_k=api.GGML_TYPE_Q8_0,
            type_v=api.GGML_TYPE_Q8_0,
            flash_attn=True,
            logits_all=bool(settings.drafted),  # without which it keeps those of 512 tokens, and drafts fail after more
            draft_model=lookup(num_pred_tokens=settings.drafted) if settings.drafted else None,
            verbose=False,
        )
    yield report()
    for line in sys.stdin:
        tokens = model.generate(json.loads(line), top_k=1, temp=0.0)
        yield [*islice(takewhile(lambda token: token != model.token_eos(), tokens), settings.new_tokens)]


if __name__ == "__main__":
    tell(answers(Settings(**json.loads(sys.argv[1]))))
