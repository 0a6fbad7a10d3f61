"""An axis that is independent through a run of equations, and why an equation keeps one from being so: types.

`jaxsub.jaxpr.axes` makes them, `jaxsub.emission` executes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxsub.core.errors import UnsupportedError
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis_places import Place, State


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A jaxpr along an axis.

    Attributes:
        jaxpr: The jaxpr, at the whole shape.
        consts: Its constants.
        ins: How its inputs carry the axis.
        steps: Its equations, in order, some of them evaluated at a slice's shape in addition.
        outs: How its outputs carry the axis.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    ins: tuple[Place | None, ...]
    steps: tuple[Step, ...]
    outs: tuple[State, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An equation that runs a slice at a time.

    Attributes:
        eqn: The equation at the whole shape; `None` where a whole value is sliced by the slice's number.
        reads: Its operands.
        needs: How each of them is to carry the axis.
        writes: Its results.
        outs: How they carry it.
        bodies: Its inner jaxprs.
        rule: Makes the bodies of its custom derivative rule, if it has one.
    """

    eqn: Any
    reads: tuple[Any, ...]
    needs: tuple[Place | None, ...]
    writes: tuple[Any, ...]
    outs: tuple[State, ...]
    bodies: tuple[Body, ...] = ()
    rule: Callable[[], tuple[Body, ...]] = tuple


class NotIndependent(UnsupportedError):
    """An equation keeps an axis from being independent.

    Attributes:
        eqn: The equation.
        reason: Why.
        around: The equation of the run that contains it, or that it is.
        totals: What it reads, beside what carries the axis, that is made of totals over the axis.
    """

    def __init__(self, eqn: Any, reason: str, around: Any = None, totals: Sequence[Any] = ()) -> None:
        line = compat.source_of(eqn) or (compat.source_of(around) if around is not None else "")
        super().__init__(f"`{eqn.primitive.name}`{f' at {line}' if line else ''}: {reason}")
        self.eqn, self.reason, self.around, self.totals = eqn, reason, eqn, tuple(totals)


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """An axis that is independent through a run of equations.

    Attributes:
        length: How many units it has; values in `cut` may have more, which nothing reads.
        before: Equations that run once, before all slices.
        cut: Values to slice, of the run's inputs or made before, and where they carry the axis.
        steps: Equations that run a slice at a time.
        after: Equations that run once, with the totals over all slices.
        places: Where each variable made in the slices carries the axis, or how its slices are combined; `None` for
            those that are the same in every slice.
        reads: Values that the slices read whole.
    """

    length: int
    before: tuple[Any, ...]
    cut: tuple[tuple[Any, Place], ...]
    steps: tuple[Step, ...]
    after: tuple[Any, ...]
    places: dict[Any, State]
    reads: tuple[Any, ...]


def live_steps(steps: Sequence[Step], results: Sequence[Any], outs: Sequence[State]) -> tuple[Step, ...]:
    """Those of some steps that results need, carried as they are."""
    pairs = zip(results, outs, strict=True)
    wanted = {(a, o if isinstance(o, Place) else None) for a, o in pairs if compat.is_var(a)}
    found: list[Step] = []
    for step in reversed(steps):
        made = zip(step.writes, step.outs, strict=True)
        if any((v, o if isinstance(o, Place) else None) in wanted for v, o in made):
            found.append(step)
            wanted.update((a, need) for a, need in zip(step.reads, step.needs, strict=True) if compat.is_var(a))
    return tuple(found[::-1])
