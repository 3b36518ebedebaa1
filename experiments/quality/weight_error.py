"""
The error of a layer's output, and the divergence of a model's next token, with quantized weights.

Layers: matrices of Llama-3.2-1B's shapes with heavy tails (Student's t with five degrees of freedom), a spread of sizes
over inputs and outputs, and one input in a hundred with weights several times as large; tokens in which some channels
are tens of times as large as the others. The error is that of the output, relative to its length, against float64, with
tokens in float32. An expert of Qwen3-30B-A3B's shape likewise: its gate, up and down projections together. Peers are
torch's codes of 8 bits (a scale for each row) and of 4 bits (min-max, groups of 64), and llama.cpp's Q8_0 and Q4_0
(groups of 32) as the `gguf` package codes them. Ours are with few tokens, and with as many as a prompt has, which are
rounded to 8 bits where the processor has the products for it.

Model: the KL divergence of the next token of SmolLM2-135M from that with the weights as they are, in float32 over
English text. A window is read as a prompt is, and its head gets few tokens at a time, as the end of a prompt does; also
with tokens that are not rounded to 8 bits. Its weights in 4 bits prove little, because they come from a file of 4 bits.
"""

import json
from collections.abc import Callable
from typing import Any

import gguf
import torch
from torch import nn
from torch.nn.functional import linear, silu
from transformers import LlamaConfig, PreTrainedModel
from transformers.utils import logging

from experiments.common import records
from experiments.common.options import plain_parser
from experiments.common.texts import TEXTS, english_ids
from hf_hybrid_cache import quantize_weights
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels
from hf_hybrid_cache.models import load
from hf_hybrid_cache.models.random_weights import random_llama

SHAPES = {"attention": (2048, 2048), "up": (8192, 2048), "down": (2048, 8192)}
EXPERT = (2048, 768)  # hidden and intermediate size
GROUPS = (32, 64, 128)
TOKENS = 32  # few
LARGE_WEIGHTS, LARGE_INPUTS = 6.0, 30.0


