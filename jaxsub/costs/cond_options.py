"""Plan and price the branches of a conditional.

Which branch of a `lax.cond` or `lax.switch` runs is not known in advance. JAX returns the union of the branches'
residuals, by shape and dtype: what one branch keeps is there whichever runs. So a choice is priced from its trace, with
the plans in its branches. Recomputed FLOPs are those of the branch that recomputes most; so for each number of FLOPs
that a plan of some branch recomputes, every branch takes the plan of least memory that recomputes no more.

Regions inside branches keep what they read, a copy of the weights too, since the conditional returns it. A region
around the conditional reads its operands; such a region can save values of branches, of conditionals in them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jaxsub.core.chain import Chain
from jaxsub.core.decisions import Conditional, ControlFlow, Inside, Loop, Segment, is_saving
from jaxsub.core.tuning import TUNING
from jaxsub.costs import live_ranges as analytic
from jaxsub.costs.body_options import BodyChain, BodyPlan, body_plans, evenly
from jaxsub.devices.targets import Target
from jaxsub.emission.scans import branch_programs, with_loops
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program
from jaxsub.partition.inner_programs import find_conditionals
from jaxsub.partition.min_cut import Choice, choices
from jaxsub.partition.traced_run import TracedRun, trace_run


@dataclass(frozen=True, slots=True)
class BranchChoice:
    """One choice of plans in the branches, with its costs.

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


def branch_choices(
    program: Program, node: int, price: BodyChain, *, gpu: Target | None = None
) -> tuple[BranchChoice, ...]:
    """Choose plans in the branches of a conditional; choices that are not for a region come first.

    Args:
        program: The program.
        node: The conditional.
        price: Prices a branch, cut into stages.
        gpu: The GPU to compile for; `None` for a CPU.
    """
    branches = tuple(map(_Branch.of, branch_programs(program, node)))
    plans = [_branch_plans(branch, price, gpu) for branch in branches]
    found: list[BranchChoice] = []
    for is_region in (False, True):
        candidates = [[p for p in some if p.is_region is is_region] for some in plans]
        chosen = dict.fromkeys((*_combined(candidates, _kept), *_combined(candidates, _need)))
        found += [_priced(program, node, some, gpu) for some in chosen if any(p.inside != Inside() for p in some)]
    return (*_saving(program, node, branches, gpu), *found)


def saving_ways(program: Program) -> Iterator[tuple[Conditional, ...]]:
    """Yield what a region around a program may save inside its conditionals, more and more of it recomputed."""
    inside = {node: tuple(map(_Branch.of, branch_programs(program, node))) for node in find_conditionals(program)}
    limits = set[float]().union(*(branch.limits() for branches in inside.values() for branch in branches))
    for limit in evenly(sorted(limits), TUNING.inner_ranks):
        ways = (Conditional(node, tuple(b.inside(limit, is_region=False) for b in branches))
                for node, branches in inside.items())  # fmt: skip
        if saving := tuple(filter(is_saving, ways)):
            yield saving


@dataclass(frozen=True, slots=True)
class _Branch:
    """A branch and what it may save.

    Attributes:
        program: The branch.
        traced: All of it with its backward pass; `None` where it is empty.
        choices: Choices of its values, without those in conditionals; what these recompute is part of all.
        conditionals: Its conditionals, by node, and what their branches may save.
    """

    program: Program
    traced: TracedRun | None
    choices: tuple[Choice, ...]
    conditionals: tuple[tuple[int, tuple[_Branch, ...]], ...]

    @classmethod
    def of(cls, program: Program) -> _Branch:
        """Find it, branches inside branches too."""
        if not program.eqns:
            return cls(program, None, (), ())
        traced = trace_run(program, 0, len(program.eqns))
        inner = tuple((i, tuple(map(cls.of, branch_programs(program, i)))) for i in find_conditionals(program))
        # a result that is saved by name is saved a second time
        return cls(program, traced, choices(replace(traced, free=frozenset())), inner)

    @property
    def least_flops(self) -> float:
        """What all its choices recompute."""
        return min((c.recompute_flops for c in self.choices), default=0.0)

    def limits(self) -> set[float]:
        """The FLOPs that its choices recompute beside that, and those of branches inside it."""
        inner = (branch.limits() for _, branches in self.conditionals for branch in branches)
        return {c.recompute_flops - self.least_flops for c in self.choices}.union(*inner)

    def inside(self, limit: float, *, is_region: bool) -> Inside:
        """Save as few bytes as can be for so many recomputed FLOPs, in it and in each branch inside it."""
        fitting = [c for c in self.choices if c.recompute_flops - self.least_flops <= limit]
        saved = min(fitting, key=lambda c: c.saved_bytes).saved if fitting else ()
        inner = ((i, tuple(b.inside(limit, is_region=False) for b in branches)) for i, branches in self.conditionals)
        ways = tuple(Conditional(i, branches) for i, branches in inner if any(b != Inside() for b in branches))
        return Inside((Segment(0, len(self.program.eqns)),) if is_region and saved else (), ways=ways, saved=saved)


