"""Find the arguments that an axis comes from: plans name it so, and decide nothing by it.

A dimension of a value goes in. It is followed back from each equation to those dimensions of its operands from which
the equation's own rule (`jaxsub.jaxpr.axis_rules`) leads there, through inner jaxprs, and from a loop's carry to its
first value. Dimensions that a reshape joins, as batch × tokens, are followed together. Where no rule leads further the
search ends there, so what is found is derived and not guessed; nothing may be found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxsub.core.decisions import UNSPLIT, Split
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis import Axis, Step
from jaxsub.jaxpr.axis_bodies import CHECKED_ORDERS
from jaxsub.jaxpr.axis_places import Coarser, NoRule, Place, Total
from jaxsub.jaxpr.axis_rules import rule_of
from jaxsub.jaxpr.flops import bodies_of
from jaxsub.jaxpr.shardings import data_share, has_explicit_axes
from jaxsub.jaxpr.trace import Program

Dims = tuple[int, ...]
"""Dimensions of a value that make one axis, next to each other."""


def origins(eqns: Sequence[Any], variable: Any, dims: Dims) -> Iterator[tuple[Any, Dims]]:
    """Find the inputs of some equations, and the dimensions of theirs, that a value's dimensions come from."""
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    todo, seen = [(variable, dims)], set[Any]()
    while todo:
        here = todo.pop()
        if here in seen or not compat.is_var(here[0]):
            continue
        seen.add(here)
        if (eqn := makers.get(here[0])) is None:
            yield here
        else:
            todo += list(_operands(eqn, *here))[::-1]