def heavy_weight(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Float32 `[rows, columns]` with heavy tails and channels that stand out."""
    normal = torch.randn(6, rows, columns, generator=generator)
    weight = normal[0] / (normal[1:].square().sum(0) / 5).sqrt()
    weight *= torch.randn(rows, 1, generator=generator).mul(0.3).exp()
    weight *= torch.randn(1, columns, generator=generator).mul(0.3).exp()
    weight[:, torch.randperm(columns, generator=generator)[: columns // 100]] *= LARGE_WEIGHTS
    return 0.02 * weight


def heavy_tokens(columns: int, generator: torch.Generator) -> torch.Tensor:
    tokens = torch.randn(TOKENS, columns, generator=generator)
    tokens *= torch.randn(1, columns, generator=generator).mul(0.5).exp()
    tokens[:, torch.randperm(columns, generator=generator)[: columns // 200]] *= LARGE_INPUTS
    return tokens


def ours(bits: int, group: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that quantizes and dequantizes a weight."""

    def code(weight: torch.Tensor) -> torch.Tensor:
        rows, columns = weight.shape
        config = LlamaConfig(vocab_size=32, hidden_size=columns, intermediate_size=32, num_hidden_layers=1)
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 1, 1, 32
        model = random_llama(config, torch.float32)
        model.lm_head = nn.Linear(columns, rows, bias=False)
        model.lm_head.weight = nn.Parameter(weight)
        with quantize_weights(model, bits, group, head_bits=bits, temporary=True):
            quantized: torch.Tensor = model.lm_head.weight
        return quantized

    return code


def torch_int8(weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round() * scales


def torch_int4(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.unflatten(1, (-1, 64))
    low = groups.amin(2, keepdim=True)
    scales = (groups.amax(2, keepdim=True) - low) / 15
    codes = ((groups - low) / scales).round()
    # Scales and middles are stored in bfloat16.
    scales, middle = scales.bfloat16().float(), (low + 8 * scales).bfloat16().float()
    return ((codes - 8) * scales + middle).flatten(1)


def llama_cpp(kind: gguf.GGMLQuantizationType) -> Callable[[torch.Tensor], torch.Tensor]:
    def code(weight: torch.Tensor) -> torch.Tensor:
        codes = gguf.quants.quantize(weight.numpy(), kind)
        return torch.from_numpy(gguf.quants.dequantize(codes, kind))

    return code


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{f"ours-{bits} groups of {group}": ours(bits, group) for bits in (8, 4) for group in GROUPS},
    "torch-8": torch_int8,
    "torch-4 groups of 64": torch_int4,
    "llama.cpp Q8_0": llama_cpp(gguf.GGMLQuantizationType.Q8_0),
    "llama.cpp Q4_0": llama_cpp(gguf.GGMLQuantizationType.Q4_0),
    "llama.cpp Q4_1": llama_cpp(gguf.GGMLQuantizationType.Q4_1),
}


def counts(name: str) -> dict[str, int]:
    """Return the number of passes over the tokens, by the name of a row."""
    return {name: 1, f"{name}, prompt": 2} if name.startswith("ours") else {name: 1}


def layer_errors(divisor: int) -> dict[str, dict[str, float]]:
    """Return the error of a layer's output, by form and shape."""
    errors: dict[str, dict[str, float]] = {row: {} for name in FORMS for row in counts(name)}
    for shape, sizes in SHAPES.items():
        rows, columns = (size // divisor for size in sizes)
        generator = torch.Generator().manual_seed(0)
        weight, tokens = heavy_weight(rows, columns, generator), heavy_tokens(columns, generator)
        exact = tokens.double() @ weight.double().T
        for name, code in FORMS.items():
            quantized = code(weight)
            for row, times in counts(name).items():
                with torch.no_grad():
                    out = linear(tokens.repeat(times, 1), quantized)[:TOKENS]
                errors[row][shape] = float((out - exact).norm() / exact.norm())
    return errors


def expert_errors(divisor: int) -> dict[str, float]:
    """Return the error of an expert's output, by form; gate, up and down projections all have few bits."""
    hidden, intermediate = (size // divisor for size in EXPERT)
    generator = torch.Generator().manual_seed(0)
    sizes = (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)
    weights = [heavy_weight(*each, generator) for each in sizes]
    tokens = heavy_tokens(hidden, generator)

    def output(tokens: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return linear(silu(linear(tokens, gate)) * linear(tokens, up), down)

    exact = output(tokens.double(), *(weight.double() for weight in weights))
    errors = {}
    for name, code in FORMS.items():
        quantized = [code(weight) for weight in weights]
        for row, times in counts(name).items():
            with torch.no_grad():
                out = output(tokens.repeat(times, 1), *quantized)[:TOKENS]
            errors[row] = float((out - exact).norm() / exact.norm())
    return errors


def divergence(model: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Return the divergence of the next token from the expected log-probabilities, `[windows, tokens, vocabulary]`."""
    total, same = 0.0, 0
    for window, wanted in zip(ids, expected, strict=True):
        found = log_probabilities(model, window)
        total += float((wanted.exp() * (wanted - found)).sum(dtype=torch.float64))
        same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
    return {"kl_nats": total / ids.numel(), "same_top_token": same / ids.numel()}


def log_probabilities(model: PreTrainedModel, window: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model.get_decoder()(window[None]).last_hidden_state[0]
        logits = torch.cat([model.get_output_embeddings()(few) for few in hidden.split(TOKENS)])
        log_probs: torch.Tensor = logits.log_softmax(-1)
    return log_probs


def model_divergence(windows: int, length: int) -> dict[str, Any]:
    model, tokenizer = load("smollm2-135m", torch.float32, "cpu")
    assert tokenizer is not None
    results: dict[str, Any] = {}
    for text in TEXTS:
        ids = english_ids(tokenizer, windows * length, text).view(windows, length)
        expected = torch.stack([log_probabilities(model, window) for window in ids])
        for bits, head_bits in ((8, 8), (4, 8), (4, 4)):
            for group in GROUPS:
                with quantize_weights(model, bits, group, head_bits, temporary=True):
                    name = f"ours-{bits}, head in {head_bits}, groups of {group}"
                    results.setdefault(text, {})[name] = divergence(model, ids, expected)
                    set_integer_kernels(False)
                    try:
                        results[text][f"{name}, exact tokens"] = divergence(model, ids, expected)
                    finally:
                        set_integer_kernels(None)
    return results


def main() -> None:
    parser = plain_parser("weight_error", __doc__)
    parser.add_argument("--divisor", type=int, default=1, help="of the sizes of layers")
    parser.add_argument("--windows", type=int, default=4, help="of text, for the model; 0 leaves it out")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    errors = layer_errors(arguments.divisor)
    for name, error in expert_errors(arguments.divisor).items():
        errors[name]["expert"] = error
    print(f"{'error of the output':<30}" + "".join(f"{shape:>12}" for shape in (*SHAPES, "expert")))
    for name, by_shape in errors.items():
        print(f"{name:<30}" + "".join(f"{error:>12.5f}" for error in by_shape.values()))
    results = model_divergence(arguments.windows, arguments.length) if arguments.windows else {}
    for text, by_form in results.items():
        print(f"SmolLM2-135M, {text}")
        for name, result in by_form.items():
            print(f"{name:<54} KL {result['kl_nats']:.6f} nats, the same token first {result['same_top_token']:.1%}")
    record = {
        "layer_errors": errors,
        "model": "smollm2-135m",
        "windows": arguments.windows,
        "window_tokens": arguments.length,
        "divergence": results,
    }
    print(f"record: {records.save('weight_error', record, arguments.out)}")
    print(json.dumps({name: max(by_shape.values()) for name, by_shape in errors.items()}))


if __name__ == "__main__":
    main()
