"""The optimizer's update inside the backward scan: a gradient stands for one layer at a time.

A step's gradient comes first, and its update after it: the gradients of all layers stand at once. Where a backward scan
stacks them, and all that reads the stack treats its layers one by one (the update of SGD, Adam and their like, casts,
weight decay), the update moves into the scan. Weights, moments and whatever else the update returns ride in the carry,
are read and written at the step's own layer, and so are updated in place. The mechanism is the independent axis of
`jaxsub.jaxpr.axes`, along the layers.

What needs all gradients before any update (a clip by their global norm, a check that all are finite) keeps them whole:
`Whole` names the equation. Sums over the layers that no update reads, such as a logged norm, are added up in the scan.

Updates of layers that are unrolled are ordered (`jaxsub.step.ordered_updates`) where XLA does not do so by itself.

Sources: Lv et al., *Full Parameter Fine-tuning for Large Language Models with Limited Resources* (LOMO), 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.core
import jax.extend.core
import jax.numpy as jnp

from jaxsub.emission.at_slice import At, Env, evaluate, read
from jaxsub.emission.chunks import first, flat, joined
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis import Axis, NotIndependent
from jaxsub.jaxpr.axis_places import Place
from jaxsub.jaxpr.new_equations import call_eqn
from jaxsub.jaxpr.trace import aval_bytes
from jaxsub.step.flat_step import FlatStep, Values, run_twice
from jaxsub.step.ordered_updates import Ordered, ordered

NEVER = 3


@dataclass(frozen=True, slots=True)
class Fused:
    """A backward scan that updates as it goes.

    Attributes:
        source: The user's line of the scan.
        steps: How many steps it has.
        gradient_bytes: What the gradients took that no longer stand whole.
        n_gradients: How many stacked gradients these are.
        copied_bytes: What is updated and was not donated: the scan updates a copy.
        twice: Why the backward scan runs twice, first for what needs all gradients; empty where it does not.
    """

    source: str
    steps: int
    gradient_bytes: int
    n_gradients: int
    copied_bytes: int
    twice: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """The bytes of gradients that stand whole, and which equation reads all of them, or that they are returned."""

    n_bytes: int
    reason: str


@dataclass(slots=True, eq=False)
class Findings:
    """What may become of a step's backward scans, and what became of them in the trace that came last.

    Attributes:
        passes: 2 where a backward scan whose gradients are all needed before any update may run twice.
        orders_at: How many passes there must be for updates outside of scans to be ordered by barriers.
        fused: Those that update as they go.
        whole: Gradients that stand whole.
        ordered: Updates that were ordered by barriers.
        can_more: Whether fewer gradients stand at once if `passes` is 2.
    """

    passes: int = 1
    orders_at: int = NEVER
    fused: tuple[Fused, ...] = ()
    whole: tuple[Whole, ...] = ()
    ordered: Ordered | None = None
    can_more: bool = False

    @classmethod
    def on(cls, platform: str, n_devices: int, passes: int = 1) -> Findings:
        """Before a trace for a device: a CPU's compiler orders updates itself; several devices lose overlap by it."""
        return cls(passes, NEVER if platform == "cpu" else 1 if n_devices == 1 else 2)


