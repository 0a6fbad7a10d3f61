"""Which runs of a program to execute in slices, along which axis, in how many.

Around each of the widest values, of the program and of the bodies of its loops and conditionals, a run is looked for:
from where little is alive in front of its producer to where little is alive behind its last use, to the end of the
program if that is the loss. Of all axes that are independent through the run the one that most of what it makes carries
is taken. The number of slices is the least power of two that leaves the run a small share of
the budget, and no more than leaves its products `least_rows` rows (`jaxsub.jaxpr.product_rows`,
`jaxsub.costs.slice_time`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

from jaxsub.core.checks import is_whole
from jaxsub.core.decisions import Slices
from jaxsub.core.errors import JaxsubError
from jaxsub.core.tuning import TUNING
from jaxsub.costs.fusible import LOOPS
from jaxsub.costs.roofline import count_kernels
from jaxsub.costs.slice_time import TILE_ROWS, SliceTime, least_rows, product_dtype, slice_time
from jaxsub.devices.targets import Target
from jaxsub.emission.bodies import bodies_of_node, program_within
from jaxsub.emission.chunks import makes_gradient
from jaxsub.emission.folding import auxiliary_of, run_of, still_of
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axes import follow
from jaxsub.jaxpr.axis import Axis, NotIndependent
from jaxsub.jaxpr.axis_origin import on_all_devices, slices_whole_values, split_of, split_otherwise
from jaxsub.jaxpr.axis_places import Place
from jaxsub.jaxpr.product_rows import rows_of
from jaxsub.jaxpr.trace import Program, aval_bytes, remembered
from jaxsub.partition.cuts import live_bytes
from jaxsub.partition.inner_programs import find_nested, made_bytes
from jaxsub.partition.traced_run import trace_run
from jaxsub.search.found_run import Found, bytes_made, kept_whole
from jaxsub.search.run_spans import spans
from jaxsub.search.slice_seeds import batch_seeds, seeds_of_run, seeds_round_value, sources

Chunks = str | bool | Mapping[Any, int]
"""What a user may ask for: `"auto"`, yes, no, or counts by named scope or by dimension of the batch."""


class ChunksError(JaxsubError, ValueError):
    """What `chunks=` asks for cannot be done."""


Refusals = list[tuple[str, int, NotIndependent]]
"""Wide values that no run may be made of: what they are called, their bytes, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class RunsFound:
    """The runs of a program that may be executed in slices for a budget.

    Attributes:
        program: The program.
        n_bytes: The budget, of all devices.
        least: Rows that keep the target busy.
        time: What each slice costs.
        runs: Runs round its widest values, and in the bodies of its loops and conditionals.
        batch: The whole function along its batch, or why not; `None` where it is no loss or has no batch.
        refused: Wide values that no run may be made of.
        is_last: Whether nothing else fits: then slices may have any number of rows.
    """

    program: Program
    n_bytes: int
    least: int
    time: SliceTime
    runs: list[Found]
    batch: Found | NotIndependent | None
    refused: Refusals
    is_last: bool = False

    def sets(self) -> Iterator[tuple[Slices, ...]]:
        """Sets of runs to execute in slices, those first that recompute nothing.

        The loss head, and whatever else is summed up to a scalar; the whole function along its batch; the head and the
        widest run in the body of a loop or conditional; all such runs; runs elsewhere too. Then the same in as many
        slices as their products allow: of as many rows as keep the target busy, and of a tile's. As a last resort rows
        may be few: in as many slices as the budget asks for, and in as many as there are rows.
        """
        whole = [self.batch] if isinstance(self.batch, Found) else []
        heads = [run for run in self.runs if run.is_head or (not run.within and run.has_gradient())]
        loops = sorted((run for run in self.runs if run.within), key=lambda run: -run.carried_bytes)
        usual = (self.n_bytes, self.least), (1, self.least), (1, min(self.least, TILE_ROWS))
        told: dict[tuple[Slices, ...], None] = {}
        further = [_joined(self.program, self.runs, self.n_bytes)] if self.is_last else []
        for asked_bytes, rows in ((self.n_bytes, 1), (1, 1)) if self.is_last else usual:
            for runs in (heads, whole, [*heads, *loops[:1]], [*heads, *loops], self.runs, *further):
                counts = [run.count(asked_bytes, rows) for run in runs]
                pairs = zip(runs, counts, strict=True)
                chosen = [run.slices(self.program, n, self.time) for run, n in pairs if n > 1]
                told[tuple(sorted(chosen, key=lambda s: (s.within, s.start)))] = None
        yield from (runs for runs in told if runs)

    def kept_whole(self) -> int:
        """The most that a run makes of another batch."""
        runs = [*self.runs, self.batch] if isinstance(self.batch, Found) else self.runs
        return max((kept_whole(program_within(self.program, run.within), run.axis) for run in runs), default=0)

    def as_last(self) -> RunsFound:
        """The same runs where nothing else fits."""
        return replace(self, is_last=True)


