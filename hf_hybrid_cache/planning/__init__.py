"""
Choosing a cache for a machine before a model is loaded.

`model_cost` says what a model takes, `this_machine` what there is, and `make_plans` which caches fit; `measured_plans`
measures how fast they are here, and `recommended` chooses one of them. `cache_for_budget` makes the cache of a model
that is loaded.
"""

from .candidates import Machine, default_chunk, this_machine
from .measuring import Measured, MeasureError
from .model_cost import CostError, model_cost
from .plans import Plan, PlanError, cache_for_budget, make_plans, measured_plans, recommended

__all__ = [
    "CostError",
    "Machine",
    "MeasureError",
    "Measured",
    "Plan",
    "PlanError",
    "cache_for_budget",
    "default_chunk",
    "make_plans",
    "measured_plans",
    "model_cost",
    "recommended",
    "this_machine",
]
