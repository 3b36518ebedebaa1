"""
Seconds of a decode step of a whole model on a machine with a GPU: our caches and those of transformers, taking turns.

The Llama-3.2-1B shape with random weights in bfloat16 and a synthetic prefill. A plain copy from page-locked memory
takes its turn too: what streams is held against it. Bytes of the device are those that a cache took while it was
filled, and at the peak of a step; of what is on the host, what `memory()` reports. What does not fit, or does not run,
is left out, and the record says why. transformers' `QuantizedCache` codes all it holds anew once in 128 tokens, which
falls into none of the timed steps.
"""

import gc
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache

from experiments.common import records
from experiments.common.synthetic import fill, kv_bytes
from experiments.common.timing import medians, samples_in_turns
from experiments.gpu.caches import CACHES
from experiments.gpu.machine import (
    PlainCopy,
    allocated,
    device,
    gpu_parser,
    has_gpu,
    kernels_launched,
    model_of,
    parsed,
    seconds_on_device,
)
from hf_hybrid_cache import HybridCache, quantize_weights, set_num_threads
from hf_hybrid_cache.cache_argument import cache_argument

FILL_CHUNK = 8192
COPY = "plain copy"
# The CPU fraction settles after ten moves, each after 192 layers, of a model with 16.
_STEPS_OF_MOVES = 120
# Pairs to compare: a ratio of 3 is a third of the time.
PAIRS = (
    ("offloaded", "stock-offloaded"),
    ("streamed-4", "offloaded"),
    ("codes-4", "stock"),
    ("codes-4", "dynamic"),
    ("codes-4", "quanto-4"),
    ("codes-4", "hqq-4"),
    ("dynamic", "stock"),
    ("offloaded", "offloaded-pageable"),
    ("half-cpu-attention", "offloaded"),
    ("half-cpu-attention", "cpu-attention"),
    ("half-in-three", "half-cpu-attention"),
    ("half-in-three-4", "half-cpu-attention-4"),
)


class Models:
    """The model on the device and on the host, with weights of each width; each is made when it is first used."""

    def __init__(self, is_rehearsal: bool):
        self._is_rehearsal = is_rehearsal
        self._made: dict[tuple[str, int | None], LlamaForCausalLM] = {}

    def of(self, name: str) -> LlamaForCausalLM:
        """Return the model for one of `CACHES`."""
        place, bits = "cpu" if CACHES[name].on_host else device(), CACHES[name].weight_bits
        if (place, bits) not in self._made:
            model = model_of(self._is_rehearsal, place)
            if bits is not None:
                quantize_weights(model, bits)
            with torch.inference_mode():  # libraries take their memory now, and it is no cache's
                model(torch.ones(1, 1, dtype=torch.long, device=place))
            self._made[place, bits] = model
        return self._made[place, bits]


class Decoder:
    """One cache that decodes greedily: its steps, and the device memory that they take."""

    def __init__(self, model: LlamaForCausalLM, name: str, context: int):
        self.name, self._model = name, model
        on = str(model.device)
        self._token = torch.ones(1, 1, dtype=torch.long, device=on)
        before = allocated()
        self.cache: Cache = CACHES[name].empty(model.config, context)
        at_once = context if CACHES[name].codes_all_anew else FILL_CHUNK
        fill(self.cache, model.config, context, torch.bfloat16, on, at_once)
        self.step()
        self.device_bytes = allocated() - before
        for _ in range(_STEPS_OF_MOVES if CACHES[name].adapts and has_gpu() else 0):
            self.step()

    @torch.inference_mode()
    def step(self) -> None:
        self._token = self._model(self._token, **cache_argument(self.cache)).logits[:, -1:].argmax(-1)

    def peak_bytes(self) -> int | None:
        """Return the device memory that a step takes beyond all that is held before it."""
        if not has_gpu():
            return None
        torch.cuda.reset_peak_memory_stats()
        before = allocated()
        seconds_on_device(self.step)
        return torch.cuda.max_memory_allocated() - before

    def moved_bytes(self) -> int:
        """Return the bytes that were copied to the device so far."""
        return self.cache.stats.bytes_to_device if isinstance(self.cache, HybridCache) else 0


@dataclass(frozen=True)
class Turn:
    """A decoder with a number of threads for attention on the CPU; `None` for all."""

    decoder: Decoder
    threads: int | None

    @property
    def name(self) -> str:
        return self.decoder.name if self.threads is None else f"{self.decoder.name}, threads {self.threads}"

    def prepare(self) -> None:
        """Run an untimed step, which fills the processor's caches with the data of this decoder."""
        if self.threads is not None:
            set_num_threads(self.threads)
            torch.set_num_threads(self.threads)
        self.decoder.step()

    def seconds(self, steps: int) -> float:
        """Return the mean seconds of some steps."""
        return sum(seconds_on_device(self.decoder.step) for _ in range(steps)) / steps


def decoders(models: Models, names: list[str], context: int, left_out: dict[str, str]) -> Iterator[Decoder]:
    """Yield a filled decoder for each name; put the reason why one cannot be made into `left_out`."""
    for name in names:
        reason = CACHES[name].why_not()
        if reason is None:
            try:
                yield Decoder(models.of(name), name, context)
                print(f"filled: {name}", flush=True)
                continue
            except Exception as error:  # memory that ends, or code of others: one cache less is no reason to stop
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            gc.collect()  # frees a decoder that was filled in part
        left_out[name] = reason
        print(f"{name} is left out: {reason}.", flush=True)