def with_fused_updates(
    fun: Callable[..., Any], donated: Callable[..., Sequence[bool]], findings: Findings | None = None
) -> Callable[..., Any]:
    """The same step, with every update that can be inside its backward scan, to be compiled with the same donations.

    `donated` says of each leaf of the step's arguments whether it is; `findings` says what may be done and is filled at
    each trace with what was. Where nothing can be fused it is the step as it was traced.
    """
    kept = Findings() if findings is None else findings

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
        call = fuse(closed, donated(*args, **kwargs), kept)
        outputs = call(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return run


def fuse(closed: Any, donated: Sequence[bool], findings: Findings) -> Callable[..., Values]:
    """A step's jaxpr as a function of its inputs, its updates inside its backward scans; `findings` says which."""
    step = FlatStep.of(closed, donated)
    fused: list[Fused] = []
    whole: dict[str, Whole] = {}
    findings.can_more = False
    for scan in [eqn for eqn in step.eqns if _is_stacking(eqn)]:
        if scan not in step.eqns:  # it carries another scan's axis, and went with it
            continue
        loose = step.unfenced(place := step.eqns.index(scan))
        found = _candidate(loose, place)
        if found.refused is not None and (pair := _twice(loose, scan, found.refused)) is not None:
            findings.can_more = True
            found = (_in_two_passes(*pair, scan, found.refused) if findings.passes > 1 else None) or found
        whole.update((w.reason, w) for w in found.whole)
        if found.scan is not None:
            fused.append(found.report())
            step = found.scan.fused()
    findings.fused, findings.whole = tuple(fused), (*whole.values(), *_accumulated(step))
    findings.ordered = None
    if findings.orders_at < NEVER:
        in_order, done = ordered(step)
        if findings.passes >= findings.orders_at:
            step, findings.ordered = in_order, done
        findings.can_more |= done is not None and findings.ordered is None
    is_new = bool(fused) or findings.ordered is not None
    call: Callable[..., Values] = step.run if is_new else jax.extend.core.jaxpr_as_fun(closed)
    return call


def _is_stacking(eqn: Any) -> bool:
    """Whether an equation is a scan of several steps that may stack gradients."""
    return eqn.primitive.name == "scan" and eqn.params["length"] > 1 and not eqn.effects


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What becomes of a scan: with the updates that can be inside it, which gradients stand whole, what forbade more.

    The first equation that needs a total over all gradients is `refused`; where they are made twice, it is `twice`.
    """

    scan: _FusedScan | None
    whole: tuple[Whole, ...] = ()
    refused: NotIndependent | None = None
    twice: NotIndependent | None = None

    def report(self) -> Fused:
        """What the scan spares."""
        assert self.scan is not None
        return replace(self.scan.report(), twice=_reason(self.twice) if self.twice is not None else "")


def _twice(step: FlatStep, scan: Any, refused: NotIndependent) -> tuple[FlatStep, Any] | None:
    place = step.eqns.index(scan)
    return run_twice(step, place, step.stacked(place), refused.totals)


def _in_two_passes(twice: FlatStep, second: Any, scan: Any, refused: NotIndependent) -> _Found | None:
    """What becomes of a scan that runs twice: for what needs all gradients, then for the updates."""
    summed = _candidate(twice, twice.eqns.index(scan), is_updated=False).scan
    if summed is None:
        return None
    twice = summed.fused()
    updated = _candidate(twice, twice.eqns.index(second))
    return replace(updated, twice=refused) if updated.scan is not None else None


def _candidate(step: FlatStep, place: int, *, is_updated: bool = True) -> _Found:
    """The scan at a place with the updates that can be inside it, if any can, or just sums over its gradients."""
    scan, behind = step.eqns[place], step.eqns[place + 1 :]
    seeds, whole, first = step.stacked(place), [], None
    while seeds:
        try:
            axis = step.follow(place, behind, seeds, step.results)
        except NotIndependent as refused:
            reads = step.made_of(place, refused.around.invars)
            lost = [v for v in seeds if v in reads] or seeds
            whole.append(Whole(sum(aval_bytes(v.aval) for v in lost), _reason(refused)))
            seeds = [v for v in seeds if v not in lost]
            first = first or (refused if refused.totals else None)
            continue
        wanted = _wanted(axis, seeds, step.results)
        lost = [v for v in seeds if v in wanted]
        is_whole = axis.length == scan.params["length"]
        if not is_whole or lost:  # what is returned, or read behind the updates, is stacked anyway
            seeds = [v for v in seeds if v not in lost] if is_whole else []
            continue
        found = _FusedScan(step, place, axis, seeds, wanted)
        if found.reads_whole:
            n_bytes = sum(aval_bytes(v.aval) for v in seeds)
            return _Found(None, (*whole, Whole(n_bytes, _in_blocks(scan))), first)
        return _Found(found if found.pairs or not is_updated else None, tuple(whole), first)
    return _Found(None, tuple(whole) if _is_gradient(step, place) else (), first)


def _reason(refused: NotIndependent) -> str:
    line = compat.source_of(refused.eqn)
    return f"`{refused.eqn.primitive.name}`{f' at {line}' if line else ''} needs all of them: {refused.reason}"


def _in_blocks(scan: Any) -> str:
    line = compat.source_of(scan, is_own=True)
    return f"`scan`{f' at {line}' if line else ''} runs in blocks, which read the weights of all layers"


def _is_gradient(step: FlatStep, place: int) -> bool:
    """Whether what a scan stacks may be gradients: of the shapes of what is donated."""
    shapes = {(v.aval.shape, v.aval.dtype) for v in step.donated}
    return any((v.aval.shape, v.aval.dtype) in shapes for v in step.stacked(place))


def _accumulated(step: FlatStep) -> Iterator[Whole]:
    """Gradients that a scan over micro-batches adds up in its carry: every update needs the sums."""
    shapes = {(v.aval.shape, v.aval.dtype) for v in step.donated if v.aval.ndim}
    for eqn in filter(_is_stacking, step.eqns):
        (n_consts, n_carry), body = compat.scan_sizes(eqn), compat.open_jaxpr(eqn.params["jaxpr"])
        adds = {v: e.invars for e in body.eqns if e.primitive.name in ("add", "add_any") for v in e.outvars}
        carried = zip(body.invars[n_consts:], body.outvars[:n_carry], eqn.outvars[:n_carry], strict=False)
        sums = [v for before, after, v in carried if before in adds.get(after, ()) and v not in step.results
                and (v.aval.shape, v.aval.dtype) in shapes]  # fmt: skip
        if sums:
            line = compat.source_of(eqn, is_own=True)
            reason = f"`scan`{f' at {line}' if line else ''} adds them up over {eqn.params['length']} steps"
            yield Whole(sum(aval_bytes(v.aval) for v in sums), f"{reason}, and every update needs the sums")


def _wanted(axis: Axis, seeds: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """What is read behind the scan of what is made in it; what it is given stands anyway."""
    read_later = dict.fromkeys(a for a in (*outputs, *(a for e in axis.after for a in e.invars)) if compat.is_var(a))
    return tuple(v for v in read_later if v in axis.places or v in seeds)


def _pairs(step: FlatStep, axis: Axis, wanted: Sequence[Any]) -> dict[Any, Any]:
    """Which input's memory each updated result is written into: the one that JAX has it lie in, where it is donated."""
    spots: dict[Any, list[Any]] = {}
    for v, spot in axis.cut:
        spots.setdefault(v, []).append(spot)
    # what is read in two ways, or returned as it is, is not written over
    free = [v for v in step.inputs if len(spots.get(v, ())) == 1 and v not in step.results]
    pairs: dict[Any, Any] = {}
    for is_donated, results in ((True, step.outputs), (False, wanted)):
        left = [v for v in free if (v in step.donated) == is_donated]
        for out in results:
            state = axis.places.get(out) if compat.is_var(out) else None
            alike = [v for v in left if spots[v] == [state] and (v.aval.shape, v.aval.dtype) ==
                     (out.aval.shape, out.aval.dtype)]  # fmt: skip
            if alike and out not in pairs:
                pairs[out] = alike[0]
                left.remove(alike[0])
    return pairs


class _FusedScan:
    """A step one of whose scans updates as it goes."""

    def __init__(self, step: FlatStep, place: int, axis: Axis, seeds: Sequence[Any], wanted: Sequence[Any]):
        self.step, self.axis, self.seeds = step, axis, tuple(seeds)
        self.before, self.eqn = step.eqns[:place], step.eqns[place]
        self.n_consts, self.n_carry = compat.scan_sizes(self.eqn)
        self.pairs = _pairs(step, axis, wanted)
        self.buffers = tuple(self.pairs.values())
        self.spots = {v: spot for v, spot in axis.places.items() if isinstance(spot, Place)}
        self.totals = tuple(v for v in wanted if v not in self.spots)
        self.stacks = tuple(v for v in wanted if v in self.spots and v not in self.pairs)
        self.rest = tuple(v for v in self.eqn.outvars[self.n_carry :] if v not in self.seeds)
        self.made = {*self.eqn.outvars, *(v for s in axis.steps for v in s.writes)}
        spots, origins = dict(axis.cut), step.origins(place)
        consts = filter(compat.is_var, self.eqn.invars[: self.n_consts])
        self.reads_whole = any(origins.get(a) in self.buffers for a in consts)
        """Whether each step reads all layers of what would be updated, as blocks of a loop do: XLA would copy it."""
        xs = [(a, origins.get(a)) for a in filter(compat.is_var, self.eqn.invars[self.n_consts + self.n_carry :])]
        self.lies_in = {a: (v, spots[v]) for a, v in xs if v is not None and v in self.buffers and spots[v] ==
                        Place(0, v.aval.shape[0] // a.aval.shape[0])}  # fmt: skip
        """Of stacked inputs that are updated in the scan: the buffer that each layer is read from, and where."""

    def report(self) -> Fused:
        """What it spares."""
        copied = sum(aval_bytes(v.aval) for v in self.buffers if v not in self.step.donated)
        sizes = [aval_bytes(v.aval) for v in self.seeds]
        return Fused(compat.source_of(self.eqn, is_own=True), self.eqn.params["length"], sum(sizes), len(sizes), copied)

    def fused(self) -> FlatStep:
        """The step with one equation in the place of the scan and of what moved into it: the new scan, traced."""
        known = (*(v for v, _ in self.axis.cut), *self.axis.reads, *self.buffers)
        variables = filter(compat.is_var, (*self.eqn.invars, *known))
        reads = [v for v in dict.fromkeys(variables) if v not in self.made and v not in self.lies_in] + [
            v for v in self.buffers if v in self.lies_in]  # fmt: skip
        writes = self.names()

        def with_updates(*args: Any) -> list[Any]:
            env: Env = {(v, None): x for v, x in zip(reads, args, strict=True)}
            self.scan(env)
            return [env[v, None] for v in writes]

        one = call_eqn(with_updates, [v.aval for v in reads]).replace(invars=reads, outvars=writes)
        return replace(self.step, eqns=(*self.before, *self.axis.before, one, *self.axis.after))

    def names(self) -> list[Any]:
        """What the new scan makes."""
        return [*self.eqn.outvars[: self.n_carry], *self.rest, *self.pairs, *self.totals, *self.stacks]

    def scan(self, env: Env) -> None:
        """Run the scan, and put what it makes into `env`."""
        first_x = self.n_consts + self.n_carry
        xs = [None if self.is_buffer(a) else read(env, a, None) for a in self.eqn.invars[first_x:]]
        start = (
            tuple(read(env, a, None) for a in self.eqn.invars[self.n_consts : first_x]),
            tuple(read(env, v, None) for v in self.buffers),
            tuple(first(v.aval, self.axis.places[v]) for v in self.totals),
        )
        steps = jnp.arange(self.eqn.params["length"], dtype=jnp.int32)
        with compat.standing_at(self.eqn):
            (carry, held, sums), (ys, stacked) = jax.lax.scan(
                functools.partial(self.layer, env), start, (steps, xs), reverse=self.eqn.params["reverse"]
            )
        flats = [flat(y, self.spots[v]) for y, v in zip(stacked, self.stacks, strict=True)]
        totals = [t.astype(v.aval.dtype) for t, v in zip(sums, self.totals, strict=True)]
        env.update({(v, None): x for v, x in zip(self.names(), (*carry, *ys, *held, *totals, *flats), strict=True)})

    def is_buffer(self, atom: Any) -> bool:
        """Whether a stacked input of the scan is updated in it, layer by layer."""
        return compat.is_var(atom) and atom in self.lies_in

    def layer(self, env: Env, carry: tuple[Values, Values, Values], x: tuple[Any, Sequence[Any]]) -> Any:
        """One layer: its part of the backward pass, then its update."""
        (old, held, sums), (i, slices) = carry, x
        lying: dict[Any, Any] = dict(zip(self.buffers, held, strict=True))
        atoms = self.eqn.invars[self.n_consts + self.n_carry :]
        given = [self.of_buffer(lying, a, i) if x is None else x for a, x in zip(atoms, slices, strict=True)]
        consts = [read(env, a, None) for a in self.eqn.invars[: self.n_consts]]
        outs = jax.extend.core.jaxpr_as_fun(self.eqn.params["jaxpr"])(*consts, *old, *given)
        cut = [(v, spot) for v, spot in self.axis.cut if v not in self.seeds]
        slices = [_slice(lying[v] if v in lying else read(env, v, None), spot, i) for v, spot in cut]
        # Behind this barrier a layer's gradients are finished before its update, and all is read before anything is
        # written: else XLA copies a buffer that one fusion reads and another writes.
        outs, slices = jax.lax.optimization_barrier((tuple(outs), slices))
        made = dict(zip(self.eqn.outvars, outs, strict=True))
        inner: Env = dict(zip(cut, slices, strict=True))
        inner.update({(v, None): env[v, None] for v in self.axis.reads})
        inner.update({(v, Place(0)): jnp.expand_dims(made[v], 0) for v in self.seeds})
        evaluate(self.axis.steps, inner, At(i, 1))
        new = tuple(self.written(into, inner, out, i) for into, out in zip(held, self.pairs, strict=True))
        parts = tuple(joined(t, inner[v, None], self.axis.places[v]) for t, v in zip(sums, self.totals, strict=True))
        stacked = tuple(inner[v, self.spots[v]] for v in self.stacks)
        return (tuple(outs[: self.n_carry]), new, parts), (tuple(made[v] for v in self.rest), stacked)

    def of_buffer(self, lying: dict[Any, Any], atom: Any, i: Any) -> Any:
        """A layer of a stacked input, read where it is updated."""
        buffer, spot = self.lies_in[atom]
        return _slice(lying[buffer], spot, i).reshape(atom.aval.shape[1:])

    def written(self, into: Any, inner: Env, out: Any, i: Any) -> Any:
        """A buffer with a layer's result in its place."""
        spot = self.spots[out]
        return jax.lax.dynamic_update_slice_in_dim(into, inner[out, spot], i * spot.unit, spot.dim)


def _slice(x: Any, spot: Place, i: Any) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, i * spot.unit, spot.unit, spot.dim)


def donated_leaves(argnums: Collection[int], argnames: Collection[str]) -> Callable[..., list[bool]]:
    """Whether each leaf of a step's arguments is donated, given which arguments are."""

    def of(*args: Any, **kwargs: Any) -> list[bool]:
        found = [i in argnums for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        return found + [k in argnames for k in sorted(kwargs) for _ in jax.tree.leaves(kwargs[k])]

    return of
