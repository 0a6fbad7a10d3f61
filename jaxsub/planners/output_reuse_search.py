"""Where outputs host what a plan stores: the cheapest plan of a few stages, by branch and bound.

The tables of `optimal` count every stored byte. Which of them lie in places of outputs that are not written yet
(`jaxsub.core.output_reuse`) depends on the whole plan, and no table knows. Here the outermost runs are chosen one after
the other. A branch is given up where it would not fit even if outputs hosted all they can by then, and where the tables
say that with so much more memory the rest costs too much; what stands in a nest is read from the tables, in the memory
that is left to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from jaxsub.core.chain import Chain, Run
from jaxsub.core.output_reuse import hosted_bytes
from jaxsub.core.simulate import kept_bytes, predict
from jaxsub.planners.dp_tables import Tables, depth

MOST_STAGES = 9
"""With more stages there are too many plans to look at."""

MOST_LEAVES = 20_000
"""How many plans are looked at for one budget."""

ROUNDING = 1e-6  # relative; tables hold float32


def most_hosted(chain: Chain) -> int:
    """The most bytes that outputs can host, whatever the plan: in each place the largest value that it takes.

    Example:
        >>> from jaxsub.core.chain import Crossing, Stage
        >>> stages = (Stage(0, 1, gradient_sizes=(8,)), Stage(1, 2, gradient_sizes=(3,)), Stage(2, 3))
        >>> most_hosted(Chain(stages, (), (Crossing(0, 1, 5, 0, (5,)), Crossing(1, 2, 5, 0, (5,)))))
        5
    """
    return _hosted_before(chain)[-1]


def _hosted_before(chain: Chain) -> tuple[int, ...]:
    """For each cut the most that places of the stages before it host: no others host what is stored there."""
    sizes = {size for c in chain.crossings for size in c.sizes} | {size for s in chain.stages for size in s.keep_sizes}
    sizes |= {size for item in chain.items for option in item.options for size in option.saved_sizes}
    each = (sum(max((size for size in sizes if size <= place), default=0) for place in stage.gradient_sizes)
            for stage in chain.stages)  # fmt: skip
    return tuple(accumulate(each, initial=0))


@dataclass(eq=False)
class Search:
    """A search through the plans of one chain.

    Attributes:
        chain: The chain.
        tables: Its tables, which reach as far as the budget and what outputs can host together.
        budget_bytes: What plans may be predicted to need.
        max_depth: How deep regions may stand in each other.
        flops: What the best plan found executes again; at first what it must be below.
        runs: The best plan found, or `None`.
    """

    chain: Chain
    tables: Tables
    budget_bytes: int
    max_depth: int
    flops: float = math.inf
    runs: tuple[Run, ...] | None = field(init=False, default=None)
    _leaves: int = field(init=False, default=0)
    _reach: int = field(init=False, default=0)
    _hosted: tuple[int, ...] = field(init=False, default=())
    _known: dict[tuple[int, int, int, bool], tuple[int, int]] = field(init=False, default_factory=dict)

    def run(self) -> tuple[Run, ...] | None:
        """The cheapest plan that fits, if one executes less again than `flops`."""
        self._hosted = _hosted_before(self.chain)
        self._reach = self.budget_bytes + self._hosted[-1]
        self._extend((), 0, 0.0)
        return self.runs

    def _extend(self, runs: tuple[Run, ...], stored: int, flops: float) -> None:
        """Try every next run, those first that execute least again."""
        s, chain = runs[-1].stop if runs else 0, self.chain
        if s == len(chain.stages):
            self._leaves += 1
            self._close(runs, flops)
            return
        for cost, run in sorted(self._firsts(s, stored), key=lambda first: first[0]):
            left, need = self._figures(run)
            if max(stored - self._hosted[s], 0) + need > self.budget_bytes:
                continue
            after = stored + left
            rest = float(self.tables.top[run.stop, self._slots(self._reach - after)])
            if self._leaves < MOST_LEAVES and flops + cost + rest < self.flops * (1 - ROUNDING):
                self._extend((*runs, run), after, flops + cost)

    def _firsts(self, s: int, stored: int) -> Iterator[tuple[float, Run]]:
        """Runs that may stand at stage `s`, with the least that they may execute again; nests with nothing inside."""
        chain, n, costs = self.chain, len(self.chain.stages), self.tables.costs
        slots = self._slots(self._reach - stored)
        stages, passing = chain.stages, chain.passing_bytes
        need = stages[s].transient_bytes if s == n - 1 else stages[s].keep_transient_bytes
        if stored + need + int(passing[s, s + 1]) <= self._reach:
            yield 0.0, Run(s, s + 1)
        for item in chain.items:
            if item.start == s:
                around = stored + int(passing[s, item.stop])
                options = (o for o in item.options if around + o.transient_bytes <= self._reach)
                yield from ((o.recompute_flops, Run(s, item.stop, o)) for o in options)
        for q in range(s + 1, n):
            inside = float(self.tables.levels[-1].extra[s, q - 1, slots])
            if inside < math.inf:
                yield float(costs.flops[s, q]) + inside, Run(s, q, None, (Run(s, q),))

    def _close(self, runs: tuple[Run, ...], flops: float) -> None:
        """Fill the nests of a plan in the memory that hosting leaves them, and keep it if it is the best."""
        stored, around = 0, list[int]()
        for run, hosted in zip(runs, hosted_bytes(self.chain, runs), strict=True):
            left, need = self._figures(run)
            if stored + need > self.budget_bytes:
                return  # as most plans are: without their nests and without a replay
            around.append(stored)
            stored += left - sum(hosted)
        filled = list(runs)
        for at, (run, stored) in enumerate(zip(runs, around, strict=True)):
            if run.children:
                slots = self._slots(self.budget_bytes - stored)
                if not math.isfinite(self.tables.levels[-1].extra[run.start, run.stop - 1, slots]):
                    return
                filled[at] = self.tables.nest(run.start, run.stop, slots)
        found = predict(self.chain, filled)
        if (
            found.temp_bytes <= self.budget_bytes
            and found.extra_flops < self.flops
            and depth(tuple(filled)) <= self.max_depth
        ):
            self.flops, self.runs = found.extra_flops, tuple(filled)

    def _figures(self, run: Run) -> tuple[int, int]:
        """Of an outermost run the bytes that it leaves, were none hosted, and the least that its passes need by then.

        What a nest needs inside is left out: that depends on the memory left to it.
        """
        key = run.start, run.stop, id(run.option), not run.children  # options are the chain's own, and stay
        if key not in self._known:
            chain, stage = self.chain, self.chain.stages[run.start]
            is_last = run.stop == len(chain.stages)
            need = 0 if is_last and not run.children else chain.region_forward_bytes(run.start, run.stop)
            if not run.children:
                transient = stage.transient_bytes if is_last else stage.keep_transient_bytes
                transient = transient if run.option is None else run.option.transient_bytes
                need = max(need, transient + int(chain.passing_bytes[run.start, run.stop]))
            self._known[key] = int(chain.crossing_bytes[run.start, run.stop]) + kept_bytes(chain, run), need
        return self._known[key]

    def _slots(self, n_bytes: float) -> int:
        """The slots that so many bytes make, no more than there are."""
        return max(0, min(int(n_bytes / self.tables.unit_bytes + 1e-9), self.tables.costs.n_slots))
