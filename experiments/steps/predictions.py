"""
The planner's predictions against the context sweep of this machine.

The machine's speeds are measured first, as `hf-hybrid-cache plan --calibrate` does; then bytes of keys and values, and
the median time of a token, are predicted for every cell of the sweep and compared. Aims: bytes within 3%, and time
within 25% from 8,192 tokens on.
"""

import argparse
import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.common import records
from experiments.sweep import store
from experiments.sweep.caches import CPU
from experiments.sweep.page import LONG_CONTEXT
from experiments.sweep.points import Point, points
from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.planning import Plan, PlanError, this_machine
from hf_hybrid_cache.planning.calibration import calibrate
from hf_hybrid_cache.planning.machine import Speeds
from hf_hybrid_cache.planning.plans import predict

# Shapes by the names of configurations; the sweep's model has this shape.
SHAPES = {"llama-3.2-1b-random": "meta-llama/Llama-3.2-1B"}


def compared(found: list[dict[str, Any]], speeds: Speeds) -> list[dict[str, Any]]:
    """A cell for each cache and context that was measured with the whole model on the CPU and can be predicted."""
    (name,) = {record["cell"]["model"] for record in found}
    config = load_config(SHAPES.get(name, name))
    machine = this_machine(0, None, speeds)
    cells = []
    for (cache, device), measured in points(found).items():
        for point in measured if device == CPU else ():
            try:
                # The last token is not stored: no other one attends to it.
                plan = predict(config, cache, point.context_tokens - 1, machine, torch.bfloat16)
            except PlanError:  # a cache that is not planned, such as quanto's
                continue
            cells.append({"cache": cache, "context_tokens": point.context_tokens, **_compared(plan, point)})
    return cells


def _compared(plan: Plan, point: Point) -> dict[str, Any]:
    assert plan.seconds_per_token is not None  # all speeds were measured
    predicted = {"kv_bytes": plan.kv_device_bytes + plan.kv_host_bytes, "seconds": plan.seconds_per_token}
    measured = {"kv_bytes": point.kv_bytes, "seconds": point.latency(50)}
    off = {key: predicted[key] / measured[key] - 1 for key in measured}
    return {"predicted": predicted, "measured": measured, "off": off}


def largest(cells: list[dict[str, Any]], key: str, least_context: int = 0) -> float:
    """Return the largest relative error of a prediction, from a context on."""
    return max(abs(cell["off"][key]) for cell in cells if cell["context_tokens"] >= least_context)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, help="folder of the sweep (default: this machine's in results)")
    parser.add_argument("--model", default="llama-3.2-1b-random")
    parser.add_argument("--out", type=Path, help="folder of the record (default: results/predictions)")
    arguments = parser.parse_args()
    folder = arguments.records or store.FOLDER / records.machine_name()
    found = [record for cell, record in store.read(folder).records.items() if cell.model == arguments.model]
    if not found:
        parser.error(f"{folder} has no records of {arguments.model}: run python -m experiments.context_sweep first.")
    calibration = calibrate(torch.bfloat16)
    speeds = calibration.speeds
    if calibration.doubt is not None:
        print(f"These speeds may be too low: {calibration.doubt}.")
    cells = compared(found, speeds)
    print(f"{'':<14} {'':>8} {'KV, MiB':>21} {'':>7} {'ms a token':>21}")
    print(
        f"{'cache':<14} {'context':>8} {'predicted':>10} {'measured':>10} {'off':>7} {'predicted':>10} {'measured':>10}"
    )
    for cell in cells:
        predicted, measured, off = (cell[key] for key in ("predicted", "measured", "off"))
        kv = f"{predicted['kv_bytes'] / 2**20:>10,.1f} {measured['kv_bytes'] / 2**20:>10,.1f} {off['kv_bytes']:>+7.1%}"
        time = f"{predicted['seconds'] * 1e3:>10.1f} {measured['seconds'] * 1e3:>10.1f} {off['seconds']:>+7.1%}"
        print(f"{cell['cache']:<14} {cell['context_tokens']:>8,} {kv} {time}")
    answer = {"kv_bytes": largest(cells, "kv_bytes"), "seconds": largest(cells, "seconds", LONG_CONTEXT)}
    record = {"model": arguments.model, "speeds": asdict(speeds), "cells": cells, "largest_error": answer}
    print(f"record: {records.save('predictions', record, arguments.out)}")
    print(json.dumps({key: round(value, 4) for key, value in answer.items()}))


if __name__ == "__main__":
    main()
