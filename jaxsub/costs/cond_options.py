"""How the branches of a conditional may run, and what each way costs.

One branch of a `lax.cond` or `lax.switch` runs, nobody knows which. What its backward pass reads is kept in slots that
all branches share: JAX returns the union of their residuals, by shape and dtype, so the most that one branch keeps is
what stands. The same holds of what the backward pass needs and executes again: the dearest branch counts.

So all branches are planned for the same memory: for each amount that a plan of some branch needs, every branch takes
its cheapest plan that needs no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxsub.core.decisions import Conditional, Inside
from jaxsub.costs import live_ranges as analytic
from jaxsub.costs.body_options import BodyChain, BodyPlan, body_plans
from jaxsub.emission.scans import branch_programs
from jaxsub.jaxpr.trace import Program
from jaxsub.partition.min_cut import trace_run


@dataclass(frozen=True, slots=True)
class BranchChoice:
    """One way to run a conditional, and what its dearest branch is expected to cost.

    Attributes:
        loop: The way.
        kept_bytes: What it keeps from its forward to its backward pass, beside what it reads and returns.
        transient_bytes: What its backward pass allocates, the kept included.
        again_flops: What its backward pass executes again.
        is_region: Whether it is meant for a region round the conditional, and for that alone.
    """

    loop: Conditional
    kept_bytes: int
    transient_bytes: int
    again_flops: float
    is_region: bool


def branch_choices(program: Program, node: int, price: BodyChain) -> tuple[BranchChoice, ...]:
    """The ways to run a conditional with plans in its branches, those that are not for a region first.

    Args:
        program: The program.
        node: The conditional.
        price: Prices a branch, cut into stages.

    Returns:
        The ways, each with what its dearest branch costs.
    """
    branches = branch_programs(program, node)
    plans = [body_plans(branch, price) for branch in branches]
    found: dict[Conditional, BranchChoice] = {}
    for is_region in (False, True):
        offered = [[p for p in some if p.is_region is is_region] or [_plain(b, is_region)]
                   for b, some in zip(branches, plans, strict=True)]  # fmt: skip
        for limit in sorted({_need(p) for some in offered for p in some}, reverse=True):
            chosen = [_within(some, limit) for some in offered]
            way = Conditional(node, tuple(p.inside for p in chosen))
            if any(inside != Inside() for inside in way.branches) and way not in found:
                kept, need = (max(getattr(p, name) for p in chosen) for name in ("kept_bytes", "transient_bytes"))
                found[way] = BranchChoice(way, kept, need, max(p.again_flops for p in chosen), is_region)
    return tuple(found.values())


def _need(plan: BodyPlan) -> int:
    return max(plan.kept_bytes, plan.transient_bytes)


def _within(plans: Sequence[BodyPlan], limit: int) -> BodyPlan:
    """The plan of least FLOPs that needs no more than a limit, or else the one that needs least."""
    fitting = [p for p in plans if _need(p) <= limit]
    return min(fitting, key=lambda p: p.again_flops) if fitting else min(plans, key=_need)


def _plain(branch: Program, is_region: bool) -> BodyPlan:
    """A branch too small for a plan of its own: it keeps what it keeps."""
    traced = trace_run(branch, 0, len(branch.eqns)) if branch.eqns else None
    kept = 0 if traced is None or is_region else analytic.kept_bytes(traced)
    needs = 0 if traced is None else analytic.backward_bytes(traced, ())
    return BodyPlan(Inside(), is_region, kept, kept + needs, 0.0)
