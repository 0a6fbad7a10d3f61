"""Whether a `StepPlan` that is given back belongs to a step: its arguments, its functions, and the memory it takes.

A plan that was stored beside a checkpoint may meet a step that has changed meanwhile. What differs is said, and nothing
is planned in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxsub.core.budget import format_bytes
from jaxsub.core.errors import PlanMismatchError, VerificationError
from jaxsub.core.measurement import Measurement
from jaxsub.core.step_plan import StepPlan
from jaxsub.jaxpr.differences import first_difference
from jaxsub.search.belonging import require_belonging
from jaxsub.search.call_sites import CallSite

ANEW = "Make a new plan: jaxsub.jit(step, memory=...).plan(*args)."


def arguments_digest(args: Any, kwargs: Any) -> str:
    """A digest of the paths, shapes and dtypes of arguments."""
    leaves = jax.tree_util.tree_flatten_with_path((list(args), dict(kwargs)))[0]
    rows = [(jax.tree_util.keystr(path), tuple(jnp.shape(x)), str(jnp.result_type(x))) for path, x in leaves]
    return hashlib.blake2b(repr(rows).encode(), digest_size=12).hexdigest()


def require_same_arguments(plan: StepPlan, digest: str) -> None:
    """Refuse a plan of arguments of other shapes, dtypes or trees."""
    if plan.arguments != digest:
        _refuse("its arguments have other paths, shapes or dtypes", plan.arguments, digest)


def require_same_sites(plan: StepPlan, sites: Mapping[str, CallSite]) -> None:
    """Refuse a plan of other functions inside the step: one is missing, or differs from some equation on."""
    plans = plan.plans
    for key, site in sites.items():
        if key not in plans:
            known = next((s.plan for s in plan.sites if s.name == site.name), None)
            why = first_difference(site.program, known.equations) if known is not None else ""
            there = ", ".join(f"`{s.name}`" for s in plan.sites) or "none"
            what = f"is not among its functions, {there}" if known is None else "is not the one that it was made for"
            _refuse(f"`{site.name}` {what}. {why}".strip(), " ".join(plans), key)
        require_belonging(site.program, plans[key])
    if missing := [s.name for s in plan.sites if s.plan.fingerprint not in sites]:
        _refuse(f"the step calls no `{missing[0]}`", " ".join(plans), " ".join(sites))


def require_fitting(plan: StepPlan, measured: Measurement, n_bytes: int) -> None:
    """Refuse a plan under which the step takes more than it may; say what was measured when it was made."""
    if measured.step_bytes > n_bytes:
        raise VerificationError(
            f"Under the plan the step takes `{format_bytes(measured.step_bytes)}` ({measured.target}), and may take "
            f"`{format_bytes(n_bytes)}`. When the plan was made it took {format_bytes(plan.measurement.step_bytes)} "
            f"({plan.measurement.target}): JAX, the device, donation or the update has changed. {ANEW}",
            measurement=measured,
        )


def _refuse(why: str, planned: str, found: str) -> NoReturn:
    raise PlanMismatchError(
        f"The plan was made for another step: {why.rstrip('. ')}. {ANEW}",
        plan_fingerprint=planned,
        function_fingerprint=found,
    )
