"""jaxsub: a loss and a memory budget go in; the same function comes out, with a gradient that fits."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxsub import equinox as equinox
    from jaxsub import flax as flax
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
    from jaxsub.core.measurement import Measurement
    from jaxsub.core.plan import Plan
    from jaxsub.core.step_plan import StepPlan
    from jaxsub.devices import targets
    from jaxsub.diagnosis.doctor import doctor
    from jaxsub.step.device import OutOfMemoryError
    from jaxsub.step.jit import jit
    from jaxsub.step.max_batch import max_batch

__all__ = [
    "Budget",
    "BudgetError",
    "InfeasibleBudgetError",
    "JaxsubError",
    "Measurement",
    "OutOfMemoryError",
    "Plan",
    "PlanMismatchError",
    "PlannerError",
    "Segment",
    "StepPlan",
    "Sublinear",
    "UnsupportedError",
    "VerificationError",
    "doctor",
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

_HOMES = {
    "api.explain": ("explain", "residuals"),
    "api.frontier": ("frontier",),
    "api.sublinear": ("Sublinear", "measure", "plan", "sublinear"),
    "core.budget": ("Budget",),
    "core.decisions": ("Segment",),
    "core.errors": tuple(name for name in __all__ if name.endswith("Error") and name != "OutOfMemoryError"),
    "core.measurement": ("Measurement",),
    "core.plan": ("Plan",),
    "core.step_plan": ("StepPlan",),
    "diagnosis.doctor": ("doctor",),
    "step.device": ("OutOfMemoryError",),
    "step.jit": ("jit",),
    "step.max_batch": ("max_batch",),
}
_MODULES = {name: name for name in ("equinox", "flax", "planners", "policies")} | {"targets": "devices.targets"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import jaxsub.core` needs no JAX, only `jaxsub.flax` needs Flax."""
    if name == "__version__":
        return importlib.metadata.version("jaxsub")
    home = next((module for module, names in _HOMES.items() if name in names), _MODULES.get(name))
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # the extra `targets` brings a plugin that would print a traceback where there is no GPU
    importlib.import_module("jaxsub.devices.cuda_plugin").quiet_cuda_plugin()
    module = importlib.import_module(f"jaxsub.{home}")
    globals()[name] = found = module if name in _MODULES else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
