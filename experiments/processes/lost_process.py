"""
The time until the other processes end with an error when one that shares a cache with them is killed in a step.

Each trial starts a group that decodes with a small random model, kills one process at a random moment, and waits for
what the others raise. `killed` ends the process; `stopped` leaves it there without an answer, which the others wait
for as long as the timeout of the group.
"""

import os
import random
import signal
import statistics
import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed
from transformers import LlamaConfig

from experiments.common.decoding import GreedyDecoder, prefill
from experiments.common.harness import finish
from experiments.common.options import plain_parser
from hf_hybrid_cache import DynamicHybridCache, LostProcessError, set_num_threads
from hf_hybrid_cache.models.random_weights import random_llama

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
PROMPT_TOKENS = 500
ENDED = "ended with an error"
# After which a process that has said nothing is taken for one that never will.
_SECONDS_TO_END = 120


def _process(pipe: Connection, rank: int, processes: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=timeout),
    )
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32,
    )  # fmt: skip
    model = random_llama(config, torch.float32)
    cache = DynamicHybridCache(config, cpu_decode=True, group=distributed.group.WORLD)
    ids = torch.randint(0, 1000, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    decoder = GreedyDecoder(model, cache, int(prefill(model, cache, ids).argmax()))
    pipe.send("ready")
    try:
        while True:
            decoder.step()
    except LostProcessError:
        pipe.send(ENDED)


def trial(what: str, processes: int, timeout: float, moment: random.Random) -> dict[str, Any]:
    """Lose one process; what the others say, and after how many seconds each."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["hf_hybrid_cache.cache", "experiments.common.decoding", "experiments.common.records"]
    )
    lost = moment.randrange(processes)
    with TemporaryDirectory() as folder:
        pipes, started = [], []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            given = (theirs, rank, processes, str(Path(folder) / "store"), timeout)
            started.append(context.Process(target=_process, args=given, daemon=True))
            pipes.append(ours)
        try:
            for process in started:
                process.start()
            for pipe in pipes:
                pipe.recv()
            time.sleep(moment.uniform(0.05, 0.5))
            pid = started[lost].pid
            assert pid is not None
            os.kill(pid, SIGNALS[what])
            start = time.perf_counter()
            seconds = []
            for rank, pipe in enumerate(pipes):
                if rank != lost and pipe.poll(_SECONDS_TO_END) and pipe.recv() == ENDED:
                    seconds.append(time.perf_counter() - start)
        finally:
            for process in started:
                process.kill()
                process.join()
    return {
        "what": what,
        "processes": processes,
        "lost_rank": lost,
        "all_ended": len(seconds) == processes - 1,
        "seconds": max(seconds, default=None),
    }


def main() -> None:
    parser = plain_parser("lost_process", __doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--killed", type=int, default=50, help="trials (default: %(default)s)")
    parser.add_argument("--stopped", type=int, default=10, help="likewise")
    parser.add_argument("--timeout", type=float, default=5.0, help="of the group, in seconds")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    moment = random.Random(0)
    trials = []
    for what, count in (("killed", options.killed), ("stopped", options.stopped)):
        for number in range(count):
            processes = options.processes[number % len(options.processes)]
            trials.append(trial(what, processes, options.timeout, moment))
            if not trials[-1]["all_ended"]:
                print(f"not ended: {trials[-1]}", flush=True)
    answers = {}
    for what in SIGNALS:
        of_these = [each for each in trials if each["what"] == what]
        if of_these:
            ended = sum(each["all_ended"] for each in of_these)
            taken = [each["seconds"] for each in of_these if each["seconds"] is not None]
            answers[what] = {
                "trials": len(of_these),
                "ended": ended,
                "median_seconds": statistics.median(taken),
                "most_seconds": max(taken),
            }
            print(f"{what}: {answers[what]}")
    record = {"timeout_seconds": options.timeout, "answers": answers, "cells": trials}
    finish("lost_process", record, answers, options.out)


if __name__ == "__main__":
    main()
