"""
Choosing a cache for a machine before a model is loaded.

`model_cost` says what a model takes, `this_machine` what there is, and `make_plans` which caches fit and how fast they
are; `recommended` chooses one of them.
"""

from .machine import Machine, default_chunk, this_machine
from .model_cost import CostError, model_cost
from .plans import Plan, PlanError, make_plans, recommended

__all__ = [
    "CostError",
    "Machine",
    "Plan",
    "PlanError",
    "default_chunk",
    "make_plans",
    "model_cost",
    "recommended",
    "this_machine",
]
