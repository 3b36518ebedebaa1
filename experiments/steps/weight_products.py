"""
Products of tokens with all weights of the Llama-3.2-1B shape, one after the other as in a model: ours and torch's, in
bfloat16, 8 and 4 bits, taking turns. With the processor's own instructions, and in a second process with those of
AVX2 only.

Torch's are what it has for few bits on the CPU: `_weight_int8pack_mm` (a scale for each row) and
`_weight_int4pack_mm_for_cpu` (groups of 32 weights, as ours).
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experiments.common.bandwidth import MemoryReader
from experiments.common.harness import Cell, finish, rounded, table, turns
from experiments.common.options import experiment_parser
from experiments.common.synthetic import llama_1b_config
from experiments.common.told_process import HERE
from hf_hybrid_cache import quantize_weights
from hf_hybrid_cache.models.random_weights import random_llama

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 4096]
GROUP = 32
# Variables by which torch and Numba use fewer instructions than the processor has.
INSTRUCTION_SETS = {
    "native": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse3,+sse4.1,+sse4.2,+ssse3",
    },
}
Product = Callable[[torch.Tensor], torch.Tensor]


def matrices(layers: int, vocabulary: int, bits: int | None = None) -> list[torch.Tensor]:
    """Weights of the linear layers of a model, in the order of their use; ours if they are to be of few bits."""
    config = llama_1b_config(layers)
    config.vocab_size = vocabulary
    model = random_llama(config, torch.bfloat16)
    if bits is not None:
        quantize_weights(model, bits, GROUP, head_bits=bits)
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def torch_int8(weight: torch.Tensor) -> Product:
    scales = weight.float().abs().amax(1) / 127
    codes = (weight.float() / scales[:, None]).round().to(torch.int8)
    return lambda tokens: torch._weight_int8pack_mm(tokens, codes, scales.to(weight.dtype))


def torch_int4(weight: torch.Tensor) -> Product:
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    scales = (high - low) / 15
    codes = ((groups - low[..., None]) / scales[..., None]).round().to(torch.int32).flatten(1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    # It takes the middle of the codes for zero.
    numbers = torch.stack([scales, low + 8 * scales], -1).transpose(0, 1).contiguous().to(weight.dtype)
    return lambda tokens: torch.ops.aten._weight_int4pack_mm_for_cpu(tokens, packed, GROUP, numbers)


def all_products(products: list[tuple[int, Product]], num_tokens: int) -> Callable[[], None]:
    """Multiply some tokens with each weight, whose inputs are so many."""
    tokens = {columns: torch.randn(num_tokens, columns).to(torch.bfloat16) for columns, _ in products}

    def run() -> None:
        with torch.inference_mode():
            for columns, product in products:
                product(tokens[columns])

    return run


def measure(layers: int, vocabulary: int, token_counts: list[int], rounds: int, buffer_mib: int | None) -> Cell:
    """Medians and samples by number of tokens."""
    plain = [weight.detach() for weight in matrices(layers, vocabulary)]
    columns = [weight.shape[1] for weight in plain]

    def linear(weight: torch.Tensor) -> Product:
        return lambda tokens: functional.linear(tokens, weight)

    forms: dict[str, list[Product]] = {
        "torch bfloat16": [linear(weight) for weight in plain],
        "torch 8 bits": [torch_int8(weight) for weight in plain],
        "torch 4 bits": [torch_int4(weight) for weight in plain],
        "ours 8 bits": [linear(weight) for weight in matrices(layers, vocabulary, 8)],
        "ours 4 bits": [linear(weight) for weight in matrices(layers, vocabulary, 4)],
    }
    reader = MemoryReader(buffer_mib)
    cells = []
    for count in token_counts:
        actions = {
            name: all_products(list(zip(columns, products, strict=True)), count) for name, products in forms.items()
        }
        cell = turns(actions, rounds if count <= 16 else max(3, rounds // 4), lambda _: reader.read())
        cells.append({"tokens": count, **cell})
    weights = sum(weight.numel() for weight in plain)
    return {"weights": weights, "cells": cells, "read": reader.report()}


def ratios(cells: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the time of torch over ours, by bits and number of tokens, and over bfloat16."""
    pairs = {
        "torch 8 bits over ours": ("torch 8 bits", "ours 8 bits"),
        "torch 4 bits over ours": ("torch 4 bits", "ours 4 bits"),
        "bfloat16 over ours of 8 bits": ("torch bfloat16", "ours 8 bits"),
        "bfloat16 over ours of 4 bits": ("torch bfloat16", "ours 4 bits"),
    }
    return {
        name: {str(cell["tokens"]): cell["median_seconds"][first] / cell["median_seconds"][second] for cell in cells}
        for name, (first, second) in pairs.items()
    }


def in_process(instruction_set: str) -> Cell:
    """Measure with the options of this process, in one that sees only these instructions."""
    answer = subprocess.run(
        [sys.executable, "-m", "experiments.steps.weight_products", "--answer", *sys.argv[1:]],
        cwd=HERE,
        env=os.environ | INSTRUCTION_SETS[instruction_set],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: Cell = json.loads(answer.stdout.splitlines()[-1])
    return result | {"ratios": ratios(result["cells"])}


def main() -> None:
    parser = experiment_parser("weight_products", __doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="multiplied at once")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each, a quarter for many tokens")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        sizes = (arguments.layers, arguments.vocabulary)
        print(json.dumps(measure(*sizes, arguments.tokens, arguments.rounds, arguments.buffer_mib)))
        return
    results = {}
    for name in INSTRUCTION_SETS:
        results[name] = in_process(name)
        for cell in results[name]["cells"]:
            print(table(name, cell), flush=True)
    record = {"layers": arguments.layers, "group": GROUP, "rounds": arguments.rounds, "instruction_sets": results}
    answers = {name: rounded(result["ratios"]) for name, result in results.items()}
    finish("weight_products", record, answers, arguments.out)


if __name__ == "__main__":
    main()