def find_runs(program: Program, target: Target, n_bytes: int, is_last: bool = False) -> RunsFound:
    """Find the runs of a program that may be executed in slices.

    Args:
        program: The program.
        target: What it is planned for.
        n_bytes: The budget, of one device.
        is_last: Whether nothing else fits: then values of any size are looked at, and little is kept whole.
    """
    n_bytes, dtype = on_all_devices(program, n_bytes), product_dtype(program)
    least = least_rows(target, dtype)
    narrowest = 0 if is_last else TUNING.least_sliced_bytes
    most_kept = int(TUNING.wide_share * n_bytes) if is_last else n_bytes
    runs, refused = _everywhere(program, n_bytes, least, narrowest, most_kept)
    batch = batch_run(program, most_kept, narrowest)
    if isinstance(batch, Found):
        runs = [batch if run.is_same(batch) else run for run in runs]
    time = slice_time(program, target, dtype)
    return RunsFound(program, n_bytes, least, time, runs, batch, refused, is_last)


def _everywhere(
    program: Program, n_bytes: int, least: int, narrowest: int, most_kept: int
) -> tuple[list[Found], Refusals]:
    """Runs round the widest values of a program and of the bodies of its loops and conditionals."""
    found: list[Found] = []
    refused: Refusals = []
    places = [((), program)] if program.is_sharded else _places(program)
    for within, part in places:
        weight = _weight(program, within)
        runs, reasons = _wide_runs(part, n_bytes, least, narrowest, most_kept)
        found += [replace(run, within=within, weight=weight) for run in runs]
        refused += reasons
    alone = [run for run in found if not run.within]
    runs = [run for run in found if not any(run.within and a.start <= run.within[0][0] < a.stop for a in alone)]
    return runs, refused


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
    if not is_whole(count) or count < 2:
        raise ChunksError(f"chunks={{{key!r}: {count!r}}}: the number of slices must be an int of at least 2.")
    key, count, n = int(key) if is_whole(key) else str(key), int(count), len(program.eqns)
    within, part, (start, stop) = ((), program, (0, n)) if isinstance(key, int) else _named(program, key)
    widest = max(sum(part.graph.values[v].n_bytes for v in n.outputs) for n in part.graph.nodes[start:stop])
    is_last = part.loss is not None and not any(node.is_costly for node in part.graph.nodes[stop:])
    seeds, axes, refused = list[tuple[int, int]](), list[Found](), list[NotIndependent]()
    for end in dict.fromkeys((n, stop) if is_last else (stop,)):  # up to the loss no slice is recomputed
        seeds = batch_seeds(program, key) if isinstance(key, int) else seeds_of_run(part, start, end)
        axes, refused = _follow_all(part, start, end, seeds)
        found = max((f for f in axes if 2 * f.carried_bytes > widest), key=lambda f: f.carried_bytes, default=None)
        if found is not None:
            break
    else:
        if isinstance(key, int) and not seeds:
            raise ChunksError(_no_dimension(program, key))
        refused += [why for axis in axes for why in _ended(part, axis)]
        raise ChunksError(_refusal(key, refused, program.is_sharded))
    if found.axis.length < count:
        raise ChunksError(f"chunks={{{key!r}: {count}}}: the axis has no more than {found.axis.length} units.")
    if found.split.parts > 1 and found.axis.length // found.split.parts % count:
        raise ChunksError(
            f"chunks={{{key!r}: {count}}}: the axis is split over {found.split.parts} devices, and the number of "
            f"slices must divide the {found.axis.length // found.split.parts} units that each of them holds."
        )
    return replace(found, within=within, weight=_weight(program, within)).slices(program, count)


