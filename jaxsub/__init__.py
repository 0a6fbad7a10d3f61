"""jaxsub: a loss and a memory budget go in; the same function comes out, with a gradient that fits."""

import importlib
from types import ModuleType

from jaxsub import planners, policies
from jaxsub.api.explain import explain, residuals
from jaxsub.api.frontier import frontier
from jaxsub.api.sublinear import Sublinear, measure, plan, sublinear
from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Segment
from jaxsub.core.errors import (
    BudgetError,
    InfeasibleBudgetError,
    JaxsubError,
    PlanMismatchError,
    PlannerError,
    UnsupportedError,
    VerificationError,
)
from jaxsub.core.plan import Measurement, Plan
from jaxsub.devices import targets
from jaxsub.jaxpr.compat import quiet_cuda_plugin
from jaxsub.step.jit import jit
from jaxsub.step.max_batch import max_batch

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
    "targets",
]

quiet_cuda_plugin()  # the extra `targets` brings a plugin that would print a traceback where there is no GPU


def __getattr__(name: str) -> ModuleType:
    """Import `jaxsub.flax` when it is asked for: Flax is optional."""
    if name != "flax":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("jaxsub.flax")
