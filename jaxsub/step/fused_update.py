"""The optimizer's update inside the backward scan: a gradient stands for one layer at a time.

A step's gradient comes first, and its update after it: the gradients of all layers stand at once. Where a backward scan
stacks them, and all that reads the stack treats its layers one by one (the update of SGD, Adam and their like, casts,
weight decay), the update moves into the scan. Weights, moments and whatever else the update returns ride in the carry,
are read and written at the step's own layer, and so are updated in place. The mechanism is the independent axis of
`jaxsub.jaxpr.axes`, along the layers.

What needs all gradients before any update (a clip by their global norm, a check that all are finite) keeps them whole:
`Whole` names the equation. Sums over the layers that no update reads, such as a logged norm, are added up in the scan.

Layers that are unrolled need none of this: XLA orders their updates itself, as nothing holds the gradients together.

Sources: Lv et al., *Full Parameter Fine-tuning for Large Language Models with Limited Resources* (LOMO), 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxsub.emission.at_slice import At, Env, evaluate, read
from jaxsub.emission.chunks import first, flat, joined, whole_step
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axes import Axis, NotIndependent, follow_all
from jaxsub.jaxpr.axis_rules import Place
from jaxsub.jaxpr.inline import flatten_jaxpr, live_eqns
from jaxsub.jaxpr.trace import aval_bytes

MOST_SCANS = 16
"""How many scans of a step are looked at: each that is rewritten costs a trace of the step."""

Values = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Fused:
    """A backward scan that updates as it goes.

    Attributes:
        source: The user's line of the scan.
        steps: How many steps it has.
        gradient_bytes: What the gradients took that no longer stand whole.
        n_gradients: How many stacked gradients these are.
        copied_bytes: What is updated and was not donated: the scan updates a copy.
    """

    source: str
    steps: int
    gradient_bytes: int
    n_gradients: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class Whole:
    """Gradients that stand whole, and why.

    Attributes:
        n_bytes: What they take.
        reason: Which equation reads all of them, with its line, or that they are returned.
    """

    n_bytes: int
    reason: str


@dataclass(slots=True, eq=False)
class Findings:
    """What became of a step's backward scans, in the trace that came last."""

    fused: tuple[Fused, ...] = ()
    whole: tuple[Whole, ...] = ()


def with_fused_updates(
    fun: Callable[..., Any], donated: Callable[..., Sequence[bool]], findings: Findings | None = None
) -> Callable[..., Any]:
    """The same step, with every update that can be inside its backward scan.

    Args:
        fun: The step, a function of arrays.
        donated: Given the step's arguments, whether each of their leaves is donated.
        findings: Filled at each trace with what was done.

    Returns:
        A function with the same results, to be compiled by `jax.jit` with the same donations.

    Example:
        >>> def step(ws, x):
        ...     def loss(ws):
        ...         return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()
        ...
        ...     return ws - 0.1 * jax.grad(loss)(ws)
        >>> found = Findings()
        >>> ws, x = jnp.ones((3, 4, 4)), jnp.ones((2, 4))
        >>> new = with_fused_updates(step, lambda *args: [True, False], found)(ws, x)
        >>> bool(jnp.allclose(new, step(ws, x))), found.fused[0].n_gradients, found.fused[0].gradient_bytes
        (True, 1, 192)
    """
    findings = Findings() if findings is None else findings

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
        leaves, are_donated = jax.tree.leaves((args, kwargs)), donated(*args, **kwargs)
        call, fused, whole = fuse(closed, are_donated)
        findings.fused, findings.whole = fused, whole
        return jax.tree.unflatten(jax.tree.structure(shape), call(*leaves))

    return run