def _branch_plans(branch: _Branch, price: BodyChain, gpu: Target | None) -> list[BodyPlan]:
    """Plans of a branch: none, a region around all of it that saves less and less, or regions of its stages."""
    program, traced = branch.program, branch.traced
    if traced is None:
        return [BodyPlan(Inside(), is_region, 0, 0, 0.0) for is_region in (False, True)]
    kept, need = analytic.kept_bytes(traced, gpu=gpu), analytic.backward_bytes(traced, (), gpu=gpu)
    found = [BodyPlan(Inside(), False, kept, max(kept, need), 0.0), BodyPlan(Inside(), True, 0, need, 0.0)]
    for choice in branch.choices:
        saved = tuple(program.graph.first_value(0) + offset for offset in choice.saved)
        region, need = Segment(0, len(program.eqns), saved), analytic.backward_bytes(traced, choice.saved, gpu=gpu)
        found.append(BodyPlan(Inside((region,)), False, choice.saved_bytes, need, choice.recompute_flops))
    return [*found, *body_plans(program, partial(_without_unrolled, price))]


def _without_unrolled(price: BodyChain, body: Program, cuts: tuple[int, ...]) -> Chain:
    """Price a branch without loops that are written out: what a region of a step reads, weights too, is copied."""
    chain = price(body, cuts)
    items = (
        replace(i, options=tuple(o for o in i.options if not any(map(_is_unrolled, o.loops)))) for i in chain.items
    )
    return replace(chain, items=tuple(item for item in items if item.options))


def _is_unrolled(loop: ControlFlow) -> bool:
    return isinstance(loop, Loop) and loop.is_unrolled


def _combined(
    candidates: Sequence[Sequence[BodyPlan]], bytes_of: Callable[[BodyPlan], int]
) -> Sequence[tuple[BodyPlan, ...]]:
    """Choose a plan for every branch, a few times, with more and more recomputed FLOPs."""
    # a sum rounded otherwise is a plan that recomputes less than nothing
    limits = sorted({max(0.0, p.recompute_flops) for some in candidates for p in some})
    found = (tuple(_within(some, limit, bytes_of) for some in candidates) for limit in limits)
    return evenly(list(dict.fromkeys(found)), TUNING.body_plans)


def _kept(plan: BodyPlan) -> int:
    return plan.kept_bytes


def _need(plan: BodyPlan) -> int:
    return max(plan.kept_bytes, plan.transient_bytes)


def _within(plans: Sequence[BodyPlan], flops: float, bytes_of: Callable[[BodyPlan], int]) -> BodyPlan:
    """Choose the plan of least memory that recomputes no more than some FLOPs."""
    fitting = [p for p in plans if p.recompute_flops <= flops]
    return min(fitting, key=lambda p: (bytes_of(p), _need(p), p.recompute_flops))


def _priced(program: Program, node: int, chosen: Sequence[BodyPlan], gpu: Target | None) -> BranchChoice:
    """Price a plan for each branch: what the conditional keeps and returns, and the most that a branch needs beside."""
    loop, is_region = Conditional(node, tuple(p.inside for p in chosen)), chosen[0].is_region
    traced = trace_run(with_loops(program, (loop,)), node, node + 1)
    kept = 0 if is_region else analytic.kept_bytes(traced, gpu=gpu)
    inside = kept + max(p.transient_bytes - p.kept_bytes for p in chosen)
    transient = max(inside, analytic.backward_bytes(traced, (), gpu=gpu))
    return BranchChoice(loop, kept, transient, max(p.recompute_flops for p in chosen), is_region)


def _saving(program: Program, node: int, branches: Sequence[_Branch], gpu: Target | None) -> Iterator[BranchChoice]:
    """Yield regions around a conditional that save values of its branches, less and less.

    As it runs again such a region returns all residuals of a branch at once. A branch that is a region too returns what
    it reads, which may be more.
    """
    plain = trace_run(program, node, node + 1).flops
    for limit in evenly(sorted(set[float]().union(*(b.limits() for b in branches))), TUNING.body_plans):
        ways = [Conditional(node, tuple(b.inside(limit, is_region=is_region) for b in branches), is_recomputed=True)
                for is_region in ((False, True) if compat.saves_in_nests() else (False,))]  # fmt: skip
        found = []
        for loop in dict.fromkeys(filter(is_saving, ways)):
            traced = trace_run(with_loops(program, (loop,)), node, node + 1)
            kept, need = analytic.kept_bytes(traced, gpu=gpu), analytic.backward_bytes(traced, (), gpu=gpu)
            found.append(BranchChoice(loop, kept, max(kept, need), traced.flops - plain, is_region=False))
        if found:
            yield min(found, key=lambda c: (c.kept_bytes, c.transient_bytes))