def _no_dimension(program: Program, dim: int) -> str:
    given = (v for v in range(len(program.invars)) if v not in program.differentiated)
    there = ", ".join(f"`{program.graph.values[v].name}` {program.invars[v].aval.str_short()}" for v in given)
    return (
        f"chunks= names dimension {dim} of the batch, but no argument that is read and not differentiated has it, with "
        f"more than one element (found {there or 'none'}). Name another dimension, or leave it out."
    )


def _ended(program: Program, found: Found) -> Iterator[NotIndependent]:
    """Why little of what a run makes has an axis: equations that read it and do not return it."""
    along = {v for v, place in found.axis.places.items() if isinstance(place, Place)}
    along.add(program.variable(found.value))
    for eqn in program.eqns[found.start : found.stop]:
        if not along.isdisjoint(filter(compat.is_var, eqn.invars)) and along.isdisjoint(eqn.outvars):
            yield NotIndependent(eqn, "the axis ends there, and most of the memory is behind it")


def _refusal(key: Any, refused: Sequence[NotIndependent], is_sharded: bool) -> str:
    told = f"chunks= names {f'dimension {key} of the batch' if isinstance(key, int) else f'{key!r}'}, "
    if not refused:
        why = "has an axis of more than one element"
        if is_sharded:
            why = "can be sliced on its mesh: it is in a loop's body, or read whole in one"
        return f"{told}but no value there {why}. Leave it out."
    return f"{told}which is not independent. {refused[0]}. Name another axis, or leave it out."


def _named(program: Program, name: Any) -> tuple[tuple[tuple[int, int], ...], Program, tuple[int, int]]:
    """Find the run of equations in a named scope, or in a function of that name, and the body that contains it."""
    places = list(_places(program))
    for within, part in places:
        nodes = part.graph.nodes
        at = [node.index for node in nodes if name in node.scope.split("/") or f"({name})" in node.source]
        at = [i for i in at if nodes[i].primitive not in LOOPS] or at  # of a loop its body is meant
        if at:
            return within, part, (at[0], at[-1] + 1)
    scopes = sorted({word for _, part in places for node in part.graph.nodes for word in node.scope.split("/") if word})
    raise ChunksError(
        f"chunks= names {name!r}, but no equation is in a named scope or function of that name. Scopes are "
        f"{', '.join(map(repr, scopes[:8])) or 'none'}. Put jax.named_scope({name!r}) round the equations."
    )


def _places(program: Program, within: tuple[tuple[int, int], ...] = ()) -> Iterator[tuple[Any, Program]]:
    """A program, and the bodies of its loops and conditionals, by where they stand."""
    yield within, program
    for node in find_nested(program):
        for number, body in enumerate(bodies_of_node(program, node)):
            yield from _places(body, (*within, (node, number)))


def _weight(program: Program, within: Sequence[tuple[int, int]]) -> float:
    """FLOPs of the loops around a body for each of its own."""
    weight = 1.0
    for node, number in within:
        body = bodies_of_node(program, node)[number]
        weight *= program.graph.nodes[node].flops / max(sum(inner.flops for inner in body.graph.nodes), 1.0)
        program = body
    return weight


