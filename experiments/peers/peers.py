"""
A decode step at depth, whole model on the CPU: our caches, those of transformers and llama.cpp, taking turns.

All have read the same prompt and read on in the same text, one given token a step; a timed step follows an untimed one
of the same engine, as in decoding. Ours and those of transformers (`full` is `DynamicCache`): weights in bfloat16,
caches filled with the keys and values of one prefill in float32. Medians leave out the steps that code what has
gathered, one of 64 with ours and of 128 with `QuantizedCache`. llama.cpp: the 4-bit weights of its file, its own
prefill. As weights differ, so does what its step costs at any context; what can be compared is what 1,000 more tokens
of context add.

`x ours` is that, over the same of ours with as many bits. KV held, after the last step: of caches their tensors, of
llama.cpp what `llama_state_seq_get_size` counts. The cosine is that of logits with those of the model in float32.

"""

from statistics import fmean

import torch
from transformers import PreTrainedModel

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.harness import Cell, finish, rounded, table
from experiments.common.options import experiment_parser
from experiments.common.reading import CacheEngine, Engine, Passage, Reader, read_passage
from experiments.common.synthetic import kv_bytes
from experiments.common.texts import english_ids
from experiments.common.timing import in_turns, medians
from experiments.peers import llama_cpp
from experiments.quality.quality_caches import CACHES, filled, installed_version, reasons_to_skip
from hf_hybrid_cache import DynamicHybridCache, get_num_threads, set_num_threads
from hf_hybrid_cache.models import load

DTYPE = torch.bfloat16
MODEL = "smollm2-135m"
# Bits of a number, by engine; those with as many are compared.
BITS = {
    "ours-16": 16,
    "ours-8": 8,
    "ours-4": 4,
    "ours-2": 2,
    "full": 16,
    "quanto-4": 4,
    "quanto-2": 2,
    "hqq-4": 4,
    "hqq-2": 2,
} | {name: form.bits for name, form in llama_cpp.FORMS.items()}
PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}


def reasons_to_leave_out(model: PreTrainedModel, names: list[str], threads: int) -> dict[str, str]:
    """Return the reasons why some engines cannot be measured here, by name."""
    reasons = {}
    for name in names:
        package = PACKAGES.get(name.split("-")[0])
        if package and installed_version(package) is None:
            reasons[name] = f"not installed: pip install {package}"
        elif name in llama_cpp.FORMS and (reason := llama_cpp.reason_to_skip(name, threads)):
            reasons[name] = reason
    peers = [name for name in names if name in CACHES and name not in reasons]
    return reasons | reasons_to_skip(model, torch.arange(80)[None], peers)


def read_passages(contexts: list[int], steps: int) -> dict[int, Passage]:
    """Read a passage of each length with the model in float32, which is freed afterwards."""
    model, tokenizer = load(MODEL, torch.float32, "cpu")
    assert tokenizer is not None
    return {
        context: read_passage(model, english_ids(tokenizer, context + steps), context, DTYPE) for context in contexts
    }


def make_readers(
    model: PreTrainedModel, passages: dict[int, Passage], names: list[str], threads: int
) -> dict[int, dict[str, Reader]]:
    """Make the readers by context and engine."""
    make_cache = CACHES | {"ours-16": DynamicHybridCache}
    file_model = llama_cpp.Model() if set(names) & set(llama_cpp.FORMS) else None

    def engine(name: str, passage: Passage) -> Engine:
        if name not in llama_cpp.FORMS:
            return CacheEngine(model, filled(make_cache[name](model.config), passage.prefilled))
        assert file_model is not None
        form = llama_cpp.FORMS[name]
        return llama_cpp.Engine(file_model, form, passage.prompt, len(passage.following), threads)

    return {
        context: {name: Reader(engine(name, passage), passage) for name in names}
        for context, passage in passages.items()
    }


