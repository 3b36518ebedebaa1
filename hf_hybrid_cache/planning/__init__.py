"""
Which cache for which machine, worked out before anything is loaded.

`model_cost`, `experts` and `cost` say what a model, its experts and a cache take, `machine` what there is and how fast
it is, `speed` and `expert_speed` how long a token takes, `candidates` which caches there are, and `plans` puts it all
together. `advice` is for a cache that has no more room.
"""

from ..weights import WEIGHT_BITS
from .advice import advice
from .candidates import BITS, RUNTIME_BYTES, Candidate, cpu_candidates, expert_candidates, gpu_candidates
from .coded_weights import CodedWeights
from .cost import CacheCost, Held, cache_cost, layer_bytes, stock_cost
from .divided import divided_candidates, with_most_layers, with_most_tokens
from .experts import ExpertsCost, LayerExperts
from .machine import (
    CacheSpeed,
    DeviceSpeed,
    Machine,
    Speeds,
    SpeedsFileError,
    WeightSpeed,
    cpu_name,
    default_chunk,
    load_speeds,
    save_speeds,
    speeds_path,
    this_machine,
)
from .model_cost import CostError, ModelCost, model_cost
from .plans import (
    Plan,
    PlanError,
    choose,
    farthest,
    has_room,
    make_plan,
    make_plans,
    missing_for_weights,
    much_faster,
    predict,
    recommendations,
    recommended,
    with_2_bits,
)
from .sizes import parse_bandwidth, parse_bytes, parse_tokens
from .speed import Division, Way, slowdown_of_both

__all__ = [
    "BITS",
    "RUNTIME_BYTES",
    "WEIGHT_BITS",
    "CacheCost",
    "CacheSpeed",
    "Candidate",
    "CodedWeights",
    "CostError",
    "DeviceSpeed",
    "Division",
    "ExpertsCost",
    "Held",
    "LayerExperts",
    "Machine",
    "ModelCost",
    "Plan",
    "PlanError",
    "Speeds",
    "SpeedsFileError",
    "Way",
    "WeightSpeed",
    "advice",
    "cache_cost",
    "choose",
    "cpu_candidates",
    "cpu_name",
    "default_chunk",
    "divided_candidates",
    "expert_candidates",
    "farthest",
    "gpu_candidates",
    "has_room",
    "layer_bytes",
    "load_speeds",
    "make_plan",
    "make_plans",
    "missing_for_weights",
    "model_cost",
    "much_faster",
    "parse_bandwidth",
    "parse_bytes",
    "parse_tokens",
    "predict",
    "recommendations",
    "recommended",
    "save_speeds",
    "slowdown_of_both",
    "speeds_path",
    "stock_cost",
    "this_machine",
    "with_2_bits",
    "with_most_layers",
    "with_most_tokens",
]