def inputs_with_axis(
    eqns: Sequence[Any], inputs: Sequence[Any], variable: Any, dim: int, n_units: int
) -> Iterator[tuple[Any, Place]]:
    """Find the inputs of some equations, and their dimensions, that a value has an axis of so many units from."""
    for found, (first, *_) in origins(eqns, variable, (dim,)):
        if found in inputs and found.aval.shape[first] % n_units == 0:
            yield found, Place(first, found.aval.shape[first] // n_units)


def joining_inputs(axis: Axis, inputs: Sequence[Any], seed: tuple[Any, int]) -> Iterator[tuple[Any, int]]:
    """Dimensions of inputs that have an axis that ends in one sum, and that equations before the slices read.

    Those that values in slices come from, and the seed's dimension of others that are as long.
    """
    if not any(isinstance(place, Total) and v.aval.size == 1 for v, place in axis.places.items()):
        return
    read = {a for eqn in axis.before for a in eqn.invars if compat.is_var(a)}
    for cut, place in axis.cut:
        having = inputs_with_axis(axis.before, inputs, cut, place.dim, axis.length)
        yield from ((variable, there.dim) for variable, there in having if variable in read)
    first, dim = seed
    yield from (
        (v, dim) for v in inputs if v in read and v.aval.shape[dim : dim + 1] == first.aval.shape[dim : dim + 1]
    )


def slices_whole_values(steps: Iterable[Step]) -> bool:
    """Whether a slice takes its part of a whole value itself, in a body."""
    return any(step.eqn is None for step in _all(steps))


def split_otherwise(steps: Iterable[Step], split: Split = UNSPLIT) -> Any:
    """Find a constraint, or a type, that splits the axis of some steps in another way than the arguments do."""
    for step in (step for step in _all(steps) if step.eqn is not None):
        is_constraint = step.eqn.primitive.name == "sharding_constraint"
        for variable, place in zip(step.writes, step.outs, strict=True):
            if not isinstance(place, Place) or not (is_constraint or has_explicit_axes([variable])):
                continue
            spec = (step.eqn.params["sharding"] if is_constraint else variable.aval.sharding).spec
            names = spec[place.dim] if place.dim < len(spec) else None
            names = (names,) if isinstance(names, str) else names
            if names not in (None, PartitionSpec.UNCONSTRAINED, (), split.names):
                return step.eqn
    return None


def _all(steps: Iterable[Step], orders: int = CHECKED_ORDERS) -> Iterator[Step]:
    """Steps, those in their bodies, and those of their derivatives, up to some order."""
    for step in steps:
        yield step
        for body in step.bodies:
            yield from _all(body.steps, orders)
        for body in step.rule() if orders else ():
            yield from _all(body.steps, orders - 1)


def split_of(program: Program, variable: Any, dim: int) -> Split | None:
    """Over which devices an axis is split, by the arguments it comes from; `None` where that is not known.

    It is not known where the second of two joined dimensions is split, and where no argument has the axis.
    """
    if not program.is_sharded:
        return UNSPLIT
    inputs = {v: i for i, v in enumerate(program.invars)}
    found = [_split_of(program.shardings[inputs[v]], v.aval.shape, dims)
             for v, dims in origins(program.eqns, variable, (dim,)) if v in inputs and program.shardings]  # fmt: skip
    return None if not found or None in found else max((s for s in found if s), key=lambda s: s.parts)


def on_all_devices(program: Program, n_bytes: int) -> int:
    """Bytes of whole arrays that are split over devices, where each holds so many."""
    return int(n_bytes / data_share(program.avals(), program.shardings, program.differentiated))


def _split_of(sharding: Any, shape: Sequence[int], dims: Dims) -> Split | None:
    local = sharding.shard_shape(tuple(shape))
    parts = [shape[d] // local[d] for d in dims]
    if any(n > 1 for n in parts[1:]):
        return None
    if parts[0] == 1:
        return UNSPLIT
    names = sharding.spec[dims[0]]
    return Split(tuple(sharding.mesh.shape.items()), (names,) if isinstance(names, str) else tuple(names))


def _operands(eqn: Any, variable: Any, dims: Dims) -> Iterator[tuple[Any, Dims]]:
    """Operands of an equation from which dimensions of a result come."""
    number, name = list(eqn.outvars).index(variable), eqn.primitive.name
    if name in ("scan", "while"):
        first, n_carry = _carry(eqn)
        if number < n_carry:
            yield eqn.invars[first + number], dims
    elif name == "reshape":
        old, new = eqn.invars[0].aval.shape, variable.aval.shape
        yield from ((eqn.invars[0], joined) for joined in _reshaped(old, new, dims))
    elif name == "slice":
        yield eqn.invars[0], dims
    elif rule_of(eqn) is not None:
        for atom in (a for a in eqn.invars if compat.is_var(a)):
            places = [_dimension(eqn, number, atom, Place(dim)) for dim in dims]
            if None not in places:
                yield atom, tuple(d for d in places if d is not None)
    else:
        for body in map(compat.open_jaxpr, bodies_of(eqn)):
            more = int(name == "cond")  # its index
            if len(eqn.invars) == more + len(body.invars) and len(body.outvars) == len(eqn.outvars):
                for inner, found in origins(body.eqns, body.outvars[number], dims):
                    if inner in body.invars:
                        yield eqn.invars[more + body.invars.index(inner)], found


def _carry(eqn: Any) -> tuple[int, int]:
    """Where the carry stands among the operands of a loop, and how many values it has."""
    if eqn.primitive.name == "scan":
        return compat.scan_sizes(eqn)
    first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return first, len(eqn.invars) - first


def _dimension(eqn: Any, number: int, atom: Any, wanted: Place) -> int | None:
    """The dimension of an operand that an equation's rule carries to a dimension of a result."""
    rule, n = rule_of(eqn), eqn.outvars[number].aval.shape[wanted.dim]
    for dim, size in enumerate(atom.aval.shape):
        if size == n and rule is not None:
            try:
                _, outs = rule(eqn, [Place(dim) if a is atom else None for a in eqn.invars], n)
            except (NoRule, Coarser):
                continue
            if outs[number] == wanted:
                return dim
    return None


def _reshaped(old: Sequence[int], new: Sequence[int], dims: Dims) -> Iterator[Dims]:
    """Dimensions before a reshape that become these: the same elements, or the one whose leading part they are."""
    before, size = math.prod(new[: dims[0]]), math.prod(new[d] for d in dims)
    for start in range(len(old)):
        if math.prod(old[:start]) == before and old[start] > 1:
            ends = [stop for stop in range(start + 1, len(old) + 1) if math.prod(old[start:stop]) == size]
            if ends or old[start] % size == 0:
                yield tuple(range(start, ends[0])) if ends else (start,)
