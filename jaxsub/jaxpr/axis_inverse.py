"""Equations that make a value at a slice's shape though nothing they read has the axis: a broadcast does, behind them.

The gradient inside a loss begins so: with ones for all examples, times a matrix. The rules of an axis go from operands
to results (`jaxsub.jaxpr.axis_rules`); here an operand and its dimension are looked for whose rule gives the result
that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis import Step
from jaxsub.jaxpr.axis_places import Coarser, NoRule, Place, units_of
from jaxsub.jaxpr.axis_rules import rule_of

MadeInSlice = Callable[[Any, Any, Place], Step | None]
"""How an equation makes a result, at a place, at the slice's shape; `None` if it does not."""


def step_of_broadcasts(makers: Mapping[Any, Any], eqn: Any, place: Place, made: MadeInSlice) -> Step | None:
    """An equation at the slice's shape, if what it reads there is made of broadcasts; `None` if it is not.

    Args:
        makers: The equations that make values.
        eqn: The equation.
        place: How its result is to carry the axis.
        made: How cheap equations make a result at a place.
    """
    rule, known = rule_of(eqn), dict[tuple[Any, Place], bool]()
    if rule is None or eqn.effects or len(eqn.outvars) != 1:
        return None

    def is_broadcast(atom: Any, need: Place | None) -> bool:
        if need is None or (atom, need) in known:
            return need is None or known[atom, need]
        maker = makers.get(atom)
        step = None if maker is None else made(maker, atom, need)
        known[atom, need] = step is not None and all(
            is_broadcast(a, n) if compat.is_var(a) else n is None for a, n in zip(step.reads, step.needs, strict=True)
        )
        return known[atom, need]

    n = units_of(eqn.outvars[0], place)
    for number, atom in enumerate(eqn.invars):
        for dim in range(len(atom.aval.shape) if compat.is_var(atom) else 0):
            has = Place(dim, place.unit)
            if atom.aval.shape[dim] != n * place.unit or not is_broadcast(atom, has):
                continue
            ins = [has if i == number else None for i in range(len(eqn.invars))]
            try:
                needs, outs = rule(eqn, ins, n)
            except (Coarser, NoRule):
                continue
            reads = zip(eqn.invars, needs, strict=True)
            if list(outs) == [place] and all(is_broadcast(a, need) for a, need in reads):
                return Step(eqn, tuple(eqn.invars), tuple(needs), tuple(eqn.outvars), (place,))
    return None
