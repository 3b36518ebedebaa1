"""
Choosing a cache for a machine before a model is loaded.

`model_cost` says what a model takes, `this_machine` what there is, and `make_plans` which caches fit and how fast they
are; `recommended` chooses one of them. `cache_for_budget` makes the cache of a model that is loaded.
"""

from .model_cost import CostError, model_cost
from .plans import Plan, PlanError, cache_for_budget, make_plans, recommended
from .speeds import Machine, Speeds, default_chunk, measured_speeds, this_machine

__all__ = [
    "CostError",
    "Machine",
    "Plan",
    "PlanError",
    "Speeds",
    "cache_for_budget",
    "default_chunk",
    "make_plans",
    "measured_speeds",
    "model_cost",
    "recommended",
    "this_machine",
]