def measure(readers: dict[int, dict[str, Reader]], rounds: int) -> list[Cell]:
    """Measure all engines in turns; return a cell for each context, with raw samples in seconds."""
    all_readers = {f"{name} {context}": reader for context, group in readers.items() for name, reader in group.items()}

    def prepare(key: str) -> None:
        all_readers[key].compare()  # not after the step: threads of torch would still wait, spinning, in the timed one
        all_readers[key].step()

    samples = in_turns({key: reader.step for key, reader in all_readers.items()}, rounds, prepare)
    seconds = medians(samples)
    return [
        {
            "context_tokens": context,
            "median_seconds": {name: seconds[f"{name} {context}"] for name in group},
            "kv_bytes": {name: reader.engine.kv_bytes() for name, reader in group.items()},
            "cosine_of_logits": {name: fmean(reader.cosines) for name, reader in group.items()},
            "samples_seconds": {name: samples[f"{name} {context}"] for name in group},
        }
        for context, group in readers.items()
    ]


def added_per_1000_tokens(cells: list[Cell]) -> dict[str, float]:
    """Return the seconds that 1,000 more tokens add, between the shortest context and the longest."""
    first, last = cells[0], cells[-1]
    thousands = (last["context_tokens"] - first["context_tokens"]) / 1000
    return {
        name: (seconds - first["median_seconds"][name]) / thousands for name, seconds in last["median_seconds"].items()
    }


def times_ours(added: dict[str, float]) -> dict[str, float]:
    """Return the time of each peer over ours with the same bits, where both were measured."""
    peers = {name: f"ours-{BITS[name]}" for name in added if not name.startswith("ours")}
    return {name: added[name] / added[ours] for name, ours in peers.items() if ours in added}


def main() -> None:
    parser = experiment_parser("peers", __doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8000], help="tokens, two or more")
    parser.add_argument("--engines", nargs="+", choices=BITS, default=list(BITS), metavar="NAME", help=", ".join(BITS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=get_num_threads())
    arguments = parser.parse_args()
    contexts = sorted(set(arguments.contexts))
    steps = 2 * (arguments.rounds + 1)  # a timed and an untimed one in each round, and in one to warm up
    if len(contexts) < 2:
        parser.error("What a longer context adds takes two --contexts or more.")
    set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    memory = MemoryReader(arguments.buffer_mib)
    rate = read_bandwidth(memory)
    model, _ = load(MODEL, DTYPE, "cpu")
    if contexts[-1] + steps > model.config.max_position_embeddings:
        parser.error(
            f"{MODEL} has {model.config.max_position_embeddings:,} positions, fewer than the "
            f"{contexts[-1]:,} tokens and {steps} steps."
        )
    print(f"ceiling: 1,000 tokens of 16-bit KV are read in {kv_bytes(model.config, 1000, DTYPE) / rate * 1e3:.3f} ms")
    asked = [name for name in BITS if name in arguments.engines]
    left_out = reasons_to_leave_out(model, asked, arguments.threads)
    names = [name for name in asked if name not in left_out]
    readers = make_readers(model, read_passages(contexts, steps), names, arguments.threads)
    cells = measure(readers, arguments.rounds)
    for cell in cells:
        print(table(str(cell["context_tokens"]), cell))
    added = added_per_1000_tokens(cells)
    library = None
    if set(names) & set(llama_cpp.FORMS):
        file = llama_cpp.gguf_file()
        library = {"weights": file and file.name, **llama_cpp.report()}
    record: Cell = {
        "model": MODEL,
        "prefill": "real",
        "dtype": str(DTYPE),
        "threads": arguments.threads,
        "peers": {package: installed_version(package) for package in (*PACKAGES.values(), llama_cpp.PACKAGE)},
        "llama.cpp": library,
        "cells": cells,
        "added_seconds_per_1000_tokens": added,
        "times_ours": times_ours(added),
        "left_out": left_out,
        "read_bandwidth": memory.report(),
    }
    print(table("1,000 tokens more", {key: record[key] for key in ("added_seconds_per_1000_tokens", "times_ours")}))
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}")
    folder = arguments.out or records.RESULTS / "peers" / MODEL
    finish("peers", record, rounded({name: seconds * 1e3 for name, seconds in added.items()}), folder)


if __name__ == "__main__":
    main()