def measure(made: list[Decoder], threads: list[int], rounds: int, steps: int) -> dict[str, Any]:
    """Let all take turns; raw samples in seconds, each the mean of some steps."""
    copy = PlainCopy()
    turns = {
        turn.name: turn
        for decoder in made
        for turn in (
            [Turn(decoder, count) for count in threads]
            if CACHES[decoder.name].attends_on_host and threads
            else [Turn(decoder, None)]
        )
    }
    moved = {decoder.name: decoder.moved_bytes() for decoder in made}
    samples = samples_in_turns(
        {COPY: partial(seconds_on_device, copy)} | {name: partial(turn.seconds, steps) for name, turn in turns.items()},
        rounds,
        lambda name: copy() if name == COPY else turns[name].prepare(),
    )
    moved = {decoder.name: decoder.moved_bytes() - moved[decoder.name] for decoder in made}
    taken = (rounds + 1) * (steps + 1)
    seconds = medians(samples)
    bus = copy.num_bytes / seconds.pop(COPY)
    rates = {name: moved[name] / taken / seconds[name] for name in turns if moved.get(name) and CACHES[name].streams}
    return {
        "bus_bytes_per_second": bus,
        "median_seconds": seconds,
        "tokens_per_second": {name: 1 / value for name, value in seconds.items()},
        "streamed_bytes_per_second": rates,
        "share_of_bus": {name: rate / bus for name, rate in rates.items()},
        "device_bytes": {decoder.name: decoder.device_bytes for decoder in made},
        "decisions": {each.name: each.cache.stats.decisions for each in made if isinstance(each.cache, HybridCache)},
        "memory": {each.name: asdict(each.cache.memory()) for each in made if isinstance(each.cache, HybridCache)},
        "ratios": {
            f"{ours} / {theirs}": seconds[theirs] / seconds[ours]
            for ours, theirs in PAIRS
            if ours in seconds and theirs in seconds
        },
        "samples_seconds": samples,
    }


def looked_at(made: list[Decoder]) -> dict[str, Any]:
    """Measure the device memory and the kernel launches of one more step of each decoder."""
    return {
        "step_peak_bytes": {decoder.name: decoder.peak_bytes() for decoder in made},
        "kernels_of_a_step": {decoder.name: kernels_launched(decoder.step) for decoder in made},
    }


def show(record: dict[str, Any]) -> None:
    print(f"plain copy: {record['bus_bytes_per_second'] / 1e9:.1f} GB/s")
    print(f"{'cache':<32} {'ms a token':>11} {'tok/s':>8} {'device MiB':>11} {'kernels':>8} {'of copy':>8}")
    for name, seconds in record["median_seconds"].items():
        share = record["share_of_bus"].get(name)
        plain = name.partition(",")[0]
        held, kernels = record["device_bytes"][plain] / 2**20, record["kernels_of_a_step"][plain]
        row = f"{seconds * 1e3:>11.2f} {1 / seconds:>8.1f} {held:>11,.0f} {'' if kernels is None else kernels:>8}"
        print(f"{name:<32} {row} {'' if share is None else f'{share:.0%}':>8}")
    for pair, ratio in record["ratios"].items():
        print(f"{pair}: {ratio:.2f} times as fast")


def main() -> None:
    parser = gpu_parser("decode", __doc__)
    parser.add_argument("--caches", choices=CACHES, nargs="+", default=list(CACHES), help="(default: all)")
    parser.add_argument("--context", type=int, default=32_768, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a cache in its turn (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[], help="of the CPU, each with a turn of its own (default: all)"
    )
    parser.add_argument(
        "--without-cudnn",
        action="store_true",
        help="let torch choose another attention than that of cuDNN, which plans each new length anew",
    )
    given = parsed(parser)
    if given.without_cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    for threads in given.threads:
        if not 1 <= threads <= records.num_cores():
            parser.error(f"{threads} threads, and there are {records.num_cores()} cores.")
    all_threads = torch.get_num_threads()
    models, left_out = Models(given.rehearse), dict[str, str]()
    made = list(decoders(models, given.caches, given.context, left_out))
    if not made:
        parser.error(f"nothing is left to measure: {left_out}")
    full = kv_bytes(models.of(made[0].name).config, given.context, torch.bfloat16)
    print(f"{given.context:,} tokens, {full / 2**20:,.0f} MiB in bfloat16")
    found = measure(made, given.threads, given.rounds, given.steps)
    set_num_threads(None)
    torch.set_num_threads(all_threads)
    record: dict[str, Any] = {
        "model": "llama-3.2-1b-random",
        "context_tokens": given.context,
        "prefill": "synthetic",
        "steps": given.steps,
        "rehearsal": given.rehearse,
        "without_cudnn": given.without_cudnn,
        "bfloat16_kv_bytes": full,
        "left_out": left_out,
        **found,
    }
    # Written before a profiler is asked.
    records.save("gpu/decode", record, given.out)
    record |= looked_at(made)
    show(record)
    print(f"record: {records.save('gpu/decode', record, given.out)}")
    print(json.dumps(found["ratios"]))


if __name__ == "__main__":
    main()
