"""
One decode step of a mixture-of-experts model on the CPU, and a prompt: experts in host memory, in 16, 8 and 4 bits,
against transformers' own ways to compute them.

All are one model with random weights, in a real shape that is cut to a few layers, its vocabulary with it. They take
turns; every step is of another random token, so that others of the experts are chosen. What is timed is the whole step,
and in it the layers' experts, without the routers. The ceiling is a plain sum of as much memory as the chosen experts
take, in the same run. `batched_mm` copies the experts of each token: for a prompt it is left out where
that does not fit.
"""

from functools import partial
from time import perf_counter
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.harness import Cell, publish
from experiments.common.options import experiment_parser
from experiments.common.synthetic import fill
from experiments.common.timing import medians, samples_in_turns, seconds_of
from experiments.experts.random_experts import cut_config, expert_names, random_model, twin_of
from hf_hybrid_cache import get_num_threads, move_experts_to_host, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument

DTYPE = torch.bfloat16
THEIRS = ("eager", "batched_mm", "grouped_mm")
OURS = {"ours": None, "ours 8 bits": 8, "ours 4 bits": 4}
ALL_IN_4_BITS = "ours, all weights 4 bits"


class Form:
    """
    A way to compute a model's experts.

    Args:
        model: computes them so.
        implementation: of transformers' own; `None` for the model's.

    Attributes:
        expert_seconds: what experts took in all forward passes.
    """

    def __init__(self, model: PreTrainedModel, implementation: str | None = None):
        self.model, self._implementation = model, implementation
        self.expert_seconds: list[float] = []
        self._began = 0.0
        for name in expert_names(model):
            model.get_submodule(name).register_forward_pre_hook(self._begin)
            model.get_submodule(name).register_forward_hook(self._end)

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, cache: Cache) -> float:
        """Seconds of a forward pass."""
        if self._implementation is not None:
            self.model.set_experts_implementation(self._implementation)
        self.expert_seconds.append(0.0)
        return seconds_of(partial(self.model, ids, **cache_argument(cache), logits_to_keep=1))

    def _begin(self, *_: Any) -> None:
        self._began = perf_counter()

    def _end(self, *_: Any) -> None:
        if self.expert_seconds:
            self.expert_seconds[-1] += perf_counter() - self._began


class Bench:
    """
    The forms of one model's experts, which are measured in turns.

    Args:
        name: of a shape.
        layers: how many it is cut to.
        memory: read between samples.
    """

    def __init__(self, name: str, layers: int, memory: MemoryReader):
        config = cut_config(name, layers)
        self.config: Any = config
        self._memory = memory
        model = random_model(config, DTYPE)
        self.choices = config.num_experts_per_tok
        self.forms: dict[str, Form] = {}
        self.expert_bytes: dict[str, float] = {}
        for form in THEIRS:
            self.forms[form] = Form(twin_of(model), form)
        for form, bits in OURS.items():
            twin = twin_of(model)
            report = move_experts_to_host(twin, bits)
            self.forms[form] = Form(twin)
            self.expert_bytes[form] = report.expert_bytes / report.expert_layers / report.experts
        self.expert_bytes |= dict.fromkeys(THEIRS, self.expert_bytes["ours"])
        twin = twin_of(self.forms["ours 4 bits"].model)
        quantize_weights(twin, 4, head_bits=4)
        self.forms[ALL_IN_4_BITS] = Form(twin)
        self.expert_bytes[ALL_IN_4_BITS] = self.expert_bytes["ours 4 bits"]
        self.layers, self.experts = report.expert_layers, report.experts

    def measure(self, num_tokens: int, context: int, rounds: int) -> Cell:
        """A cell: `num_tokens` at once after `context` others; raw samples in seconds."""
        left_out = {}
        copied = num_tokens * self.choices * self.expert_bytes["ours"]
        if copied > psutil.virtual_memory().available * 0.9:
            left_out["batched_mm"] = f"would copy experts of {copied / 2**30:.1f} GiB"
        names = [name for name in self.forms if name not in left_out]
        caches: dict[str, Cache] = {}

        def before(name: str) -> None:
            if name == names[0]:
                self._memory.read()
            # Threads are awake, and what a step needs besides weights is in the caches, as in decoding.
            cache = caches[name] = DynamicCache(config=self.config)
            fill(cache, self.config, context, DTYPE)
            if num_tokens == 1:
                run(name)

        def run(name: str) -> float:
            ids = torch.randint(self.config.vocab_size, (1, num_tokens))
            return self.forms[name].run(ids, caches[name])

        self._memory.forget()
        samples = samples_in_turns({name: partial(run, name) for name in names}, rounds, before)
        bandwidth = self._memory.report()
        of_experts = {name: self._taken(name, rounds, per_round=2 if num_tokens == 1 else 1) for name in names}
        steps, experts = medians(samples), medians(of_experts)
        theirs = [name for name in THEIRS if name in names]
        best, best_experts = (min(each[name] for name in theirs) for each in (steps, experts))
        reads = self.layers * self.choices
        return {
            "tokens": num_tokens,
            "context_tokens": context,
            "median_seconds": steps,
            "median_expert_seconds": experts,
            "best_of_transformers_over": {name: best / steps[name] for name in names},
            "best_of_transformers_over_experts": {name: best_experts / experts[name] for name in names},
            "share_of_plain_sum": {
                name: reads * self.expert_bytes[name] / bandwidth["bytes_per_second"] / experts[name] for name in names
            }
            if num_tokens == 1
            else None,
            "left_out": left_out,
            "read_bandwidth": bandwidth,
            "samples_seconds": samples,
            "expert_samples_seconds": of_experts,
        }

    def _taken(self, name: str, rounds: int, per_round: int) -> list[float]:
        """Return the seconds of the experts in the last measurement, of the last timed pass of each round."""
        taken = self.forms[name].expert_seconds[-rounds * per_round :][per_round - 1 :: per_round]
        self.forms[name].expert_seconds.clear()
        return taken


def main() -> None:
    parser = experiment_parser("expert_step", __doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B", help="a built-in shape with experts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024, help="tokens before a decode step")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20, help="samples of a step, a quarter for a prompt")
    arguments = parser.parse_args()
    memory = MemoryReader(arguments.buffer_mib)
    read_bandwidth(memory)
    bench = Bench(arguments.model, arguments.layers, memory)
    sizes = (1, arguments.context, arguments.rounds), (arguments.prompt, 0, max(3, arguments.rounds // 4))
    publish(
        "expert_step",
        (
            (f"{tokens} tokens after {context}", bench.measure(tokens, context, rounds))
            for tokens, context, rounds in sizes
        ),
        arguments.out or records.RESULTS / "expert_step" / arguments.model.rpartition("/")[2].lower(),
        lambda cell: cell["best_of_transformers_over"],
        model=arguments.model,
        layers=arguments.layers,
        vocabulary=bench.config.vocab_size,
        dtype=str(DTYPE),
        threads=get_num_threads(),
        experts={"of_a_layer": bench.experts, "chosen": bench.choices, "bytes": bench.expert_bytes},
    )


if __name__ == "__main__":
    main()
