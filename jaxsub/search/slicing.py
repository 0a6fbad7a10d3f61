"""Which runs of a program to execute in slices, along which axis, in how many.

Around each of the widest values a run is looked for: from the cut in front of its producer to the cut behind its last
use, to the end of the program if that is the loss. Of all axes that are independent through the run the one that most
of what it makes carries is taken. The number of slices is the least power of two that leaves the run a small share of
the budget, and no more than leaves every product in it `least_rows` rows.

**Rows.** A slice reads each weight twice and its running gradient twice again, in float32: with 2-byte weights 12
bytes for 6 FLOPs a row. As many rows as keep the target's arithmetic busy meanwhile are needed, rounded up to a power
of two: 1,024 on an H100 in bfloat16, and fewer on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxsub.core.decisions import Slices
from jaxsub.core.errors import JaxsubError
from jaxsub.devices.targets import Target
from jaxsub.emission.folding import run_of, variable_of
from jaxsub.jaxpr.axes import Axis, NotIndependent, follow
from jaxsub.jaxpr.axis_bodies import Step
from jaxsub.jaxpr.axis_rules import Place
from jaxsub.jaxpr.trace import Program, aval_bytes
from jaxsub.partition.cuts import find_cuts, live_bytes

Chunks = str | bool | Mapping[Any, int]
"""What a user may ask for: `"auto"`, yes, no, or counts by named scope or by dimension of the batch."""

FEW_VALUES = 6
"""How many of the widest values are looked at."""

WIDE_SHARE = 1 / 8
"""A run is worth slicing whose values that carry the axis are more than this share of what the program makes at once,
and it is sliced until they are this share of the budget."""


LEAST_BYTES = 2**20
"""For less than a mebibyte nobody needs slices."""

MORE = 4
"""Where a run in slices does not meet a budget so many times more are tried."""


class ChunksError(JaxsubError, ValueError):
    """What `chunks=` asks for cannot be done."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """An axis of a run, and what slices of it would spare."""

    start: int
    stop: int
    value: int
    dim: int
    axis: Axis
    carried_bytes: int
    rows: int

    def slices(self, program: Program, count: int) -> Slices:
        """The run in slices."""
        spared = self.carried_bytes - self.carried_bytes // count
        label, nodes = _label(program, self.start, self.stop), program.graph.nodes
        again = sum(node.flops for node in nodes[self.start : self.stop]) if self.stop < len(nodes) else 0.0
        return Slices(self.start, self.stop, self.value, self.dim, count, self.axis.length, label, spared,
                      again / max(sum(node.flops for node in nodes), 1.0))  # fmt: skip


def least_rows(target: Target) -> int:
    """Rows of a product below which slices cost time; see the module.

    Example:
        >>> from jaxsub.devices.targets import get_target
        >>> least_rows(get_target("h100"))
        1024
    """
    dtype = "float32" if target.platform == "cpu" else "bfloat16"
    weight_bytes = 4 if dtype == "float32" else 2
    rows = target.rate(dtype, is_matmul=True) / target.bytes_per_second * (2 * weight_bytes + 8) / 6
    return int(2 ** math.ceil(math.log2(rows)))


def candidates(program: Program, target: Target, n_bytes: int) -> Iterator[tuple[Slices, ...]]:
    """Sets of runs that may be executed in slices, those first that recompute nothing.

    Args:
        program: The program.
        target: What it is planned for.
        n_bytes: The budget.
    """
    if program.is_spread:
        return
    n, least = len(program.eqns), least_rows(target)
    runs = [run for run in _wide_runs(program, n_bytes) if run.carried_bytes > LEAST_BYTES]
    heads = [run for run in runs if run.stop == n and program.loss is not None][:1]
    batch = _batch_run(program)
    whole = [batch] if batch is not None and batch.carried_bytes > LEAST_BYTES else []
    for run in (*heads, *whole):
        fewest, most = _count(run, n_bytes, least), min(run.rows // least, run.axis.length)
        counts = dict.fromkeys((fewest, min(MORE * fewest, most)))
        yield from ((run.slices(program, count),) for count in counts if count > 1)
    counted = [(run, _count(run, n_bytes, least)) for run in (*heads, *(run for run in runs if run.stop < n))]
    chosen = [run.slices(program, count) for run, count in counted if count > 1]
    if any(s.stop < n for s in chosen):
        yield tuple(sorted(chosen, key=lambda s: s.start))


def asked(program: Program, chunks: Mapping[Any, int]) -> tuple[Slices, ...]:
    """What a user asks for by name or axis.

    Args:
        program: The program.
        chunks: Counts, by the name of a `jax.named_scope` round a run, or by a dimension of the arguments that are not
            differentiated: the whole function in slices of the batch.

    Raises:
        ChunksError: If a name is not found, a count is no number above one, or an axis is not independent; says which
            equation forbids it.
    """
    return tuple(sorted((_asked(program, key, count) for key, count in chunks.items()), key=lambda s: s.start))


def _asked(program: Program, key: Any, count: int) -> Slices:
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise ChunksError(f"chunks={{{key!r}: {count!r}}}: the number of slices must be an int of at least 2.")
    n = len(program.eqns)
    start, stop = (0, n) if isinstance(key, int) else _named_run(program, key)
    seeds = _batch_seeds(program, key) if isinstance(key, int) else _seeds(program, start, stop)
    found, refused = _follow_all(program, start, stop, seeds)
    widest = max(sum(program.graph.values[v].n_bytes for v in n.outputs) for n in program.graph.nodes[start:stop])
    found = [f for f in found if 2 * f.carried_bytes > widest]
    if not found:
        raise ChunksError(_refusal(key, refused))
    best = max(found, key=lambda f: f.carried_bytes)
    if best.axis.length < count:
        raise ChunksError(f"chunks={{{key!r}: {count}}}: the axis has no more than {best.axis.length} units.")
    return best.slices(program, count)


def _refusal(key: Any, refused: Sequence[NotIndependent]) -> str:
    told = f"chunks= names {f'dimension {key} of the batch' if isinstance(key, int) else f'{key!r}'}, "
    if not refused:
        return f"{told}but no value there has an axis of more than one element. Leave it out."
    return f"{told}which is not independent. {refused[0]}. Name another axis, or leave it out."


def _named_run(program: Program, name: Any) -> tuple[int, int]:
    """The run of equations in a named scope, or in a function of that name."""
    nodes = program.graph.nodes
    at = [node.index for node in nodes if name in node.scope.split("/") or f"({name})" in node.source]
    if not at:
        scopes = sorted({part for node in nodes for part in node.scope.split("/") if part})
        raise ChunksError(
            f"chunks= names {name!r}, but no equation stands in a named scope or function of that name. Scopes are "
            f"{', '.join(map(repr, scopes[:8])) or 'none'}. Put jax.named_scope({name!r}) round the equations."
        )
    return at[0], at[-1] + 1


def _label(program: Program, start: int, stop: int) -> str:
    """What a run is called: the whole function, or the scope or the line of its widest value."""
    nodes = program.graph.nodes[start:stop]
    if stop - start == len(program.graph.nodes):
        return "whole function"
    widest = max(nodes, key=lambda node: sum(program.graph.values[v].n_bytes for v in node.outputs))
    if widest.scope:
        return widest.scope.split("/")[-1]
    kind = "head" if stop == len(program.graph.nodes) else "run"
    return f"{kind} at {widest.source}" if widest.source else kind


def _wide_runs(program: Program, n_bytes: int) -> list[Found]:
    """Disjoint runs round the widest values, each with its best axis; alike runs all of them."""
    graph, n = program.graph, len(program.eqns)
    cuts, last = find_cuts(graph), graph.last_uses()
    most = int(live_bytes(graph).max(initial=1))
    made = [v for v in graph.values if v.producer is not None and v.n_bytes > WIDE_SHARE * min(most, n_bytes)]
    sizes = sorted({v.n_bytes for v in made}, reverse=True)[:FEW_VALUES]
    found: list[Found] = []
    for value in sorted(made, key=lambda v: (-v.n_bytes, v.index)):
        producer, stop = value.producer or 0, min(last[value.index] + 1, n)
        if value.n_bytes not in sizes or any(f.start < stop and producer < f.stop for f in found):
            continue
        a, b = max(c for c in cuts if c <= producer), min(c for c in cuts if c >= stop)
        wider = ((a, n), (producer, n)) if b == n else ()
        for run in dict.fromkeys((*wider, (a, b), (producer, stop))):
            if any(f.start < run[1] and run[0] < f.stop for f in found):
                continue
            axes, _ = _follow_all(program, run[0], run[1], _seeds(program, *run))
            axes = [axis for axis in axes if 2 * axis.carried_bytes > value.n_bytes]
            if axes:
                found.append(max(axes, key=lambda axis: axis.carried_bytes))
                break
    return found


def _count(found: Found, n_bytes: int, least: int) -> int:
    """In how many slices a run is executed: as few as leave it a small share of the budget, in large products."""
    share = WIDE_SHARE if found.start else 1 / 2  # the whole function leaves nothing but its slices
    needed = found.carried_bytes / max(1.0, share * n_bytes)
    wanted = int(2 ** math.ceil(math.log2(max(2.0, needed))))
    return min(wanted, found.rows // least, found.axis.length)


def _seeds(program: Program, start: int, stop: int) -> list[tuple[int, int]]:
    """Dimensions of what a run reads: of activations first, then of weights."""
    graph = program.graph
    base = graph.first_value(start)
    reads = dict.fromkeys(v for node in graph.nodes[start:stop] for v in node.inputs if v < base)
    weights = graph.weights()
    order = sorted(reads, key=lambda v: (v in weights, -graph.values[v].n_bytes))
    return [(v, d) for v in order for d, size in enumerate(graph.values[v].shape) if size > 1]


def _batch_seeds(program: Program, dim: int) -> list[tuple[int, int]]:
    """A dimension of the arguments that are not differentiated."""
    given = [v for v in range(len(program.invars)) if v not in program.differentiated]
    shapes = [(v, program.graph.values[v].shape) for v in given if program.graph.values[v].consumers]
    return [(v, dim) for v, shape in shapes if -len(shape) <= dim < len(shape) and shape[dim] > 1]


def _batch_run(program: Program) -> Found | None:
    """The whole function along its batch, where that is independent throughout and ends in one scalar sum."""
    if program.loss is None:
        return None
    found, _ = _follow_all(program, 0, len(program.eqns), _batch_seeds(program, 0)[:2])
    return max(found, key=lambda f: f.carried_bytes, default=None)


def _follow_all(
    program: Program, start: int, stop: int, seeds: Sequence[tuple[int, int]]
) -> tuple[list[Found], list[NotIndependent]]:
    eqns, reads, returns = run_of(program, start, stop)
    found: dict[Any, Found] = {}
    refused: list[NotIndependent] = []
    for value, dim in seeds:
        variable = variable_of(program, value)
        if any((variable, dim) in cut for cut in found):
            continue
        try:
            axis = follow(eqns, reads, returns, variable, dim % len(variable.aval.shape))
        except NotIndependent as why:
            refused.append(why)
            continue
        carried = sum(aval_bytes(v.aval) for v, place in axis.places.items() if isinstance(place, Place))
        cut = frozenset((v, place.dim) for v, place in axis.cut)
        found[cut] = Found(start, stop, value, dim % len(variable.aval.shape), axis, carried, _rows(axis))
    return list(found.values()), refused


def _rows(axis: Axis) -> int:
    """Rows of the smallest product or convolution along the axis; elements of its largest value where there is none."""
    found = [rows for step in axis.steps if step.eqn is not None for rows in _product_rows(step)]
    sizes = [v.aval.size for v, place in axis.places.items() if isinstance(place, Place)]
    return min(found, default=max(sizes, default=axis.length))


def _product_rows(step: Step) -> Iterator[int]:
    params = step.eqn.params
    for side, (atom, need) in enumerate(zip(step.reads, step.needs, strict=True)):
        if need is None:
            continue
        shape = atom.aval.shape
        if step.eqn.primitive.name == "dot_general":
            contracted, batch = (dims[side] for dims in params["dimension_numbers"])
            if need.dim in contracted:
                yield shape[need.dim]
            elif need.dim not in batch:
                yield math.prod(size for d, size in enumerate(shape) if d not in contracted)
        if step.eqn.primitive.name == "conv_general_dilated":
            out, dims = step.writes[0].aval, params["dimension_numbers"]
            is_batch = side == 0 and need.dim == dims.lhs_spec[0]
            yield out.size // out.shape[dims.out_spec[1]] if is_batch else shape[need.dim]
