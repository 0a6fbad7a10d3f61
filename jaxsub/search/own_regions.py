"""Plan a function without its own `jax.checkpoint` regions, and with them where that recomputes less or fits alone."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.emission.emit import emit
from jaxsub.emission.own_regions import n_own_regions, open_own_regions
from jaxsub.jaxpr.flops import jaxpr_flops
from jaxsub.jaxpr.trace import Program
from jaxsub.search.verify import finish, gradient, untouched


def with_or_without_own(program: Program, planned: Callable[[Program], Plan], may_open: bool) -> Plan:
    """Plan a program with its own regions opened where it may be; raises what planning both raises, the lower least.

    As they stand its regions recompute the same whatever the budget. They are planned so only where the plan without
    them recomputes more than that, or none fits.
    """
    n_regions = n_own_regions(program) if may_open else 0
    if not n_regions:
        return planned(program)
    bare = open_own_regions(program)
    try:
        without = planned(bare)
    except InfeasibleBudgetError as refusal:
        return _as_they_stand(program, planned, refusal)
    without = without.replace(fingerprint=program.fingerprint, opened_regions=n_regions)
    without = finish(program, without, without.budget)
    share = recomputed_share(without)
    if share <= TUNING.partition_gain or share <= (own := _own_share(program, bare, without)):
        return without
    try:
        kept = planned(program)
    except InfeasibleBudgetError:
        return without
    return kept if own + recomputed_share(kept) < share else without


def _as_they_stand(program: Program, planned: Callable[[Program], Plan], refusal: InfeasibleBudgetError) -> Plan:
    try:
        return planned(program)
    except InfeasibleBudgetError as other:
        raise min(refusal, other, key=lambda error: error.least_bytes) from None


def _own_share(program: Program, bare: Program, plan: Plan) -> float:
    """What a program's own regions recompute, as a share of a forward pass."""
    forward_flops = plan.prediction.forward_flops if plan.prediction else 0.0
    return (_gradient_flops(program) - _gradient_flops(bare)) / max(forward_flops, 1.0)


def _gradient_flops(program: Program) -> float:
    function, shapes = gradient(program, emit(program, untouched(program)))
    return jaxpr_flops(jax.make_jaxpr(function)(*shapes).jaxpr).weighted
