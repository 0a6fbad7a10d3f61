"""Say in words which runs of a program may be executed in slices: along which axis, and which equation ends them.

The runs are those that a search for a plan looks at (`jaxsub.search.slicing`). An axis is named by the argument that it
comes from (`jaxsub.jaxpr.axis_origin`). A run is ended by the first equation behind it through which the axis is not
independent; it may end earlier, where little is alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxsub.core.decisions import Slices
from jaxsub.core.tuning import TUNING
from jaxsub.costs.slice_time import TILE_ROWS
from jaxsub.devices.targets import Target
from jaxsub.emission.bodies import program_within
from jaxsub.emission.folding import run_of, still_of
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axes import follow
from jaxsub.jaxpr.axis import NotIndependent
from jaxsub.jaxpr.axis_origin import Dims, origins
from jaxsub.jaxpr.trace import Program
from jaxsub.search.found_run import Found
from jaxsub.search.slicing import find_runs


@dataclass(frozen=True, slots=True)
class Sliceable:
    """A run that may be executed in slices, or one that may not, and why.

    Attributes:
        label: What the run is called.
        n_bytes: Bytes of what it makes along the axis; of its widest value, where no axis is independent.
        length: How many units the axis has.
        count: In how many slices at most, so that products stay large; 0 where no axis is independent.
        axis: Which dimension of which argument the axis is; empty where it is not known.
        ended_by: The equation that ends the run, with its source line and the reason; empty at the end of the program.
        times: How many runs are alike.
    """

    label: str
    n_bytes: int
    length: int = 0
    count: int = 0
    axis: str = ""
    ended_by: str = ""
    times: int = 1


def sliceable(program: Program, target: Target, n_bytes: int) -> tuple[Sliceable, ...]:
    """List the runs that may be executed in slices for a budget, and the wide values that no run may be made of, last.

    The whole function is first, then the others by their bytes.
    """
    if n_bytes < TUNING.least_sliced_bytes:
        return ()
    found = find_runs(program, target, n_bytes)
    least, runs, batch, refused = min(found.least, TILE_ROWS), found.runs, found.batch, found.refused
    whole = [_told(program, batch, least)] if isinstance(batch, Found) else []
    if isinstance(batch, NotIndependent):
        refused = [("whole function along its batch", 0, batch), *refused]
    alike = Counter((f.label, f.within, f.axis.length, f.carried_bytes) for f in runs)
    firsts = {(f.label, f.within, f.axis.length, f.carried_bytes): f for f in reversed(runs)}
    told = [replace(_told(program, run, least), times=alike[key]) for key, run in firsts.items()]
    reasons = Counter(Sliceable(label, size, ended_by=str(why)) for label, size, why in refused)
    not_sliced = [replace(entry, times=n) for entry, n in reasons.items()]
    told = [entry for entry in told if replace(entry, n_bytes=0) not in [replace(w, n_bytes=0) for w in whole]]
    return (*whole, *sorted(told, key=lambda e: -e.n_bytes), *sorted(not_sliced, key=lambda e: -e.n_bytes))


def _told(program: Program, found: Found, least: int) -> Sliceable:
    axis = axis_words(program, found.within, found.value, found.dim)
    return Sliceable(found.label, found.carried_bytes, found.axis.length, found.largest_count(least), axis,
                     _end_of(program_within(program, found.within), found))  # fmt: skip


def _end_of(program: Program, found: Found) -> str:
    """The equation behind a run through which its axis is not independent."""
    n = len(program.eqns)
    eqns, reads, returns = run_of(program, found.start, n)
    try:
        follow(eqns, reads, returns, program.variable(found.value), found.dim, still_of(program, found.start, n))
    except NotIndependent as why:
        return str(why)
    return ""


def named(program: Program, runs: Sequence[Slices]) -> tuple[Slices, ...]:
    """Runs in slices with their axes in words."""
    return tuple(replace(run, axis=axis_words(program, run.within, run.value, run.dim)) for run in runs)


def axis_words(program: Program, within: Sequence[tuple[int, int]], value: int, dim: int) -> str:
    """Name the axis that a dimension of a value in a body (as in `Slices`) is, by the argument that it comes from."""
    found: list[tuple[Any, Dims]] = [(program_within(program, within).variable(value), (dim,))]
    for depth in range(len(within), -1, -1):
        part = program_within(program, within[:depth])
        found = [origin for var, dims in found for origin in origins(part.eqns, var, dims) if origin[0] in part.invars]
        if depth:
            outer = program_within(program, within[: depth - 1]).eqns[within[depth - 1][0]]
            found = list(_outside(outer, part, found))
    inputs = {v: i for i, v in enumerate(program.invars)}
    places = sorted((inputs[v] in program.differentiated, inputs[v], dims) for v, dims in found)
    names = ((program.graph.values[i].name or "const", dims) for _, i, dims in places)
    name, dims = next((origin for origin in names if origin[0] != "const"), ("", ()))
    numbers = " and ".join(map(str, dims))
    return f"ax{'e' if len(dims) > 1 else 'i'}s {numbers} of `{name}`" if name else ""


def _outside(eqn: Any, body: Program, found: Sequence[tuple[Any, Dims]]) -> Iterator[tuple[Any, Dims]]:
    """Inputs of the body of a loop or conditional, as operands of its equation."""
    first = len(eqn.invars) - (len(body.invars) - len(body.consts))
    stacked = sum(compat.scan_sizes(eqn)) if eqn.primitive.name == "scan" else len(eqn.invars)
    for variable, dims in found:
        number = list(body.invars).index(variable) - len(body.consts)
        if number >= 0:
            moved = number >= stacked
            yield eqn.invars[first + number], tuple(d + moved for d in dims)
