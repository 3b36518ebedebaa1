"""
A process that runs llama.cpp, or ik_llama.cpp, with one conversation; its Python, and the options it is fastest with.

Each conversation has its own: a crash ends only it, its threads do not wait beside others, and the package may be
installed for another Python. As a program it is given `Settings` as JSON. It answers first with what it holds, then
each token with the seconds of its step.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.timing import medians, samples_in_turns, seconds_of
from experiments.common.told_process import EndedError, ToldProcess, failure_of, tell
from experiments.peers import ik_llama_cpp, llama_cpp
from experiments.peers.llama_cpp import FORMS, Form
from experiments.peers.step_rows import LIBRARIES, Row

MODULES: dict[str, Any] = dict(zip(LIBRARIES, (llama_cpp, ik_llama_cpp), strict=True))
# Forms of keys and values, by bits; few bits need flash attention.
KV_FORMS: dict[int, dict[str, Form]] = {
    16: {"plain": FORMS["llama.cpp-f16"], "flash": FORMS["llama.cpp-f16-flash"]},
    8: {"flash": FORMS["llama.cpp-q8_0"]},
    4: {"flash": FORMS["llama.cpp-q4_0"]},
}
WEIGHT_ORDERS = {"as in the file": False, "repacked": True}
PROMPT_TOKENS = 256
SHORT_CONTEXT = 256  # where a step is reading weights
LONGEST_CONTEXT = 32_768  # both kinds of attention are tried at most here; the faster one is used beyond it too
CHOICE_ROUNDS = 5
CHOICE_STEPS = 2 * (CHOICE_ROUNDS + 1) + 1


@dataclass(frozen=True)
class Settings:
    """
    The library, model file and options of a process.

    Attributes:
        library: one of `LIBRARIES`.
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


class LlamaProcess(ToldProcess):
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
        super().__init__([python, "-m", "experiments.peers.llama_process", json.dumps(asdict(settings))])
        self.holds, self.prompt_seconds, self.library = self.first

    def step(self, token: int) -> float:
        """Seconds that one more token takes."""
        seconds: float = self.ask(token)
        return seconds


def fastest(python: str, candidates: Mapping[str, Settings]) -> tuple[str, dict[str, float | str]]:
    """
    Find the fastest settings, in turns; return their name, and the seconds of each or its error.

    Raises:
        EndedError: none of them runs.
    """
    processes, failures = {}, {}
    try:
        for name, settings in candidates.items():
            try:
                process = LlamaProcess(python, settings)
                process.step(0)
                processes[name] = process
            except EndedError as error:
                failures[name] = str(error)
        if not processes:
            raise EndedError("; ".join(failures.values()))
        measures = {name: partial(process.step, 0) for name, process in processes.items()}
        seconds = medians(samples_in_turns(measures, CHOICE_ROUNDS, lambda name: processes[name].step(0)))
    finally:
        for process in processes.values():
            process.close()
    return min(seconds, key=seconds.__getitem__), seconds | failures


class BestOptions:
    """
    Finds the fastest options of each library, and remembers them.

    Args:
        pythons: that have the libraries, by library.
        files: weights, by bits.
        threads: to compute with.

    Attributes:
        tried: median seconds of what was tried, or why it does not run.
    """

    def __init__(self, pythons: Mapping[str, str], files: Mapping[int, Path], threads: int):
        self.tried: dict[str, dict[str, float | str]] = {}
        self._pythons, self._files, self._threads = pythons, files, threads
        self._best: dict[str, str] = {}

    def settings(self, row: Row, context: int, steps: int) -> Settings:
        """
        Return the fastest settings for a row of one of the libraries.

        Raises:
            EndedError: it does not run here.
        """
        forms = KV_FORMS[row.kv_bits]
        form = next(iter(forms))
        if len(forms) > 1:
            tried = Row(row.engine, min(self._files), row.kv_bits)
            shorter = min(context, LONGEST_CONTEXT)
            repacked = self._repacked(tried)
            candidates = {
                name: self._settings(tried, repacked, each, shorter, CHOICE_STEPS) for name, each in forms.items()
            }
            form = self._fastest(f"{row.engine} KV{row.kv_bits}, {shorter:,} tokens", row.engine, candidates)
        return self._settings(row, self._repacked(row), forms[form], context, steps)

    def _repacked(self, row: Row) -> bool:
        candidates = {
            order: self._settings(row, repacked, KV_FORMS[16]["plain"], SHORT_CONTEXT, CHOICE_STEPS)
            for order, repacked in WEIGHT_ORDERS.items()
        }
        return WEIGHT_ORDERS[self._fastest(f"{row.engine} W{row.weight_bits}", row.engine, candidates)]

    def _fastest(self, choice: str, library: str, candidates: Mapping[str, Settings]) -> str:
        if choice not in self._best:
            self._best[choice], self.tried[choice] = fastest(self._pythons[library], candidates)
        return self._best[choice]

    def _settings(self, row: Row, repacked: bool, form: Form, context: int, steps: int) -> Settings:
        file = str(self._files[row.weight_bits])
        return Settings(row.engine, file, repacked, form, context, steps, self._threads)


def add_python_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for the Python of each library."""
    for library in LIBRARIES:
        option = f"--{library.replace('.', '-').replace('_', '-')}-python"
        told = f"that has {library} (default: this one)"
        parser.add_argument(option, dest=library, default=sys.executable, help=told)


def reasons_to_leave_out(pythons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons why libraries cannot be measured here, by library."""
    if find_spec("llama_cpp") is None:  # it writes the files of both
        return dict.fromkeys(LIBRARIES, f"not installed: {llama_cpp.INSTALL}")
    reasons = {}
    for library, module in MODULES.items():
        if failure := failure_of([pythons[library], "-c", f"import {library.replace('.', '_')}"]):
            reasons[library] = f"not installed: {module.INSTALL}" if "ModuleNotFoundError" in failure else failure
    return reasons


def answers(settings: Settings) -> Iterator[Any]:
    """Yield the answers of the process: first its memory and settings, then seconds for each line of input."""
    module = MODULES[settings.library]
    model = module.Model(Path(settings.file), settings.repacked)
    prompt = np.random.default_rng(0).integers(model.vocabulary, size=min(settings.prompt, settings.context)).tolist()
    if len(prompt) > PROMPT_TOKENS:  # a timed prompt does not wait for weights from the disk
        module.Engine(model, settings.form, prompt[:PROMPT_TOKENS], 1, settings.threads)
    start = time.perf_counter()
    engine = module.Engine(model, settings.form, prompt, settings.steps, settings.threads, settings.context)
    seconds = time.perf_counter() - start
    yield {"weight_bytes": Path(settings.file).stat().st_size, "kv_bytes": engine.kv_bytes()}, seconds, module.report()
    for line in sys.stdin:
        yield seconds_of(partial(engine.step, int(line)))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    tell(answers(Settings(**given | {"form": Form(**given["form"])})))
