"""An axis of a run that may be executed in slices: in how many, and what they cost.

An axis goes in (`jaxsub.search.slicing` finds it), with a budget or a number of slices; counts and `Slices` come out.
What a run makes along its axis is counted here too, and what it makes of other data, whole in every slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jaxsub.core.decisions import UNSPLIT, Slices, Split
from jaxsub.core.tuning import TUNING
from jaxsub.costs.slice_time import NO_TIME, TILE_ROWS, SliceTime
from jaxsub.jaxpr.axis import Axis, Step
from jaxsub.jaxpr.axis_places import Place
from jaxsub.jaxpr.derivative_rules import is_inexact
from jaxsub.jaxpr.trace import Program, aval_bytes, remembered
from jaxsub.partition.inner_programs import made_bytes
from jaxsub.partition.min_cut import choice_of
from jaxsub.partition.traced_run import TracedRun


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """An axis of a run, and what slices of it would spare.

    Attributes:
        start: The run's first node.
        stop: The node after its last.
        value: A value that it reads and that carries the axis.
        dim: The dimension of it that does.
        axis: The axis.
        carried_bytes: Bytes of what the run makes along the axis.
        rows: Rows of its products along the axis.
        run: The run, in the program that contains it.
        n_kernels: Kernels of its forward pass.
        label: What it is called.
        is_head: Whether it ends the program in a loss.
        has_gradient: Whether it makes its gradient in the forward pass, for it ends in a scalar sum: then no slice is
            recomputed.
        within: In which bodies of loops and conditionals it stands.
        weight: How often it runs.
        split: Over which devices the axis is split.
    """

    start: int
    stop: int
    value: int
    dim: int
    axis: Axis
    carried_bytes: int
    rows: int
    run: Callable[[], TracedRun]
    n_kernels: Callable[[], int]
    label: str
    is_head: bool
    has_gradient: Callable[[], bool]
    within: tuple[tuple[int, int], ...] = ()
    weight: float = 1.0
    split: Split = UNSPLIT

    def is_same(self, other: Found) -> bool:
        """Whether it cuts the same values of the same run as another, found from another of them."""
        mine, others = ((run.within, run.start, run.stop, frozenset(run.axis.cut)) for run in (self, other))
        return mine == others

    def slices(self, program: Program, count: int, time: SliceTime = NO_TIME) -> Slices:
        """The run in so many slices; `time` says what each costs."""
        spared, nodes = self.carried_bytes - self.carried_bytes // count, program.graph.nodes
        every, own = (sum(node.flops for node in part) for part in (nodes, nodes[self.start : self.stop]))
        if self.has_gradient():
            again = 0.0
        else:
            again = own if self.is_head else self.weight * choice_of(self.run(), ()).recompute_flops
        once = time.share(again if self.within else own, self.rows // self.split.parts,
                          round(self.weight * self.n_kernels()), count)  # fmt: skip
        return Slices(self.start, self.stop, self.value, self.dim, count, self.axis.length, self.label, spared,
                      again / max(every, 1.0), within=self.within, split=self.split,
                      slowed_share=(count - 1) * once)  # fmt: skip

    def count(self, n_bytes: int, least: int) -> int:
        """In how many slices a run is executed: as few as leave it a small share of the budget, in large products."""
        is_whole = self.is_head and not self.start
        share = 1 / 2 if is_whole else TUNING.wide_share  # the whole function leaves nothing but its slices
        needed = self.carried_bytes / max(1.0, share * n_bytes)
        wanted, most = int(2 ** math.ceil(math.log2(max(2.0, needed)))), self._most(least)
        more = (count for count in range(wanted, min(2 * wanted - 1, most) + 1) if self.units % count == 0)
        even = 0 if self._are_tiles(wanted) else next(more, 0)
        return even or self.largest_count(least, wanted)

    def largest_count(self, least: int, wanted: float = math.inf) -> int:
        """In how many slices a run is executed at most, its products of at least so many rows.

        Fewer slices of one size hold more of the run. Where a rest is left, what is sliced is copied without it, and
        half of the sums of its gradients, in the mean while they are made, stand beside those of all others. Whole
        tiles of rows may leave a rest; a split axis may not.
        """
        units, most = self.units, int(min(wanted, self._most(least)))
        even = next((count for count in range(most, 0, -1) if units % count == 0), 0)
        sums = sum(aval_bytes(v.aval) for v in self.axis.reads if is_inexact(v))
        beside = sum(aval_bytes(v.aval) for v, _ in self.axis.cut) + sums // 2
        if even in (0, most) or self.split.parts > 1:
            return even
        is_less = even > 1 and self.carried_bytes * (1 / even - 1 / most) <= beside
        return even if is_less and not self._are_tiles(most) else -(-units // -(-units // most))

    def _most(self, least: int) -> int:
        return min(self.rows // self.split.parts // least, self.units)

    def _are_tiles(self, count: int) -> bool:
        """Whether so many slices are of whole tiles of rows, all but a rest, which a split axis may not have."""
        return self.split.parts == 1 and -(-self.units // count) % TILE_ROWS == 0

    @property
    def units(self) -> int:
        """How many units of its axis a device has."""
        return self.axis.length // self.split.parts


def bytes_made(steps: Iterable[Step]) -> int:
    """Bytes of what steps make along their axis, those in loops as often as these run."""
    found = 0
    for step in steps:
        places = zip(step.writes, step.outs, strict=True)
        found += sum(aval_bytes(v.aval) for v, place in places if isinstance(place, Place))
        found += sum(step.eqn.params.get("length", 1) * bytes_made(body.steps) for body in step.bodies)
    return found


@remembered
def _kept_of_data(program: Program) -> frozenset[Any]:
    """The variables that carry a gradient and are made of more than weights."""
    graph, weights = program.graph, program.graph.weights()
    found = {v.index for v in graph.values if v.producer is None} - weights
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return frozenset(program.variable(v) for v in found if graph.values[v].is_differentiated)


def kept_whole(program: Program, axis: Axis) -> int:
    """The bytes that a run makes of data, but not along its axis, such as what it makes of another batch."""
    kept = _kept_of_data(program)
    return sum(made_bytes(eqn) for eqn in axis.before if not kept.isdisjoint(eqn.outvars))
