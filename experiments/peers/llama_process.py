"""
A process that runs llama.cpp, or ik_llama.cpp, with one conversation.

Each conversation has its own: a crash ends only it, its threads do not wait beside others, and the package may be
installed for another Python. As a program it is given `Settings` as JSON. It writes what it holds, then takes tokens,
one a line, and answers each with the seconds of its step.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.timing import medians, samples_in_turns, seconds_of
from experiments.peers import ik_llama_cpp, llama_cpp
from experiments.peers.llama_cpp import Form, reason_of_end

LIBRARIES: dict[str, Any] = {
    "llama.cpp": (llama_cpp.LlamaCppModel, llama_cpp.LlamaCppEngine, llama_cpp.library_report),
    "ik_llama.cpp": (ik_llama_cpp.IkLlamaCppModel, ik_llama_cpp.IkLlamaCppEngine, ik_llama_cpp.report),
}
PROMPT_TOKENS = 256
CHOICE_ROUNDS = 5
CHOICE_STEPS = 2 * (CHOICE_ROUNDS + 1) + 1


@dataclass(frozen=True)
class Settings:
    """
    The library, model file and options of a process.

    Attributes:
        library: a key of `LIBRARIES`.
        file: of the weights.
        repacked: whether these are put into another order first.
        form: of keys and values.
        context: tokens held before the first step: a random prompt, and its keys and values over and over.
        steps: how many there will be.
        threads: to compute with.
        prompt: tokens of the prompt, at most.
    """

    library: str
    file: str
    repacked: bool
    form: Form
    context: int
    steps: int
    threads: int
    prompt: int = PROMPT_TOKENS

    def told(self) -> dict[str, Any]:
        """Return the settings that a record contains."""
        return {"file": Path(self.file).name, "repacked": self.repacked, "flash attention": self.form.flash}


class LlamaProcess:
    """
    A running process of llama.cpp or ik_llama.cpp, which is told to compute step by step.

    Args:
        python: that has the library.
        settings: what to run.

    Attributes:
        holds: bytes of weights, and of keys and values.
        prompt_seconds: that reading the prompt took.
        library: its versions, and what it was built for.
    """

    def __init__(self, python: str, settings: Settings):
        self._process = subprocess.Popen(
            [python, "-m", "experiments.peers.llama_process", json.dumps(asdict(settings))],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.holds, self.prompt_seconds, self.library = self._answer()

    def step(self, token: int) -> float:
        """Seconds that one more token takes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{token}\n")
        self._process.stdin.flush()
        seconds: float = self._answer()
        return seconds

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or "{}")
        if "answer" in answer:
            return answer["answer"]
        self._process.communicate()
        raise LlamaProcessError(answer.get("error") or reason_of_end(self._process.returncode, ""))


class LlamaProcessError(RuntimeError):
    """A process ended by itself; the message says how."""


def fastest(python: str, candidates: dict[str, Settings]) -> tuple[str, dict[str, float | str]]:
    """
    Find the fastest settings, in turns; return their name, and the seconds of each or its error.

    Raises:
        LlamaProcessError: none of them runs.
    """
    processes, failures = {}, {}
    try:
        for name, settings in candidates.items():
            try:
                process = LlamaProcess(python, settings)
                process.step(0)
                processes[name] = process
            except LlamaProcessError as error:
                failures[name] = str(error)
        if not processes:
            raise LlamaProcessError("; ".join(failures.values()))
        measures = {name: partial(process.step, 0) for name, process in processes.items()}
        seconds = medians(samples_in_turns(measures, CHOICE_ROUNDS, lambda name: processes[name].step(0)))
    finally:
        for process in processes.values():
            process.close()
    return min(seconds, key=seconds.__getitem__), seconds | failures


def answers(settings: Settings) -> Iterator[Any]:
    """Yield the answers of the process: first its memory and settings, then seconds for each line of input."""
    make_model, make_engine, report = LIBRARIES[settings.library]
    model = make_model(Path(settings.file), settings.repacked)
    prompt = np.random.default_rng(0).integers(model.vocabulary, size=min(settings.prompt, settings.context)).tolist()
    if len(prompt) > PROMPT_TOKENS:  # a timed prompt does not wait for weights from the disk
        make_engine(model, settings.form, prompt[:PROMPT_TOKENS], 1, settings.threads)
    start = time.perf_counter()
    engine = make_engine(model, settings.form, prompt, settings.steps, settings.threads, settings.context)
    seconds = time.perf_counter() - start
    yield {"weight_bytes": Path(settings.file).stat().st_size, "kv_bytes": engine.kv_bytes()}, seconds, report()
    for line in sys.stdin:
        yield seconds_of(partial(engine.step, int(line)))


def main() -> None:
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the libraries print, too
    values = json.loads(sys.argv[1])
    try:
        for answer in answers(Settings(**values | {"form": Form(**values["form"])})):
            print(json.dumps({"answer": answer}), file=output)
    except Exception as error:  # whatever it is, another process tells of it
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=output)


if __name__ == "__main__":
    main()
