"""The paper's planner: greedy segments under B (Algorithm 3) and the search over B (Appendix A).

Algorithm 3 walks through the program and ends a segment as soon as the values made in it exceed B bytes. It returns x,
the approximate bytes between segments, and y, those inside the largest. Appendix A runs it with B = 0, then with
B = sqrt(x y), then on a grid of six around that, and takes the exact cost of each plan from a static allocator. On a
chain of n equal stages the least peak grows as sqrt(n), at no more than one extra forward pass.

`greedy_mirror_counts` is Algorithm 3 on nodes, word for word. `greedy_plan` is the same on a chain, whose stages are
the nodes and whose cuts are the candidate splitting points. `Chen` searches over B and takes exact costs from
`jaxsub.core.simulate.predict`. A segment is one region that saves nothing; the last is not wrapped, so its backward
pass starts at once.

Source: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, §4.3, Algorithm 3 and
Appendix A. Ours in addition: with a budget in bytes, B is also tried over its full range, as densely, up to the plan
of no recompute. Every budget compares the same plans: a larger one never recomputes more, and `least_bytes` succeeds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Run
from jaxsub.core.graph import Graph
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.planners.memo import AllBudgets, Answer
from jaxsub.planners.select import Candidates


def greedy_mirror_counts(
    graph: Graph, candidates: Collection[int], budget_bytes: float
) -> tuple[tuple[int, ...], int, int]:
    """Choose the mirror count of each node greedily: the paper's Algorithm 3, its C the candidates, its B the budget.

    Returns m(v) for each node, 0 where its result is saved and 1 where it is recomputed; x, the approximate bytes
    between segments; y, the approximate bytes of the largest segment that ends at a candidate.

    References:
        Chen et al., 2016, Algorithm 3.
    """
    may_split = frozenset(candidates)
    counts, temp, x, y = [], 0, 0, 0
    for node in graph.nodes:
        size = sum(graph.values[v].n_bytes for v in node.outputs)
        temp += size
        if node.index in may_split and temp > budget_bytes:
            x, y, temp = x + size, max(y, temp), 0
            counts.append(0)
        else:
            counts.append(1)
    return tuple(counts), x, y


def greedy_plan(chain: Chain, budget_bytes: float) -> tuple[tuple[Run, ...], int, int]:
    """Cut a chain into segments greedily: the paper's Algorithm 3 with stages as nodes, its B the budget.

    The candidate splitting points are the cuts between stages. A segment stores the values that it makes and later
    segments read: a value that crosses many cuts counts once, where it is made. Returns a region that saves nothing for
    each segment but the last, which is not wrapped; x, the bytes between segments; y, those of the largest segment but
    the last.

    References:
        Chen et al., 2016, Algorithm 3.
    """
    runs: list[Run] = []
    temp, x, y, start = 0, 0, 0, 0
    for s, stage in enumerate(chain.stages[:-1]):
        temp += stage.made_bytes
        if temp > budget_bytes:
            x, y, temp = x + int(chain.crossing_bytes[start, s + 1]), max(y, temp), 0
            runs.append(_segment(chain, start, s + 1))
            start = s + 1
    return (*runs, *(Run(s, s + 1) for s in range(start, len(chain.stages)))), x, y


def _segment(chain: Chain, start: int, stop: int) -> Run:
    return chain.nest(start, stop) if stop - start > 1 else chain.recompute(start)


@dataclass(frozen=True, slots=True)
class Chen(AllBudgets):
    """Plan with the paper's search over B.

    Without a budget it keeps the plan of least predicted peak among B = 0, B = sqrt(x y) and the paper's grid. With a
    budget it tries B over its full range and keeps the plan of least recompute that fits.

    Attributes:
        n_grid: How many B to try on [B / sqrt(2), sqrt(2) B]; the paper's 6.

    Raises:
        ValueError: If `n_grid` is below 2.

    Example:
        >>> from jaxsub.core.chain import Crossing, Stage
        >>> stages = tuple(Stage(s, s + 1, transient_bytes=1, keep_transient_bytes=1, made_bytes=1) for s in range(64))
        >>> chain = Chain(stages, (), tuple(Crossing(s, s + 1, 1, 1) for s in range(63)))
        >>> plan = Chen()(chain)
        >>> plan.plain_prediction.temp_bytes, plan.prediction.temp_bytes
        (64, 15)

    References:
        Chen et al., 2016, Appendix A.
    """

    n_grid: int = 6

    def __post_init__(self) -> None:
        if self.n_grid < 2:
            raise ValueError(f"the grid over B needs at least 2 points, got n_grid={self.n_grid}")

    def solved(self, chain: Chain) -> Answer:
        """Plan a chain for all budgets; without one, the least peak."""
        found = Candidates(chain, lambda b: greedy_plan(chain, b)[0], "chen")

        def answer(budget_bytes: int | None) -> Plan:
            grid = self._grid(chain, is_full=budget_bytes is not None)
            if budget_bytes is not None:
                return found.cheapest(grid, budget_bytes)
            runs = min(found.priced(grid), key=lambda f: (f[1].temp_bytes, f[1].extra_flops))[0]
            return plan_from_runs(chain, runs, budget=Budget(n_bytes=None), planner="chen")

        return answer

    def _grid(self, chain: Chain, is_full: bool) -> Iterator[float]:
        """Yield every B to try, in bytes."""
        _, x, y = greedy_plan(chain, 0)
        yield from (0.0, center := math.sqrt(x * y))
        yield from (center * 2 ** (i / (self.n_grid - 1) - 0.5) for i in range(self.n_grid))
        if is_full:
            made = [stage.made_bytes for stage in chain.stages if stage.made_bytes]
            least, b = min(made, default=0), float(sum(made))
            while b >= least > 0:
                yield b
                b *= 2 ** (-1 / (self.n_grid - 1))
