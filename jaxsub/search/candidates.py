"""Choose the partition to plan on.

Partitions of a program into stages and a budget in bytes go in; `Way`s come out, the most promising first.
Nothing is compiled here; `jaxsub.search.budget_search` compiles whole plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxsub.core.budget import format_bytes
from jaxsub.core.chain import Chain
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.output_reuse import unfenced
from jaxsub.core.passes import Pass, run_passes
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer
from jaxsub.planners import Planner

WITHOUT_BARRIERS = Pass("without gradient barriers", unfenced)


@dataclass(frozen=True, slots=True)
class Way:
    """How to plan a program: a partition, and whether gradient barriers stand between its stages.

    Attributes:
        cuts: The first node of each stage, and the number of nodes last.
        has_barriers: Whether plans have barriers.
    """

    cuts: tuple[int, ...]
    has_barriers: bool = True


@dataclass(frozen=True, slots=True)
class Candidates:
    """A program's plans before any compile: for each way and budget the planner's own.

    Attributes:
        pricer: Prices the program.
        planner: The planner.
        choices: Partitions, the likeliest first.
    """

    pricer: Pricer
    planner: Planner
    choices: Sequence[tuple[int, ...]]

    def chain(self, way: Way) -> Chain:
        """The chain that the planner is asked on."""
        chain = self.pricer.chain(way.cuts)
        return chain if way.has_barriers else run_passes(chain, [WITHOUT_BARRIERS])

    def plan(self, way: Way, budget_bytes: float | None, slack: float = 0.0) -> Plan:
        """The planner's plan; where it says that nothing fits, its least, or one that needs a share more."""
        chain = self.chain(way)
        asked = None if budget_bytes is None else max(1, int(budget_bytes))
        try:
            plan = self.planner(chain, asked)
        except InfeasibleBudgetError as error:
            plan = self.planner(chain, int(error.least_bytes * (1 + slack)))
        return plan if way.has_barriers else plan.replace(barriers=())

    def roomier(self, way: Way, budget_bytes: float, slack: float = 0.0) -> Plan:
        """The plan that needs least, among those that recompute hardly more than the planner's own for a budget.

        A plan that fills its budget to the last byte may overshoot it, and costs another compile then.
        """
        best = self.plan(way, budget_bytes, slack)
        most = recomputed_share(best) + TUNING.partition_gain
        low, high = budget_bytes / TUNING.prediction_error, predicted_bytes(best)
        if high > budget_bytes:
            return best
        while high - low > TUNING.between_gap * budget_bytes:
            asked = (low + high) / 2
            plan = self.plan(way, asked, slack)
            if recomputed_share(plan) <= most and predicted_bytes(plan) <= asked:
                best, high = plan, predicted_bytes(plan)
            else:
                low = asked
        return best

    def predicted_to_fit(self, budget_bytes: int) -> Plan:
        """The planner's plan on the partition on which least is predicted to be recomputed; or a refusal."""
        try:
            return self._refusing(budget_bytes)
        except InfeasibleBudgetError as refused:
            least = self._least_that_works(refused.least_bytes)
            if least == refused.least_bytes:
                raise
        raise InfeasibleBudgetError(
            f"Budget `{format_bytes(budget_bytes)}` is below the least predicted peak that was found, "
            f"`{format_bytes(least)}`. Pass budget={least} or more.",
            requested_bytes=budget_bytes,
            least_bytes=least,
        )

    def _least_that_works(self, least_bytes: int) -> int:
        """The least budget from this on that is met: for another budget other partitions may be looked at."""
        while True:
            try:
                self._refusing(least_bytes)
            except InfeasibleBudgetError as refused:
                least_bytes = max(refused.least_bytes, least_bytes + 1)
            else:
                return least_bytes

    def _refusing(self, budget_bytes: int) -> Plan:
        way = self.ranked(budget_bytes)[0]
        plan = self.planner(self.chain(way), budget_bytes)
        return plan if way.has_barriers else plan.replace(barriers=())

    def natural(self, choices: Sequence[tuple[int, ...]]) -> Plan:
        """The plan without a budget: on the first partition on which it is predicted to need the least, or nearly."""
        plans = [self.plan(Way(cuts), None) for cuts in choices]
        least = min(map(predicted_bytes, plans))
        return next(plan for plan in plans if predicted_bytes(plan) <= least * (1 + TUNING.least_slack))

    def ranked(self, budget_bytes: int) -> list[Way]:
        """The ways, those first on which least is predicted to be recomputed within a budget.

        The first partition stays first where no other spares more than `Tuning.partition_gain`, so a smaller budget
        never spares more than that. Where nothing fits, those on which the least is lowest come first.
        """
        first = Way(self.choices[0])
        best = self._rank(first, budget_bytes)
        if best[0] <= TUNING.partition_gain or (best[0] < math.inf and len(first.cuts) > TUNING.long_chain + 1):
            return [first]
        others = dict.fromkeys(way for way in self._others(first, budget_bytes) if way != first)
        ranks = [(best[0] - TUNING.partition_gain, best[1]), *(self._rank(way, budget_bytes) for way in others)]
        ways = [first, *others]
        return [ways[i] for i in sorted(range(len(ways)), key=lambda i: (*ranks[i], i))]

    def every(self) -> list[Way]:
        """All ways that are looked at whatever the budget is."""
        return [*map(Way, self.choices), *self.bare()]

    def bare(self) -> list[Way]:
        """The way without barriers, where a GPU makes zeros ahead because of them."""
        makes_zeros = any(stage.ahead_bytes for stage in self.pricer.chain(self.choices[0]).stages)
        return [Way(self.choices[0], has_barriers=False)] if makes_zeros else []

    def _others(self, first: Way, budget_bytes: int) -> Iterator[Way]:
        chain = self.pricer.chain(first.cuts)
        large = [stage for stage in chain.stages if stage.transient_bytes > TUNING.large_stage * budget_bytes]
        inside = {cut for other in self.choices for cut in other for s in large if s.start < cut < s.stop}
        yield Way(tuple(sorted({*first.cuts, *inside})))
        yield from self.every()

    def _rank(self, way: Way, budget_bytes: int) -> tuple[float, int]:
        plan = self.plan(way, budget_bytes)
        needed = predicted_bytes(plan)
        return (recomputed_share(plan), 0) if needed <= budget_bytes else (math.inf, needed)


def recomputed_share(plan: Plan) -> float:
    """What a plan recomputes, as a share of one forward pass; 0 where it does not say."""
    found = plan.prediction.extra_flops / max(plan.prediction.forward_flops, 1.0) if plan.prediction else 0.0
    return found + sum(run.extra_share for run in plan.slices)


def predicted_bytes(plan: Plan) -> int:
    """The predicted peak of a plan, in bytes; 0 where it does not say."""
    return plan.prediction.temp_bytes if plan.prediction else 0
