"""Plans as an integer program: the schedules of `jaxsub.planners.milp_model` that are nested regions.

A cut `C[t, q]` says that a run ends at stage q when phase t begins. A cut stays until it is passed, and all values that
cross it are live. Recompute begins at a cut, goes on to the frontier, and makes new cuts on its way. A mode begins and
ends at a cut, with no cut inside. Such a schedule is a sequence of runs, in which the stages recomputed in one phase
are a nest; `runs_of` reads them off.

A nest of a single nest, or of a single region with an option, is left out: it is never better than its content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxsub.core.chain import Run
from jaxsub.planners.milp_model import Mode, Schedules

TOLERANCE = 1e-6
"""By what share the solver may break a constraint; plans must not exceed their budget by a byte."""


@dataclass(eq=False)
class Regions(Schedules):
    """The integer program of one chain and budget whose solutions are plans."""

    def __post_init__(self) -> None:
        self.room = min(1.0, 1.0 - TOLERANCE + 0.5 / self.budget_bytes)
        super().__post_init__()
        n = len(self.chain.stages)
        for i in range(n - 1):
            self._at_most([(self.var("R", n - 1, i), 1)])
        for t in range(n):
            self._cuts(t)
            within = [(self.var("Z", o), 1.0) for o, w in enumerate(self.modes) if w.start <= t < w.stop - 1]
            for i in range(t):
                self._at_most([(self.var("R", t, i), 1), *within], 1)
        for o, mode in enumerate(self.modes):
            self._whole_mode(o, mode)

    def _hosted_bytes(self, stage: int) -> int:
        return 0  # hosted bytes depend on the whole plan, so plans must fit without them

    def _cuts(self, t: int) -> None:
        """Constrain cuts: they stay, values that cross them are live, and recompute goes from a cut to the frontier."""
        for q in range(1, t):
            cut, after = self.var("C", t, q), self.var("C", t - 1, q)
            self._at_most([(cut, 1), (after, -1)])
            self._at_most([(after, 1), (cut, -1), (self.var("R", t, q - 1), -1)])
        for i in range(t):
            here, cut = self.var("R", t, i), self.var("C", t, i)
            self._at_most([(here, 1), (self.var("C", t, i + 1), 1)], 1)
            if i:
                whole = [(self.var("Z", o), -1.0) for o, w in enumerate(self.modes) if w.is_once and w.stop - 1 == t
                         and w.start <= i]  # fmt: skip
                self._at_most([(self.var("R", t, i - 1), 1), (here, -1), *whole])
                self._at_most([(here, 1), (self.var("R", t, i - 1), -1), (cut, -1)])
        for c, x in enumerate(self.crossings):
            if x.made < t:
                cuts = [self.var("C", t, q) for q in range(x.made + 1, min(x.last, t) + 1)]
                held = self.var("S", t, c)
                for cut in cuts:
                    self._at_most([(cut, 1), (held, -1)])
                self._at_most([(held, 1), *((cut, -1.0) for cut in cuts)])

    def _whole_mode(self, o: int, mode: Mode) -> None:
        """Constrain a mode to begin and end at a cut, with no cut inside."""
        n, a, b, t = len(self.chain.stages), mode.start, mode.stop, mode.stop - 1
        chosen = self.var("Z", o)
        if a:
            self._at_most([(chosen, 1), (self.var("C", t, a), -1), (self.var("R", t, a - 1), -1)])
        for q in range(a + 1, b):
            self._at_most([(chosen, 1), (self.var("C", q, q), 1)], 1)
        if mode.is_once:
            self._at_most([(chosen, 1), (self.var("R", t, a - 1), -1)])
        elif mode.option is not None and a:
            self._at_most([(chosen, 1), (self.var("R", t, a - 1), 1)], 1)
        top = [self.var("C", n - 1, q) for q in (a, b) if 0 < q < n]
        if mode.is_remade or mode.stored_bytes or not mode.is_nestable:
            first = self.var("K", n - 1, o) if mode.is_remade else chosen
            for cut in top:
                self._at_most([(first, 1), (cut, -1)])
        for s in range(b, n):
            for q in (q for q in (a, b) if 0 < q < s and mode.is_remade):
                self._at_most([(self.var("RK", s, o), 1), (self.var("C", s - 1, q), -1)])

    def _variables(self) -> None:
        super()._variables()
        for t in range(len(self.chain.stages)):
            for q in range(1, t + 1):
                self._new("C", t, q)


def runs_of(program: Regions, values: np.ndarray) -> tuple[Run, ...]:
    """Read the runs off a solution."""
    chosen = {(w.start, w.stop): w for o, w in enumerate(program.modes) if values[program.at["Z", (o,)]] > 0.5}
    n = len(program.chain.stages)

    def split(start: int, stop: int, t: int) -> list[int]:
        cuts = [q for q in range(start + 1, min(stop, t + 1)) if values[program.at["C", (t, q)]] > 0.5]
        return [start, *cuts, stop]

    def runs(ends: Sequence[int], is_top: bool) -> Iterator[Run]:
        for start, stop in pairwise(ends):
            mode, is_last = chosen.get((start, stop)), stop == ends[-1]
            if mode is None:
                inside = split(start, stop, stop - 2)
                ending = next(w.start for w in chosen.values() if w.stop == stop)
                if ending not in inside:
                    inside.insert(-1, ending)
                yield Run(start, stop, None, tuple(runs(inside, is_top=False)))
            elif mode.option is not None:
                yield Run(start, stop, mode.option)
            elif mode.is_kept or (is_last and (not is_top or stop == n)):
                yield Run(start, stop)
            else:
                yield program.chain.recompute(start)

    return tuple(runs(split(0, n, n - 1), is_top=True))