def fuse(closed: Any, donated: Sequence[bool]) -> tuple[Callable[..., Values], tuple[Fused, ...], tuple[Whole, ...]]:
    """A step's jaxpr as a function of its inputs, its updates inside its backward scans; and what was done."""
    fused: list[Fused] = []
    whole: dict[str, Whole] = {}
    call: Callable[..., Values] = jax.extend.core.jaxpr_as_fun(closed)
    avals = [v.aval for v in compat.open_jaxpr(closed).invars]
    for _ in range(MOST_SCANS):
        step = _Flat.of(closed, donated)
        found = None
        for place in step.scans():
            found, stands = _candidate(step, place)
            whole.update((w.reason, w) for w in stands)
            if found is not None:
                break
        if found is None:
            break
        fused.append(found.report())
        call = found.run
        closed = jax.make_jaxpr(call)(*avals)
    return call, tuple(fused), tuple(whole.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """A step's equations; its inputs' constants first."""

    eqns: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    consts: tuple[Any, ...]
    donated: tuple[Any, ...]
    """The inputs that are donated, in order."""

    @classmethod
    def of(cls, closed: Any, donated: Sequence[bool]) -> _Flat:
        eqns, inputs, outputs, consts = flatten_jaxpr(closed)
        given = inputs[len(consts) :]
        kept = [v for v, is_donated in zip(given, donated, strict=True) if is_donated]
        return cls(tuple(live_eqns(eqns, outputs)), tuple(inputs), tuple(outputs), tuple(consts), tuple(kept))

    def scans(self) -> Iterator[int]:
        """Where scans with several steps and stacked results stand."""
        for place, eqn in enumerate(self.eqns):
            if eqn.primitive.name == "scan" and eqn.params["length"] > 1 and not eqn.effects:
                yield place

    def stacked(self, place: int) -> list[Any]:
        """Floating-point results that a scan stacks and something reads."""
        scan = self.eqns[place]
        _, n_carry = compat.scan_sizes(scan)
        read = {a for eqn in self.eqns[place + 1 :] for a in eqn.invars if compat.is_var(a)}
        return [v for v in scan.outvars[n_carry:] if v in read and jnp.issubdtype(v.aval.dtype, jnp.floating)]

    def reads_all(self, place: int, atoms: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
        """Those of a scan's stacked results that values are made of."""
        makers = {v: eqn for eqn in self.eqns[place + 1 :] for v in eqn.outvars}
        found, todo = set(), [a for a in atoms if compat.is_var(a)]
        while todo:
            atom = todo.pop()
            if atom not in found:
                found.add(atom)
                todo += [a for a in makers[atom].invars if compat.is_var(a)] if atom in makers else []
        return [v for v in seeds if v in found]


def _candidate(step: _Flat, place: int) -> tuple[_FusedScan | None, list[Whole]]:
    """The scan at a place with the updates that can be inside it, if any can, and which gradients stand whole."""
    scan, behind = step.eqns[place], step.eqns[place + 1 :]
    seeds, whole = step.stacked(place), []
    known = [*step.inputs, *(v for eqn in step.eqns[: place + 1] for v in eqn.outvars)]
    n = scan.params["length"]
    while seeds:
        late = [v for v in scan.outvars if v not in seeds]
        try:
            axis = follow_all(behind, known, step.outputs, seeds, 0, late)
        except NotIndependent as refused:
            lost = step.reads_all(place, _carrying(refused.eqn, behind), seeds) or seeds
            whole.append(Whole(sum(aval_bytes(v.aval) for v in lost), str(refused)))
            seeds = [v for v in seeds if v not in lost]
            continue
        wanted = _wanted(axis, step.outputs)
        lost = [v for v in seeds if v in wanted]
        if axis.length != n or lost:  # what is returned, or read behind the updates, is stacked anyway
            seeds = [v for v in seeds if v not in lost] if axis.length == n else []
            continue
        return _FusedScan(step, place, axis, tuple(seeds), wanted), whole
    return None, whole if _is_gradient(step, place) else []


def _carrying(eqn: Any, behind: Sequence[Any]) -> Sequence[Any]:
    """What an equation that forbids the axis reads; where it stands inside another, what that reads."""
    return next((e.invars for e in behind if e is eqn), eqn.invars)


def _is_gradient(step: _Flat, place: int) -> bool:
    """Whether what a scan stacks may be gradients: of the shapes of what is donated."""
    shapes = {(v.aval.shape, v.aval.dtype) for v in step.donated}
    return any((v.aval.shape, v.aval.dtype) in shapes for v in step.stacked(place))


def _wanted(axis: Axis, outputs: Sequence[Any]) -> tuple[Any, ...]:
    """What is read behind the scan of what is made in it."""
    places = {*axis.places, *(v for v, _ in axis.cut)}
    read_later = dict.fromkeys(a for a in (*outputs, *(a for e in axis.after for a in e.invars)) if compat.is_var(a))
    made = {v for step in axis.steps for v in step.writes}
    return tuple(v for v in read_later if v in places and (v in axis.places or v not in made))


@dataclass(frozen=True, slots=True, eq=False)
class _FusedScan:
    """A step one of whose scans updates as it goes."""

    step: _Flat
    place: int
    axis: Axis
    seeds: tuple[Any, ...]
    wanted: tuple[Any, ...]
    pairs: dict[Any, Any] = field(init=False, default_factory=dict)
    """Which input's memory each result is written into."""

    def __post_init__(self) -> None:
        cut = {v: place for v, place in self.axis.cut if v in self.step.inputs}
        for is_donated in (True, False):  # in JAX's order, so that a result is written where JAX has it lie
            order = self.step.donated if is_donated else [v for v in self.step.inputs if v not in self.step.donated]
            free = [v for v in order if v in cut]
            for out in self.step.outputs if is_donated else self.wanted:
                state = self.axis.places.get(out) if compat.is_var(out) else None
                if not isinstance(state, Place) or out in self.pairs:
                    continue
                alike = [v for v in free if cut[v] == state and v.aval.shape == out.aval.shape
                         and v.aval.dtype == out.aval.dtype]  # fmt: skip
                if alike:
                    self.pairs[out] = alike[0]
                    free.remove(alike[0])

    def report(self) -> Fused:
        copied = [v for v in self.pairs.values() if v not in self.step.donated]
        scan = self.step.eqns[self.place]
        sizes = [aval_bytes(v.aval) for v in self.seeds]
        return Fused(compat.source_of(scan), scan.params["length"], sum(sizes), len(sizes),
                     sum(aval_bytes(v.aval) for v in copied))  # fmt: skip

    def run(self, *args: Any) -> Values:
        """The step's results."""
        env: Env = {(v, None): x for v, x in zip(self.step.inputs, (*self.step.consts, *args), strict=True)}
        evaluate([whole_step(eqn) for eqn in (*self.step.eqns[: self.place], *self.axis.before)], env, None)
        self.scan(env)
        evaluate([whole_step(eqn) for eqn in self.axis.after], env, None)
        return tuple(read(env, a, None) for a in self.step.outputs)

    def scan(self, env: Env) -> None:
        """Run the scan, and put what it makes into `env`."""
        scan, axis = self.step.eqns[self.place], self.axis
        n_consts, n_carry = compat.scan_sizes(scan)
        atoms = scan.invars
        consts = [read(env, a, None) for a in atoms[:n_consts]]
        buffers = list(dict.fromkeys(self.pairs.values()))
        from_buffers = {i: a for i, a in enumerate(atoms[n_consts + n_carry :]) if a in buffers}
        xs = [read(env, a, None) for i, a in enumerate(atoms[n_consts + n_carry :]) if i not in from_buffers]
        totals = [v for v in self.wanted if not isinstance(axis.places.get(v), Place)]
        stacks = [v for v in self.wanted if isinstance(axis.places.get(v), Place) and v not in self.pairs]
        rest = [i for i, v in enumerate(scan.outvars[n_carry:]) if v not in self.seeds]
        body = jax.extend.core.jaxpr_as_fun(scan.params["jaxpr"])
        where, axis_place = {v: i for i, v in enumerate(scan.outvars)}, Place(0)

        def one(carry: tuple[Values, Values, Values], x: tuple[Any, Values]) -> Any:
            (old, held, sums), (i, slices) = carry, x
            at, lying, given = At(i, 1), dict(zip(buffers, held, strict=True)), iter(slices)
            arguments = [jax.lax.dynamic_index_in_dim(lying[from_buffers[k]], i, keepdims=False)
                         if k in from_buffers else next(given) for k in range(len(atoms) - n_consts - n_carry)]  # fmt: skip
            outs = body(*consts, *old, *arguments)
            read_here = self._slices(env, lying, i)
            # Barriers: a layer's gradients are finished before its update, and all is read before anything is written,
            # else XLA copies a buffer that one fusion reads and another writes.
            outs, read_here = jax.lax.optimization_barrier((tuple(outs), read_here))
            inner = dict(zip(((v, p) for v, p in axis.cut if v not in self.seeds), read_here, strict=True))
            inner.update({(v, None): env[v, None] for v in axis.reads})
            inner.update({(v, axis_place): jnp.expand_dims(outs[where[v]], 0) for v in self.seeds})
            evaluate(axis.steps, inner, at)
            results = tuple(inner[out, axis.places[out]] for out in self.pairs)
            new = dict(lying)
            for (out, into), x in zip(self.pairs.items(), results, strict=True):
                spot = axis.places[out]
                new[into] = jax.lax.dynamic_update_slice_in_dim(new[into], x, i * spot.unit, spot.dim)
            parts = [joined(t, inner[v, None], axis.places[v]) for t, v in zip(sums, totals, strict=True)]
            ys = (*(outs[n_carry + k] for k in rest), *(inner[v, axis.places[v]] for v in stacks))
            return (tuple(outs[:n_carry]), tuple(new[b] for b in buffers), tuple(parts)), ys

        start = (tuple(read(env, a, None) for a in atoms[n_consts : n_consts + n_carry]),
                 tuple(read(env, b, None) for b in buffers),
                 tuple(first(v.aval, axis.places[v]) for v in totals))  # fmt: skip
        order = (jnp.arange(scan.params["length"], dtype=jnp.int32), tuple(xs))
        with compat.standing_at(scan):
            (carry, held, sums), ys = jax.lax.scan(one, start, order, reverse=scan.params["reverse"])
        env.update({(v, None): x for v, x in zip(scan.outvars, carry, strict=False)})
        env.update({(scan.outvars[n_carry + k], None): y for k, y in zip(rest, ys, strict=False)})
        lying = dict(zip(buffers, held, strict=True))
        env.update({(out, None): lying[into] for out, into in self.pairs.items()})
        env.update({(v, None): t.astype(v.aval.dtype) for v, t in zip(totals, sums, strict=True)})
        env.update({(v, None): flat(y, axis.places[v]) for v, y in zip(stacks, ys[len(rest) :], strict=True)})

    def _slices(self, env: Env, lying: dict[Any, Any], i: Any) -> Values:
        """A layer's slices of what is cut, gradients left out."""
        return tuple(
            jax.lax.dynamic_slice_in_dim(lying.get(v, env[v, None]), i * p.unit, p.unit, p.dim)
            for v, p in self.axis.cut
            if v not in self.seeds
        )


def donated_leaves(argnums: Sequence[int], argnames: Sequence[str]) -> Callable[..., list[bool]]:
    """Whether each leaf of a step's arguments is donated, given which arguments are.

    Example:
        >>> donated_leaves([0], ["state"])({"a": 1, "b": 2}, 3, state=4)
        [True, True, False, True]
    """

    def of(*args: Any, **kwargs: Any) -> list[bool]:
        positions = [a % max(len(args), 1) for a in argnums]
        found = [i in positions for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        return found + [k in argnames for k in sorted(kwargs) for _ in jax.tree.leaves(kwargs[k])]

    return of
