"""
The planner's predictions for a machine with a GPU, against measurements there.

The machine's speeds are measured first, as `hf-hybrid-cache plan --calibrate` does. Then the time of a token, and the
bytes that a cache takes of device and host, are predicted for every way to decode that has a record, and compared.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.common import records
from experiments.gpu.caches import CACHES
from experiments.gpu.found import decode_steps, found_in
from experiments.gpu.machine import config_of, gpu_parser, parsed
from hf_hybrid_cache.planning import model_cost, this_machine
from hf_hybrid_cache.planning.calibration import CalibrationBudget, calibrate
from hf_hybrid_cache.planning.machine import Speeds
from hf_hybrid_cache.planning.model_cost import ModelCost
from hf_hybrid_cache.planning.plans import make_plan

_SMALL = CalibrationBudget(matrices=1, contexts=(256, 1024), chunk=8, layers=1, rounds=1)


def compared(measured: list[dict[str, Any]], model: ModelCost, speeds: Speeds) -> Iterator[dict[str, Any]]:
    """A cell for each context and each way to decode that the planner knows, with all threads."""
    machine = this_machine(None, None, speeds)
    for record in measured:
        context = record["context_tokens"]
        for name in dict.fromkeys(turn.partition(",")[0] for turn in record["median_seconds"]):
            if (candidate := CACHES[name].plan) is None:
                continue
            plan = make_plan(model, candidate, context, machine)
            predicted = {"seconds": plan.seconds_per_token, "kv_bytes": plan.kv_device_bytes + plan.kv_host_bytes}
            found = {"seconds": _seconds_with_all_threads(record, name), "kv_bytes": _kv_bytes(record, name)}
            off = {key: _off(predicted[key], found[key]) for key in found}
            yield {"cache": name, "context_tokens": context, "predicted": predicted, "measured": found, "off": off}


def _off(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


def _kv_bytes(record: dict[str, Any], name: str) -> int | None:
    """Return the bytes that a cache of ours holds; `None` for other caches."""
    kept = record["memory"].get(name)
    return None if kept is None else kept["device_bytes"] + kept["host_bytes"]


def _seconds_with_all_threads(record: dict[str, Any], name: str) -> float:
    """Return the seconds of a cache, with the most threads where there are several numbers of them."""
    found = [seconds for turn, seconds in record["median_seconds"].items() if turn.partition(",")[0] == name]
    return float(found[-1])


def main() -> None:
    parser = gpu_parser("predicted", __doc__)
    parser.add_argument("--records", type=Path, required=True, metavar="FOLDER", help="of the steps that were measured")
    given = parsed(parser)
    measured = decode_steps(found_in(given.records, records.machine_name()))
    if not measured:
        parser.error(f"{given.records} has no records of {records.machine_name()}: run python -m experiments.gpu.")
    calibration = calibrate(torch.bfloat16, _SMALL if given.rehearse else None)
    if calibration.doubt is not None:
        print(f"These speeds may be too low: {calibration.doubt}.")
    cells = list(compared(measured, model_cost(config_of(given.rehearse), torch.bfloat16), calibration.speeds))
    print(f"{'cache':<20} {'context':>8} {'predicted ms':>13} {'measured ms':>12} {'off':>7} {'KV off':>7}")
    for cell in cells:
        predicted, took, off = cell["predicted"]["seconds"], cell["measured"]["seconds"], cell["off"]
        times = "" if predicted is None else f"{predicted * 1e3:.2f}"
        seconds, kept = ("" if off[key] is None else f"{off[key]:+.1%}" for key in ("seconds", "kv_bytes"))
        row = f"{times:>13} {took * 1e3:>12.2f} {seconds:>7} {kept:>7}"
        print(f"{cell['cache']:<20} {cell['context_tokens']:>8,} {row}")
    largest = {
        key: max((abs(cell["off"][key]) for cell in cells if cell["off"][key] is not None), default=None)
        for key in ("seconds", "kv_bytes")
    }
    record = {
        "rehearsal": given.rehearse,
        "speeds": asdict(calibration.speeds),
        "doubt": calibration.doubt,
        "cells": cells,
        "largest_error": largest,
    }
    print(f"record: {records.save('gpu/predicted', record, given.out)}")
    print(json.dumps(largest))


if __name__ == "__main__":
    main()
