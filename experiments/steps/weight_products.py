"""
Products of tokens with all weights of the Llama-3.2-1B shape, one after the other as in a model: torch's in bfloat16,
and ours in 8 and 4 bits, taking turns. With the processor's own instructions, and in a second process with those of
AVX2 only.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import torch
from torch import nn
from torch.nn.functional import linear

from experiments.common.bandwidth import MemoryReader
from experiments.common.harness import Cell, finish, over, rounded, table, turns
from experiments.common.instructions import variables_without
from experiments.common.options import experiment_parser
from experiments.common.synthetic import llama_1b_config
from experiments.common.told_process import ToldProcess, tell
from hf_hybrid_cache import quantize_weights
from hf_hybrid_cache.models.loading import random_llama

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 4096]
GROUP = 32
FORMS = {"torch bfloat16": None, "ours 8 bits": 8, "ours 4 bits": 4}
# What goes for instructions of AVX2 to be left; the key is its name in records.
INSTRUCTION_SETS = {"native": (), "avx2": ("amx", "avx10", "avx512", "vnni")}


def matrices(layers: int, vocabulary: int, bits: int | None) -> list[torch.Tensor]:
    """Weights of the linear layers of a model, in the order of their use; ours if they are to be of few bits."""
    config = llama_1b_config(layers)
    config.vocab_size = vocabulary
    model = random_llama(config, torch.bfloat16)
    if bits is not None:
        quantize_weights(model, bits, GROUP, head_bits=bits)
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def all_products(weights: list[torch.Tensor], num_tokens: int) -> Callable[[], None]:
    """Multiply some tokens with each weight."""
    tokens = {columns: torch.randn(num_tokens, columns).bfloat16() for columns in {each.shape[1] for each in weights}}

    @torch.inference_mode()
    def run() -> None:
        for weight in weights:
            linear(tokens[weight.shape[1]], weight)

    return run


def measure(layers: int, vocabulary: int, token_counts: list[int], rounds: int, buffer_mib: int | None) -> Cell:
    """Medians and samples by number of tokens."""
    forms = {name: matrices(layers, vocabulary, bits) for name, bits in FORMS.items()}
    reader = MemoryReader(buffer_mib)
    cells = []
    for count in token_counts:
        actions = {name: all_products(weights, count) for name, weights in forms.items()}
        cell = turns(actions, rounds if count <= 16 else max(3, rounds // 4), lambda _: reader.read())
        cells.append({"tokens": count, "times_bfloat16": over(cell, "torch bfloat16"), **cell})
    weights = sum(weight.numel() for weight in forms["torch bfloat16"])
    return {"weights": weights, "cells": cells, "read": reader.report()}


def main() -> None:
    parser = experiment_parser("weight_products", __doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="multiplied at once")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each, a quarter for many tokens")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    def answers() -> Iterator[Cell]:
        sizes = (arguments.layers, arguments.vocabulary)
        yield measure(*sizes, arguments.tokens, arguments.rounds, arguments.buffer_mib)

    if arguments.answer:
        tell(answers())
        return
    results, ratios = {}, {}
    command = [sys.executable, "-m", "experiments.steps.weight_products", "--answer", *sys.argv[1:]]
    for name, hidden in INSTRUCTION_SETS.items():
        with closing(ToldProcess(command, environment=os.environ | variables_without(*hidden))) as process:
            results[name] = process.first
        for cell in results[name]["cells"]:
            print(table(name, cell), flush=True)
            ratios[f"{name}, {cell['tokens']}"] = rounded(cell["times_bfloat16"])
    record = {"layers": arguments.layers, "group": GROUP, "rounds": arguments.rounds, "instruction_sets": results}
    finish("weight_products", record, ratios, arguments.out)


if __name__ == "__main__":
    main()
