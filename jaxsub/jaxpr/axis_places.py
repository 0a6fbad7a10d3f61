"""Where a value carries an independent axis, and why an equation stops one: types of `jaxsub.jaxpr.axis_rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class NoRule(Exception):
    """Why an equation does not let the axis through."""


class Coarser(Exception):
    """A reshape cuts inside of units: the axis is independent in no more than `n_units`."""

    def __init__(self, n_units: int) -> None:
        super().__init__(n_units)
        self.n_units = n_units


class Shorter(Exception):
    """A slice takes the first units of the axis and leaves the others out."""

    def __init__(self, n_units: int) -> None:
        super().__init__(n_units)
        self.n_units = n_units


@dataclass(frozen=True, slots=True)
class Place:
    """The dimension of a value that carries the axis, and its elements for each unit."""

    dim: int
    unit: int = 1


@dataclass(frozen=True, slots=True)
class Total:
    """What slices of a result are put together with: `sum`, `max` or `min`."""

    how: str = "sum"


State = Place | Total | None
Ruled = tuple[Sequence[Place | None], Sequence[State]]
"""What is needed of each operand, and what each result is."""
Rule = Callable[[Any, Sequence[Place | None], int], Ruled]


def units_of(atom: Any, place: Place) -> int:
    """How many units of the axis a value has."""
    return int(atom.aval.shape[place.dim] // place.unit)


def reshaped(place: Place, old: tuple[int, ...], new: tuple[int, ...], n: int) -> Place:
    """Where a reshape leaves the axis: in the dimension before which as many elements stand as before it now.

    Example:
        >>> reshaped(Place(0), (8, 4, 3), (32, 3), 8)
        Place(dim=0, unit=4)
    """
    before = math.prod(old[: place.dim])
    for dim, size in enumerate(new):
        if math.prod(new[:dim]) == before and size > 1:
            behind = math.prod(new[dim + 1 :])
            unit, rest = divmod(place.unit * math.prod(old[place.dim + 1 :]), behind)
            if rest == 0 and unit * n == size:
                return Place(dim, unit)
            if math.gcd(n, size) > 1:
                raise Coarser(math.gcd(n, size))
    raise NoRule("it mixes the axis with a dimension in front of it")
