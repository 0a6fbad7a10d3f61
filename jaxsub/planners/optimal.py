"""`optimal`: the least recomputation that fits, by dynamic programming over a chain.

A `Chain` and a budget in bytes go in, a `Plan` comes out. The tables of `jaxsub.planners.dp_tables` hold the least
extra FLOPs for every amount of memory up to a maximum, so tables filled once serve all budgets below it. They count
memory in slots; `jaxsub.core.simulate.predict` replays their plans in exact bytes, from a little over the budget
downwards until one fits. A budget far below the maximum is solved on a finer scale, since coarse slots would not
resolve it. Scales are fixed rungs, whatever the budget, so that a larger budget never gets a slower plan.

Chen's segments, the recursion and revolve are special cases of its plans: up to the rounding to slots it is never
worse on the same chain.

Source: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, *Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory* (2019); options inside stages as in Zhao, Le Hellard, Eyraud-Dubois,
Gusak, Beaumont, *Rockmate* (ICML 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Prediction, Run
from jaxsub.core.output_reuse import most_hosted
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.core.simulate import extra_flops, predict
from jaxsub.core.tuning import TUNING
from jaxsub.planners.dp_tables import Tables, depth, tables_of
from jaxsub.planners.memo import AllBudgets, Answer
from jaxsub.planners.select import infeasible
from jaxsub.planners.split_regions import split_regions

HEADROOM = 1.06  # tables reach so far over the budget: rounding up makes plans look larger than they are
RUNG = 0.8  # each scale's maximum over the one before: budgets get between this share of the slots and all of them
OVERLAP = 1.12  # near a rung both scales are searched, so that rounding cannot make a larger budget slower
COARSER = 3  # times fewer, and as many for finding a scale
BOUND_COST = 1.3  # the bound on nesting mostly raises the least peak by less than this factor
KEPT_BYTES = 3 * 2**28  # tables up to so many bytes are kept
LOWEST = 4  # how many steps of the tables, from the lowest up, are replayed to find the least peak
EQUAL = 1e-3  # of a forward pass: of plans of a long chain that differ by less, fewer regions compile sooner
FLOPS_ROUNDING = 1e-6  # relative; tables hold float32
FLOOR = 0.6  # of a scale's maximum: long chains fill what is below only where it is needed
DOUBLINGS = 12  # limits on recomputed FLOPs: a forward pass, and its half, so many times

Frontier = tuple[tuple[int, float, tuple[Run, ...]], ...]
"""Predicted bytes, extra FLOPs and runs of Pareto-optimal plans, by rising bytes."""

Filling = tuple[int, bool, bool, bool, float]
"""The key of filled tables: the scale; whether nesting is bounded, slots are coarse, and entries below `FLOOR` of the
scale are left out; the most FLOPs that are recomputed."""


@dataclass(frozen=True)
class Solution:
    """Plans of one chain for all budgets up to `max_bytes`; tables are filled when first needed.

    The most memory is divided into about so many slots; every scale below has as many.
    """

    chain: Chain
    max_bytes: int
    slots: int
    max_depth: int
    _filled: dict[Filling, Tables] = field(default_factory=dict, repr=False, compare=False)

    def runs(self, budget_bytes: int) -> tuple[Run, ...]:
        """Find the cheapest runs that are predicted to fit, if any; in short regions, unless the chain is long."""
        plain = self.chain.plain()
        found = [(plain, predict(self.chain, plain))]
        reach = budget_bytes + most_hosted(self.chain)
        scales = {self._useful(rung) for n_bytes in {budget_bytes, reach} for rung in self._rungs(n_bytes)}
        for rung in sorted(scales):
            found += self._cheapest(rung, budget_bytes, reach, self._most_flops(found, budget_bytes))
        found = [f for f in found if f[1].temp_bytes <= budget_bytes]
        found.sort(key=lambda f: (f[1].extra_flops, f[1].temp_bytes))
        if found:
            runs = self._simplest(found)
            return runs if len(self.chain.stages) >= TUNING.long_chain else split_regions(self.chain, runs)
        least = self.least()
        if (least_bytes := predict(self.chain, least).temp_bytes) <= budget_bytes:
            return least
        raise infeasible(budget_bytes, least_bytes, "optimal")

    def _most_flops(self, found: Sequence[tuple[tuple[Run, ...], Prediction]], budget_bytes: int) -> float:
        """Bound the FLOPs that better runs than these recompute: tables of long chains need not hold more."""
        fitting = [p.extra_flops + EQUAL * p.forward_flops for _, p in found if p.temp_bytes <= budget_bytes]
        return min(fitting, default=math.inf) if len(self.chain.stages) >= TUNING.long_chain else math.inf

    def _simplest(self, found: Sequence[tuple[tuple[Run, ...], Prediction]]) -> tuple[Run, ...]:
        """Choose the cheapest runs, or for a long chain about as cheap ones that need no more, in far fewer regions."""
        runs, best = found[0]
        for others, other in found[1:] if len(self.chain.stages) >= TUNING.long_chain else ():
            is_equal = other.extra_flops <= best.extra_flops + EQUAL * best.forward_flops
            if is_equal and other.temp_bytes <= best.temp_bytes and _regions(others) <= TUNING.fewer * _regions(runs):
                runs = others
        return runs

    def least(self) -> tuple[Run, ...]:
        """Find the runs with the least predicted peak, at any recompute."""
        return self._least(math.inf)

    def natural(self) -> tuple[Run, ...]:
        """Find the runs of least predicted peak that recompute at most one forward pass: the paper's default."""
        return self._least(TUNING.natural_share * self.chain.forward_flops)

    def frontier(self, points: int = 24) -> Frontier:
        """List predicted bytes, extra FLOPs and runs of the Pareto-optimal plans, by rising bytes.

        Args:
            points: About how many plans to replay from each filling of the tables.

        Example:
            >>> from jaxsub.core.chain import Chain, Crossing, Stage
            >>> stages = tuple(
            ...     Stage(s, s + 1, transient_bytes=1, keep_bytes=4, keep_transient_bytes=1) for s in range(3)
            ... )
            >>> chain = Chain(stages, (), tuple(Crossing(s, s + 1, 2, 0) for s in range(2)))
            >>> [(n_bytes, flops) for n_bytes, flops, _ in solve(chain).frontier()]
            [(3, 3.0), (5, 2.0), (9, 1.0), (13, 0.0)]
        """
        plans = [self.chain.plain(), self.least()]
        lowest = predict(self.chain, plans[1]).temp_bytes
        for rung in range(0, self._rung(lowest) + 1, 3):
            if rung == self._useful(rung):
                # the next scale, three rungs on, resolves smaller plans better
                below = 0 if self._useful(rung + 3) == rung else self._most_bytes(rung + 3)
                plans += [runs for runs, *_ in self._steps(rung, math.inf, points, max(lowest, below) * (2 - HEADROOM))]
        found = sorted(
            ((p.temp_bytes, p.extra_flops, r) for r in plans for p in [predict(self.chain, r)]), key=lambda f: f[:2]
        )
        best = [found[0]]
        for plan in found[1:]:
            if plan[1] < best[-1][1]:
                best.append(plan)
        return tuple(best)

    def _rungs(self, n_bytes: int) -> set[int]:
        """Choose the scales that are searched for a budget."""
        rung = self._rung(n_bytes)
        return {rung, rung + 1} if n_bytes < OVERLAP * self._most_bytes(rung + 1) else {rung}

    def _cheapest(
        self, rung: int, budget_bytes: int, reach: int, most_flops: float
    ) -> list[tuple[tuple[Run, ...], Prediction]]:
        """Find the cheapest runs of one scale that are predicted to fit: a list of one, or of none.

        Where outputs may host much, there are many steps between the budget and `reach`. A long chain replays a few at
        a fixed distance, then those above the first that fits. The distance is odd: the bytes that outputs can host
        may alternate with every second or fourth step, and an even distance could miss all that fit.
        """
        above, coarse = reach * HEADROOM, 2 * (len(self.chain.stages) // TUNING.long_chain) + 1
        for stride in (1,) if reach == budget_bytes else dict.fromkeys((coarse, 1)):
            for runs, prediction, n_bytes in self._steps(rung, above, stride=stride, most_flops=most_flops):
                if prediction.temp_bytes <= budget_bytes:
                    if stride == 1:
                        return [(runs, prediction)]
                    break
                above = n_bytes if stride > 1 else above
        return []

    def _rung(self, n_bytes: float) -> int:
        """Find the finest scale that holds so many bytes."""
        return max(0, math.floor(math.log(max(n_bytes, 1) / self.max_bytes, RUNG) + 1e-9))

    def _most_bytes(self, rung: int) -> int:
        return math.ceil(self.max_bytes * RUNG**rung)

    def _useful(self, rung: int) -> int:
        # slots of one byte are exact: a finer scale adds nothing
        while rung and self._most_bytes(rung - 1) * HEADROOM <= self.slots:
            rung -= 1
        return rung

    def _tables(self, rung: int, is_bounded: bool = False, is_coarse: bool = False, is_floored: bool = False,
                most_flops: float = math.inf) -> Tables:  # fmt: skip
        for (*key, filled_flops), tables in self._filled.items():
            if key == [rung, is_bounded, is_coarse, is_floored] and most_flops <= filled_flops:
                return tables
        while sum(tables.n_bytes for tables in self._filled.values()) > KEPT_BYTES:
            self._filled.pop(next(iter(self._filled)))
        most_bytes = math.ceil(self._most_bytes(rung) * HEADROOM)
        is_long = is_coarse or (is_bounded and len(self.chain.stages) > TUNING.long_chain)
        slots, max_depth = self.slots // (COARSER if is_long else 1), self.max_depth if is_bounded else None
        steps = (self.chain.forward_flops / 2**i for i in reversed(range(DOUBLINGS)))
        most_flops = next((flops for flops in steps if flops >= most_flops), math.inf)
        least_bytes = FLOOR * self._most_bytes(rung) if is_floored else 0
        tables = tables_of(self.chain, most_bytes, slots, max_depth, least_bytes, most_flops)
        self._filled[rung, is_bounded, is_coarse, is_floored, most_flops] = tables
        return tables

    def _steps(
        self, rung: int, most_bytes: float, points: int | None = None, least_bytes: float = 0, stride: int = 1,
        most_flops: float = math.inf,
    ) -> Iterator[tuple[tuple[Run, ...], Prediction, float]]:  # fmt: skip
        """Yield runs, predictions and memory for falling memory, nested no deeper than allowed.

        Runs of long chains that recompute more than `most_flops` may be left out.
        """
        for is_bounded in (False, True):
            above = most_bytes
            for tables, slots in self._levels(rung, most_bytes, points, least_bytes, stride, most_flops, is_bounded):
                runs, prediction = tables.replayed(slots)
                if depth(runs) > self.max_depth:
                    most_bytes = above  # bounded tables may have steps of their own between two steps of deeper plans
                    break
                above = slots * tables.unit_bytes
                yield runs, prediction, above
            else:
                return

    def _levels(
        self, rung: int, most_bytes: float, points: int | None, least_bytes: float, stride: int, most_flops: float,
        is_bounded: bool,
    ) -> Iterator[tuple[Tables, int]]:  # fmt: skip
        """Yield tables and slots to replay, for falling memory; long chains have tables of their own below `FLOOR`."""
        is_long = points is None and len(self.chain.stages) >= TUNING.long_chain
        for is_floored in (True, False) if is_long else (False,):
            tables = self._tables(rung, is_bounded, is_floored=is_floored, most_flops=most_flops)
            every = (int(m) for m in tables.steps(math.inf)[::-1][::stride])
            steps = [m for m in every if least_bytes <= m * tables.unit_bytes <= most_bytes]
            yield from ((tables, m) for m in steps[:: max(1, len(steps) // points) if points else 1])
            most_bytes = min(most_bytes, tables.floor * tables.unit_bytes)

    def _least(self, most_flops: float) -> tuple[Run, ...]:
        plain = self.chain.plain()
        best = (predict(self.chain, plain).temp_bytes, plain)
        if self.max_bytes < best[0]:
            return solve(self.chain, best[0], self.slots, self.max_depth)._least(most_flops)
        for is_coarse in (True, False) if len(self.chain.stages) > TUNING.long_chain else (False,):
            rung = -1
            while rung != (finer := self._useful(self._rung(best[0]))):
                rung = finer
                best = min([best, *self._lowest(self._tables(rung, is_coarse=is_coarse), most_flops)], key=_first)
        if depth(best[1]) <= self.max_depth:
            return best[1]
        for rung in range(self._rung(BOUND_COST * best[0]), -3, -3):
            if found := self._lowest(self._tables(self._useful(max(0, rung)), is_bounded=True), most_flops):
                return min(found, key=_first)[1]
        return plain

    def _lowest(self, tables: Tables, most_flops: float) -> list[tuple[int, tuple[Run, ...]]]:
        """List (predicted bytes, runs) of the lowest steps of a table that recompute no more than allowed."""
        most_flops *= 1 + FLOPS_ROUNDING
        steps = [m for m in map(int, tables.steps(math.inf)) if tables.top[0, m] <= most_flops]
        found = map(tables.replayed, steps[:LOWEST])
        return [(p.temp_bytes, runs) for runs, p in found if p.extra_flops <= most_flops]


def _regions(runs: Sequence[Run]) -> int:
    own = sum(bool(r.children) or (r.option is not None and r.option.is_region) for r in runs)
    return own + sum(_regions(r.children) for r in runs)


def _first(pair: tuple[int, tuple[Run, ...]]) -> int:
    return pair[0]


def solve(chain: Chain, max_bytes: int | None = None, slots: int = 500, max_depth: int = TUNING.deepest) -> Solution:
    """Solve a chain for all budgets up to a most, by default what it needs without recomputation, in so many slots."""
    if max_bytes is None:
        max_bytes = predict(chain, chain.plain()).temp_bytes + most_hosted(chain)
    return Solution(chain, max(1, max_bytes), slots, max_depth)


@dataclass(frozen=True, slots=True)
class Optimal(AllBudgets):
    """The planner `optimal`.

    Attributes:
        slots: About how many slots to divide the budget into.
        max_depth: How deep regions may nest.
    """

    slots: int = 500
    max_depth: int = TUNING.deepest

    def solved(self, chain: Chain) -> Answer:
        """Plan a chain for all budgets; without one, the least memory that one extra forward pass buys."""
        return partial(_planned, solve(chain, None, self.slots, self.max_depth))


def _planned(solution: Solution, budget_bytes: int | None) -> Plan:
    chain = solution.chain
    runs = solution.natural() if budget_bytes is None else solution.runs(budget_bytes)
    is_free = extra_flops(chain, runs) == 0
    return plan_from_runs(chain, runs, budget=Budget(budget_bytes), planner="optimal", is_optimal=is_free)
