"""jaxsub: a loss and a memory budget go in; the same function comes out, with a gradient that fits."""

import importlib
from types import ModuleType

from jaxsub import planners, policies
from jaxsub.api import Sublinear, measure, plan, sublinear
from jaxsub.batches import max_batch
from jaxsub.budget import Budget
from jaxsub.compat import quiet_cuda_plugin
from jaxsub.errors import (
    BudgetError,
    InfeasibleBudgetError,
    JaxsubError,
    PlanMismatchError,
    PlannerError,
    UnsupportedError,
    VerificationError,
)
from jaxsub.explain import explain, residuals
from jaxsub.frontier import frontier
from jaxsub.plan import Measurement, Plan
from jaxsub.step import jit
from jaxsub.ways import Segment

__all__ = [
    "Budget",
    "BudgetError",
    "InfeasibleBudgetError",
    "JaxsubError",
    "Measurement",
    "Plan",
    "PlanMismatchError",
    "PlannerError",
    "Segment",
    "Sublinear",
    "UnsupportedError",
    "VerificationError",
    "explain",
    "frontier",
    "jit",
    "max_batch",
    "measure",
    "plan",
    "planners",
    "policies",
    "residuals",
    "sublinear",
]

quiet_cuda_plugin()  # the extra `targets` brings a plugin that would print a traceback where there is no GPU


def __getattr__(name: str) -> ModuleType:
    """Import `jaxsub.flax` when it is asked for: Flax is optional."""
    if name != "flax":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("jaxsub.flax")