def _label(program: Program, start: int, stop: int) -> str:
    """What a run is called: the whole function, or most of it, if that is a loss, or by the scope of its widest value.

    `jax.numpy.einsum` has a scope of its own, which says less than that round it; without a scope a line is named.
    """
    nodes, n_all = program.graph.nodes[start:stop], len(program.graph.nodes)
    if len(nodes) == n_all and program.loss is not None:
        return "whole function"
    widest = max(nodes, key=lambda node: sum(program.graph.values[v].n_bytes for v in node.outputs))
    if scopes := [scope for scope in widest.scope.split("/") if scope and "->" not in scope]:
        n_inside = sum(scopes[-1] in node.scope.split("/") for node in nodes)
        is_part = 2 * n_inside < len(nodes) and 2 * len(nodes) > n_all and program.loss is not None
        return "most of the function" if is_part else scopes[-1]
    kind = "head" if stop == len(program.graph.nodes) and program.loss is not None else "run"
    return f"{kind} at {widest.source}" if widest.source else kind


def _wide_runs(
    program: Program, n_bytes: int, least: int, narrowest: int, most_kept: int
) -> tuple[list[Found], Refusals]:
    """Disjoint runs round the widest values, each with its best axis; alike runs all of them.

    Most of what a run makes is along its axis. What it makes of another batch is kept whole: where that is more than is
    to be kept, each batch has a run of its own.
    """
    graph = program.graph
    live, last = live_bytes(graph, from_first_use=True), graph.last_uses()
    wide = max(narrowest, min(TUNING.peak_share * int(live.max(initial=1)), TUNING.wide_share * n_bytes))
    made = [v for v in graph.values if v.producer is not None and v.n_bytes > TUNING.narrow_share * wide]
    before = list(accumulate(map(made_bytes, program.eqns), initial=0))
    sizes = sorted({v.n_bytes for v in made}, reverse=True)[: TUNING.wide_values]
    found: list[Found] = []
    refused: Refusals = []
    for value in sorted(made, key=lambda v: (-v.n_bytes, v.index)):
        producer, stop = value.producer or 0, min(last[value.index] + 1, len(graph.nodes))
        if value.n_bytes not in sizes or any(f.start < stop and producer < f.stop for f in found):
            continue
        if live[producer : stop + 1].max() <= wide or graph.nodes[producer].primitive in LOOPS:
            continue
        reasons: list[NotIndependent] = []
        best: Found | None = None
        for run in spans(program, live, value, stop):
            if any(f.start < run[1] and run[0] < f.stop for f in found):
                continue
            axes, reasons = _follow_all(program, run[0], run[1], seeds_round_value(program, *run, value))
            half = (before[run[1]] - before[run[0]]) // 2
            axes = [a for a in axes if 2 * a.carried_bytes > value.n_bytes and bytes_made(a.axis.steps) > half
                    and kept_whole(program, a.axis) <= most_kept]  # fmt: skip
            best = max((*filter(None, [best]), *axes), key=partial(_rank, least=least), default=None)
            if best is not None and (best.has_gradient() or not best.is_head):
                break
        if best is not None:
            found.append(best)
        else:
            refused += [(_label(program, producer, stop), value.n_bytes, why) for why in reasons[:1]]
    return found, refused


