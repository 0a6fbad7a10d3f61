"""Choose the partition to plan on.

Partitions of a program into stages and a budget in bytes go in; partitions come out, the most promising first.
Nothing is compiled here; `jaxsub.search.budget_search` compiles whole plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxsub.core.budget import format_bytes
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import predicted_bytes, recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer
from jaxsub.planners import Planner, get

Partition = tuple[int, ...]
"""The first node of each stage, and the number of nodes last."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """A program's plans before any compile: for each partition, the likeliest first, and budget the planner's own."""

    pricer: Pricer
    planner: Planner
    choices: Sequence[Partition]

    def plan(self, cuts: Partition, budget_bytes: float | None, slack: float = 0.0) -> Plan:
        """The planner's plan; where it says that nothing fits, its least, or one that needs a share more."""
        chain = self.pricer.chain(cuts)
        asked = None if budget_bytes is None else max(1, int(budget_bytes))
        try:
            return self.planner(chain, asked)
        except InfeasibleBudgetError as error:
            return self.planner(chain, int(error.least_bytes * (1 + slack)))

    def plain(self) -> Plan:
        """The plan of recomputing nothing, with what it is predicted to need."""
        return get("plain")(self.pricer.chain(self.choices[0]), None)

    def roomier(self, cuts: Partition, budget_bytes: float, slack: float = 0.0) -> Plan:
        """The plan that needs least, among those that recompute hardly more than the planner's own for a budget.

        A plan that fills its budget to the last byte may overshoot it, and costs another compile then.
        """
        best = self.plan(cuts, budget_bytes, slack)
        most = recomputed_share(best) + TUNING.partition_gain
        low, high = budget_bytes / TUNING.prediction_error, predicted_bytes(best)
        if high > budget_bytes:
            return best
        while high - low > TUNING.between_gap * budget_bytes:
            asked = (low + high) / 2
            plan = self.plan(cuts, asked, slack)
            if recomputed_share(plan) <= most and predicted_bytes(plan) <= asked:
                best, high = plan, predicted_bytes(plan)
            else:
                low = asked
        return best

    def predicted_to_fit(self, budget_bytes: int, plain_bytes: int) -> Plan:
        """The planner's plan on the partition on which least is predicted to be recomputed; or a refusal.

        The least that it names is at most what is needed with nothing recomputed.
        """
        try:
            return self._refusing(budget_bytes)
        except InfeasibleBudgetError as refused:
            least = plain_bytes
            if refused.least_bytes < plain_bytes:
                least = min(plain_bytes, self._least_that_works(refused.least_bytes))
            if least == refused.least_bytes:
                raise
        raise below_least(budget_bytes, least)

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
        return self.planner(self.pricer.chain(self.ranked(budget_bytes)[0]), budget_bytes)

    def natural(self, choices: Sequence[Partition]) -> Plan:
        """The plan without a budget: on the first partition on which it is predicted to need the least, or nearly."""
        plans = [self.plan(cuts, None) for cuts in choices]
        least = min(map(predicted_bytes, plans))
        return next(plan for plan in plans if predicted_bytes(plan) <= least * (1 + TUNING.least_slack))

    def ranked(self, budget_bytes: int) -> list[Partition]:
        """The partitions, those first on which least is predicted to be recomputed within a budget.

        The first partition stays first where no other spares more than `Tuning.partition_gain`, so a smaller budget
        never spares more than that. Where nothing fits, those on which the least is lowest come first.
        """
        first = self.choices[0]
        best = self._rank(first, budget_bytes)
        if best[0] <= TUNING.partition_gain or (best[0] < math.inf and len(first) > TUNING.long_chain + 1):
            return [first]
        others = dict.fromkeys(cuts for cuts in self._others(first, budget_bytes) if cuts != first)
        ranks = [(best[0] - TUNING.partition_gain, best[1]), *(self._rank(cuts, budget_bytes) for cuts in others)]
        return [cuts for _, cuts in sorted(zip(ranks, [first, *others], strict=True), key=lambda ranked: ranked[0])]

    def _others(self, first: Partition, budget_bytes: int) -> Iterator[Partition]:
        chain = self.pricer.chain(first)
        large = [stage for stage in chain.stages if stage.transient_bytes > TUNING.large_stage * budget_bytes]
        inside = {cut for other in self.choices for cut in other for s in large if s.start < cut < s.stop}
        yield tuple(sorted({*first, *inside}))
        yield from self.choices

    def _rank(self, cuts: Partition, budget_bytes: int) -> tuple[float, int]:
        plan = self.plan(cuts, budget_bytes)
        needed = predicted_bytes(plan)
        return (recomputed_share(plan), 0) if needed <= budget_bytes else (math.inf, needed)


def below_least(budget_bytes: int, least_bytes: int) -> InfeasibleBudgetError:
    """The refusal of a budget by prediction alone."""
    return InfeasibleBudgetError(
        f"Budget `{format_bytes(budget_bytes)}` is below the least predicted peak that was found, "
        f"`{format_bytes(least_bytes)}`. Pass budget={least_bytes} or more.",
        requested_bytes=budget_bytes,
        least_bytes=least_bytes,
    )
