"""Plan and price the branches of a conditional.

Which branch of a `lax.cond` or `lax.switch` runs is not known in advance. JAX returns the union of the branches'
residuals, by shape and dtype, so the residuals take the most that one branch keeps. Transient bytes and recomputed
FLOPs likewise are those of the most expensive branch.

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
from jaxsub.partition.traced_run import trace_run


@dataclass(frozen=True, slots=True)
class BranchChoice:
    """One choice of plans in the branches, with the costs of the most expensive branch.

    Attributes:
        loop: The choice.
        kept_bytes: Bytes that are live from its forward to its backward pass, beside inputs and outputs.
        transient_bytes: Bytes that its backward pass allocates, kept bytes included.
        recompute_flops: FLOPs that its backward pass recomputes.
        is_region: Whether it is only for a region around the conditional.
    """

    loop: Conditional
    kept_bytes: int
    transient_bytes: int
    recompute_flops: float
    is_region: bool


def branch_choices(program: Program, node: int, price: BodyChain) -> tuple[BranchChoice, ...]:
    """Choose plans in the branches of a conditional; choices that are not for a region come first.

    Args:
        program: The program.
        node: The conditional.
        price: Prices a branch, cut into stages.
    """
    branches = branch_programs(program, node)
    plans = [body_plans(branch, price) for branch in branches]
    found: dict[Conditional, BranchChoice] = {}
    for is_region in (False, True):
        candidates = [[p for p in some if p.is_region is is_region] or [_plain(b, is_region)]
                      for b, some in zip(branches, plans, strict=True)]  # fmt: skip
        for limit in sorted({_need(p) for some in candidates for p in some}, reverse=True):
            chosen = [_within(some, limit) for some in candidates]
            loop = Conditional(node, tuple(p.inside for p in chosen))
            if any(inside != Inside() for inside in loop.branches) and loop not in found:
                kept, need = (max(getattr(p, name) for p in chosen) for name in ("kept_bytes", "transient_bytes"))
                found[loop] = BranchChoice(loop, kept, need, max(p.recompute_flops for p in chosen), is_region)
    return tuple(found.values())


def _need(plan: BodyPlan) -> int:
    return max(plan.kept_bytes, plan.transient_bytes)


def _within(plans: Sequence[BodyPlan], limit: int) -> BodyPlan:
    """Choose the plan of least FLOPs that needs no more than a limit, or else the one that needs least."""
    fitting = [p for p in plans if _need(p) <= limit]
    return min(fitting, key=lambda p: p.recompute_flops) if fitting else min(plans, key=_need)


def _plain(branch: Program, is_region: bool) -> BodyPlan:
    """Price a branch that is too small for a plan of its own."""
    traced = trace_run(branch, 0, len(branch.eqns)) if branch.eqns else None
    kept = 0 if traced is None or is_region else analytic.kept_bytes(traced)
    needs = 0 if traced is None else analytic.backward_bytes(traced, ())
    return BodyPlan(Inside(), is_region, kept, kept + needs, 0.0)