def _rank(found: Found, least: int) -> tuple[int, int]:
    """Many slices first, then those that carry most."""
    return min(found.rows // least, found.axis.length, TUNING.many_slices), found.carried_bytes


def _joined(program: Program, runs: Sequence[Found], n_bytes: int) -> list[Found]:
    """Runs behind one another as one, where the axis of the first goes through all: nothing between them is whole.

    That needs least: a tower of layers, say, in front of a loss that compares examples.
    """
    found: list[Found] = []
    for run in sorted(runs, key=lambda run: (run.within, run.start)):
        before = found[-1] if found and found[-1].within == run.within else None
        part = program_within(program, run.within)
        axes = _follow_all(part, before.start, run.stop, [(before.value, before.dim)])[0] if before else []
        carried = before.carried_bytes + run.carried_bytes if before else 0
        axes = [axis for axis in axes if axis.carried_bytes >= carried and kept_whole(part, axis.axis) <= n_bytes]
        found[-1 if axes else len(found) :] = [replace(axes[0], within=run.within, weight=run.weight) if axes else run]
    return found


def _makes_gradient(program: Program, start: int, stop: int, axis: Axis) -> bool:
    returns = run_of(program, start, stop)[2]
    return makes_gradient(axis, returns, _with_gradients(program), auxiliary_of(program, start, stop))


@remembered
def _with_gradients(program: Program) -> frozenset[Any]:
    return frozenset(program.variable(v.index) for v in program.graph.values if v.is_differentiated)


def batch_run(program: Program, most_kept: int,
              narrowest: int = TUNING.least_sliced_bytes) -> Found | NotIndependent | None:  # fmt: skip
    """The whole function along its batch, where that is independent throughout and ends in one scalar sum, or why not.

    Most of what it makes has to be along the batch: with a total over it in every layer the loss alone would be sliced.
    What it makes of another batch may be no more than is to be kept whole.

    The batch is that argument, not differentiated, from which a dimension of the widest value comes; state of a model
    may stand before it. Else it is the first dimension of one, or the second, behind time. `None` where it is no loss,
    or has no batch.
    """
    if program.loss is None:
        return None
    widest = max(program.graph.values, key=lambda v: (v.producer is not None, v.n_bytes))
    inputs = {v: i for i, v in enumerate(program.invars) if i not in program.differentiated}
    seeds = sources(program.eqns, program.variable(widest.index), inputs)
    first: NotIndependent | None = None
    half = sum(map(made_bytes, program.eqns)) // 2
    for tried in ([*seeds, *batch_seeds(program, 0)[:2]], batch_seeds(program, 1)[:2]):
        found, refused = _follow_all(program, 0, len(program.eqns), tried)
        wide = [run for run in found
                if bytes_made(run.axis.steps) > max(half, narrowest * run.split.parts)
                and kept_whole(program, run.axis) <= most_kept]  # fmt: skip
        if wide:
            return max(wide, key=lambda f: f.carried_bytes)
        first = first or next(iter(refused), None)
    return first


def _follow_all(
    program: Program, start: int, stop: int, seeds: Sequence[tuple[int, int]]
) -> tuple[list[Found], list[NotIndependent]]:
    eqns, reads, returns = run_of(program, start, stop)
    still = still_of(program, start, stop)
    found: dict[Any, Found] = {}
    refused: list[NotIndependent] = []
    for value, dim in seeds:
        variable = program.variable(value)
        if any((variable, dim) in cut for cut in found):
            continue
        try:
            axis = follow(eqns, reads, returns, variable, dim % len(variable.aval.shape), still)
        except NotIndependent as why:
            refused.append(why)
            continue
        split = split_of(program, variable, dim % len(variable.aval.shape))
        if split is None or (split.parts > 1 and (axis.length % split.parts or slices_whole_values(axis.steps))):
            continue
        if (eqn := split_otherwise(axis.steps, split)) is not None:
            refused.append(NotIndependent(eqn, "it splits the axis over other devices than the arguments are"))
            continue
        carried = sum(aval_bytes(v.aval) for v, place in axis.places.items() if isinstance(place, Place))
        cut = frozenset((v, place.dim) for v, place in axis.cut)
        run, n_kernels = partial(trace_run, program, start, stop), cache(partial(count_kernels, eqns, reads, returns))
        has_gradient = cache(partial(_makes_gradient, program, start, stop, axis))
        is_head = program.loss is not None and stop == len(program.eqns)
        found[cut] = Found(start, stop, value, dim % len(variable.aval.shape), axis, carried, rows_of(axis), run,
                           n_kernels, _label(program, start, stop), is_head, has_gradient, split=split)  # fmt: skip
    return list(found.values()), refused
