"""Run equations a slice of an independent axis at a time.

`sliced` makes a function of a run and its `Axis` (`jaxsub.jaxpr.axes`): equations before the axis run once, then a
scan over slices of the values that carry it, each slice a `jax.checkpoint` region, then equations that read totals.
Where the count does not divide the axis, a shorter slice follows. `jaxsub.emission.at_slice` evaluates equations at a
slice's shape.

**What changes in rounding.** Sums over the axis are sums of the slices' sums; nothing else changes. Results narrower
than 32 bits are summed in float32, and rounded once.

**Gradients in the forward pass.** Where the only result with a tangent is one scalar sum, a loss, or all others are
auxiliary results of the function, the derivative rule computes each slice's gradient right after its forward pass: no
slice is recomputed. It is a `custom_jvp` rule whose tangent is the inner product of these gradients and the input
tangents, so reverse mode scales them by the cotangent; forward mode and batches are right as well. Second derivatives
differentiate the rule: a scan of checkpointed slices. The tangents of auxiliary results are the scan's own, dead code
unless somebody reads them. Where other results have tangents, or several sums do, the rule is the scan's. The rule
decides when the derivative is taken, from the symbolic zeros among its tangents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxsub.core.decisions import UNSPLIT, Split
from jaxsub.emission.at_slice import At, Env, evaluate, read
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis import Axis, Step
from jaxsub.jaxpr.axis_places import Place, State, Total
from jaxsub.jaxpr.derivative_rules import is_inexact, no_tangent
from jaxsub.jaxpr.flops import primitives_in
from jaxsub.jaxpr.linearity import is_linear
from jaxsub.jaxpr.new_equations import IN_SLICES
from jaxsub.jaxpr.shardings import automatic_axes, over_automatic_axes, varying_as
from jaxsub.jaxpr.tangents import ZERO_TANGENT

Values = tuple[Any, ...]


def sliced(
    axis: Axis,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    count: int,
    one: Callable[..., Any] | None = None,
    split: Split = UNSPLIT,
    auxiliary: Collection[Any] = (),
    platform: str | None = None,
) -> Callable[..., Values]:
    """Make a function of a run's inputs that runs it in slices, `count` at most.

    Args:
        axis: The axis, followed through the run.
        inputs: The variables that the function's arguments are.
        outputs: The variables that it returns.
        count: In how many slices, at most.
        one: What a slice of the full size executes, if not `jaxpr_of_slice`: a function of the same arguments.
        split: Over which devices the axis is split; the count times their number divides its length.
        auxiliary: Of the outputs those that are not expected to be differentiated. If they are, that takes longer.
        platform: What it is compiled for, to differentiate by the rules of plans; `None` for those of JAX.

    Example:
        >>> from jaxsub.jaxpr.axes import follow
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x).sum())(jnp.ones(6)).jaxpr
        >>> axis = follow(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, jaxpr.invars[0], 0)
        >>> round(float(sliced(axis, jaxpr.invars, jaxpr.outvars, 3)(jnp.ones(6))[0]), 4)
        5.0488
    """
    wanted = _results(axis, outputs)
    plainly = _Slices(axis, wanted, -(-axis.length // count), one, split, _read_for(axis, auxiliary, outputs), platform)
    made = _differentiable(plainly) if plainly.has_loss() else plainly
    slices = over_automatic_axes(made, [*(v for v, _ in axis.cut), *axis.reads], wanted)

    def call(*args: Any) -> Values:
        env: Env = {(v, None): x for v, x in zip(inputs, args, strict=True)}
        evaluate([whole_step(eqn) for eqn in axis.before], env, None)
        parts = (_first(env[v, None], axis.length * p.unit, p.dim) for v, p in axis.cut)
        found = slices(*parts, *(env[v, None] for v in axis.reads))
        env.update({(v, None): x for v, x in zip(wanted, found, strict=True)})
        evaluate([whole_step(eqn) for eqn in axis.after], env, None)
        return tuple(read(env, a, None) for a in outputs)

    return call


def jaxpr_of_slice(axis: Axis, outputs: Sequence[Any], count: int,
                   split: Split = UNSPLIT) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """Trace one slice: a jaxpr of its start, its parts and the values read whole; return it with its results."""
    slices = _Slices(axis, _results(axis, outputs), -(-axis.length // count), split=split)
    n_cut = len(axis.cut)
    parts = [_part_of(v.aval, place, slices.size) for v, place in axis.cut]
    wholes = [compat.shape_of(v.aval, v.aval.shape) for v in axis.reads]

    def one(start: Any, *args: Any) -> Values:
        return slices.one(start, slices.size, args[:n_cut], args[n_cut:])

    with automatic_axes([*(v for v, _ in axis.cut), *axis.reads]):
        return jax.make_jaxpr(one)(jax.ShapeDtypeStruct((), jnp.int32), *parts, *wholes), slices.wanted


def _part_of(aval: Any, place: Place, size: int) -> jax.ShapeDtypeStruct:
    shape = tuple(size * place.unit if d == place.dim else s for d, s in enumerate(aval.shape))
    return compat.shape_of(aval, shape)


def _results(axis: Axis, outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Find the variables made in the slices that are read after them."""
    read = dict.fromkeys(a for a in (*outputs, *(a for e in axis.after for a in e.invars)) if compat.is_var(a))
    return tuple(v for v in read if v in axis.places)


def _read_for(axis: Axis, auxiliary: Collection[Any], outputs: Sequence[Any]) -> frozenset[Any]:
    """Variables that are read for outputs that are not auxiliary."""
    read = {v for v in outputs if compat.is_var(v) and v not in auxiliary}
    for eqn in reversed(axis.after):
        if not read.isdisjoint(eqn.outvars):
            read.update(a for a in eqn.invars if compat.is_var(a))
    return frozenset(read)


def whole_step(eqn: Any) -> Step:
    """An equation that runs once, at the whole shape."""
    return Step(eqn, tuple(eqn.invars), (None,) * len(eqn.invars), tuple(eqn.outvars), (None,) * len(eqn.outvars))


@dataclass(frozen=True, slots=True, eq=False)
class _Slices:
    """All slices as one function of what is cut and what each of them reads whole."""

    axis: Axis
    wanted: tuple[Any, ...]
    size: int
    planned: Callable[..., Any] | None = None
    split: Split = UNSPLIT
    read: frozenset[Any] = frozenset()
    platform: str | None = None
    steps: dict[tuple[int, ...], Callable[..., Any]] = field(default_factory=dict)

    def keys(self) -> list[Any]:
        return [*(v for v, _ in self.axis.cut), *self.axis.reads]

    def states(self) -> list[State]:
        return [self.axis.places[v] for v in self.wanted]

    def has_loss(self) -> bool:
        """Whether there is a scalar sum to make the gradient of in the forward pass."""
        has_sum = any(s == Total("sum") and v.aval.shape == () and jnp.issubdtype(v.aval.dtype, jnp.floating)
                      for v, s in zip(self.wanted, self.states(), strict=True))  # fmt: skip
        return has_sum and scales(self.axis.steps)

    def one(self, start: Any, size: int, parts: Values, wholes: Values) -> Values:
        """One slice's results."""
        if self.planned is not None and size == self.size:
            return tuple(self.planned(jnp.asarray(start, jnp.int32), *parts, *wholes))
        env: Env = dict(zip(self.axis.cut, parts, strict=True))
        env.update({(v, None): x for v, x in zip(self.axis.reads, wholes, strict=True)})
        evaluate(self.axis.steps, env, At(start, size, self.split, self.axis.length, self.platform))
        states = zip(self.wanted, self.states(), strict=True)
        return tuple(env[v, s if isinstance(s, Place) else None] for v, s in states)

    def __call__(self, *args: Any) -> Values:
        def step(start: Any, size: int, parts: Values, wholes: Values) -> tuple[Values, Values]:
            return self.one(start, size, parts, wholes), ()

        return self.run(step, self.sorted(args))[0]

    def sorted(self, args: Sequence[Any]) -> tuple[Values, Values]:
        n = len(self.axis.cut)
        return tuple(args[:n]), tuple(args[n:])

    def run(self, step: Callable[..., tuple[Values, Values]], args: tuple[Values, Values], sums: Sequence[Any] = (),
            fixed: Collection[int] = ()) -> tuple[Values, Values]:  # fmt: skip
        """Run a step over all slices, the last of them shorter; `args` are the values to slice, and those read whole.

        The step is a function of a slice's start, size, parts and the values read whole, and runs inside a region. It
        returns results and further values: `sums` has the `Place` of each of these, or its shape and dtype if it is
        summed. Those values to slice that are `fixed`, by number, have no tangents: a slice cuts out its part itself,
        where stacking the parts of all would be a copy.
        """
        cut, wholes = args
        states: list[Any] = [*self.states(), *(s if isinstance(s, Place) else Total() for s in sums)]
        avals = [*(v.aval for v in self.wanted), *(None if isinstance(s, Place) else s for s in sums)]
        n, rest = divmod(self.axis.length, self.size)
        places = [place for _, place in self.axis.cut]

        def put(totals: Values, found: Sequence[Any]) -> tuple[Values, Values]:
            pairs = list(zip(found, states, strict=True))
            parts = [(x, s) for x, s in pairs if not isinstance(s, Place)]
            sums = tuple(joined(t, x, s) for t, (x, s) in zip(totals, parts, strict=True))
            return sums, tuple(x for x, s in pairs if isinstance(s, Place))

        inside = [i for i in fixed if places[i].dim > 0 and self.split.parts == 1]
        uncut = [cut[i] for i in inside]

        def body(totals: Values, x: Any) -> tuple[Values, Values]:
            def one(start: Any, parts: Any, uncut: Sequence[Any], *wholes: Any) -> tuple[Values, Values]:
                own = (self.cut_out(whole, places[i], start) for whole, i in zip(uncut, inside, strict=True))
                return step(start, self.size, tuple(_put(parts, inside, own)), wholes)

            start, parts = x
            parts = [p if p is None else self.part(p, place) for p, place in zip(parts, places, strict=True)]
            results, more = compat.checkpoint(one, prevent_cse=False)(start, parts, uncut, *wholes)
            return put(totals, (*results, *more))

        body.__name__ = IN_SLICES
        firsts = tuple(varying_as(first(a, s), a)
                       for a, s in zip(avals, states, strict=True) if not isinstance(s, Place))  # fmt: skip
        head = [None if i in inside else self.stacked(cut[i], place, n) for i, place in enumerate(places)]
        totals, ys = jax.lax.scan(body, firsts, (jnp.arange(n) * self.size, head))
        carried = [s for s in states if isinstance(s, Place)]
        found = [flat(y, p, self.split.parts) for y, p in zip(ys, carried, strict=True)]
        if rest:
            tail = tuple(jax.lax.slice_in_dim(x, n * self.size * p.unit, None, axis=p.dim)
                         for x, p in zip(cut, places, strict=True))  # fmt: skip
            region = compat.checkpoint(lambda parts, *w: step(n * self.size, rest, parts, w))
            results, more = region(tail, *wholes)
            totals, last = put(totals, (*results, *more))
            found = [jnp.concatenate(pair, p.dim) for *pair, p in zip(found, last, carried, strict=True)]
        done, arrays = iter(totals), iter(found)
        values = [next(arrays) if isinstance(s, Place) else next(done) for s in states]
        k = len(self.wanted)
        return tuple(x.astype(v.aval.dtype) for x, v in zip(values[:k], self.wanted, strict=True)), tuple(values[k:])

    def stacked(self, x: Any, place: Place, n: int) -> Any:
        """Stack the first `n` slices of an array, each with its share of every part.

        A slice of one has no dimension for it: XLA copies an array whose dimension of one is moved.
        """
        width, parts, d = self.size * place.unit, self.split.parts, place.dim
        whole, shape = _first(x, n * width, d), (*x.shape[:d], parts, n, width // parts, *x.shape[d + 1 :])
        if parts == 1:
            return jnp.moveaxis(whole if width == 1 else whole.reshape(*shape[:d], *shape[d + 1 :]), d, 0)
        return jnp.moveaxis(whole.reshape(shape), d + 1, 0).reshape(n, *shape[:d], width, *x.shape[d + 1 :])

    def cut_out(self, x: Any, place: Place, start: Any) -> Any:
        """The part of an array for the slice that starts there."""
        return jax.lax.dynamic_slice_in_dim(x, start * place.unit, self.size * place.unit, place.dim)

    def part(self, x: Any, place: Place) -> Any:
        """One of the slices that `stacked` stacks."""
        return jnp.expand_dims(x, place.dim) if self.split.parts == 1 == self.size * place.unit else x


def _differentiable(slices: _Slices) -> Callable[..., Values]:
    """Give the slices a derivative rule that computes the gradient of one scalar sum in the forward pass."""

    def plainly(*args: Any) -> Values:
        return slices(*args)

    plainly.__name__ = IN_SLICES
    call = jax.custom_jvp(plainly)

    def rule(primals: Values, tangents: Values) -> tuple[Values, Values]:
        active = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        moving, given = _moving(slices, active), [tangents[i] for i in active]
        loss, found = _only_loss(slices, moving, active), dict[Any, Any]()
        if loss is not None and moving == [loss]:
            outs, found[loss] = _with_gradient(slices, primals, active, given, loss)
        else:
            outs, moved = jax.jvp(lambda *xs: slices(*_put(primals, active, xs)), [primals[i] for i in active], given)
            found = {i: moved[i] for i in moving}
            if loss is not None:  # the rest is dead code unless it is differentiated
                outs, found[loss] = _with_gradient(slices, primals, active, given, loss)
        return outs, tuple(found[i] if i in found else _zero(o) for i, o in enumerate(outs))

    call.defjvp(rule, symbolic_zeros=True)
    return call


def scales(steps: Sequence[Step]) -> bool:
    """Whether the gradient of a sum may be made in the forward pass, for the cotangent 1, and scaled afterwards.

    Not with a conditional: JAX cannot transpose a rule under `vmap` that holds one. Nor where the gradient does not
    scale with its cotangent: in a `custom_vjp` whose backward pass clips it, say, or in floats of so small a range
    (float16, float8) that they overflow or vanish for one cotangent and not for another.
    """
    if any("cond" in primitives_in(step.eqn) for step in steps if step.eqn is not None):
        return False
    least = jnp.finfo(jnp.float32).maxexp
    for step in steps:
        if any(is_inexact(v) and jnp.finfo(v.aval.dtype).maxexp < least for v in step.writes):
            return False
        if not all(scales(body.steps) for body in step.bodies):
            return False
        if step.eqn is not None and step.eqn.primitive.name == "custom_vjp_call":
            backward = step.rule()[1].jaxpr
            n_kept = len(backward.invars) - sum(map(is_inexact, step.eqn.outvars))
            if not is_linear(backward, [i >= n_kept for i in range(len(backward.invars))]):
                return False
    return True


def makes_gradient(
    axis: Axis, outputs: Sequence[Any], differentiated: Collection[Any], auxiliary: Collection[Any] = ()
) -> bool:
    """Whether the gradient of a run is made in the forward pass: it has one sum that moves, and its gradient scales.

    Of the variables that the run reads, `differentiated` have tangents; of the outputs, `auxiliary` are not counted.
    """
    slices = _Slices(axis, _results(axis, outputs), axis.length, read=_read_for(axis, auxiliary, outputs))
    active = [i for i, v in enumerate(slices.keys()) if v in differentiated]
    return slices.has_loss() and _only_loss(slices, _moving(slices, active), active) is not None


def _only_loss(slices: _Slices, moving: Sequence[int], active: Sequence[int]) -> int | None:
    """The result that moves, if it is only one beside auxiliary ones, and a scalar total.

    `None` as well where, in a `shard_map`, it differs between devices and an argument that moves it does not: that
    gradient is summed over the devices.
    """
    moving = [i for i in moving if slices.wanted[i] in slices.read]
    is_one = len(moving) == 1 and isinstance(slices.states()[moving[0]], Total)
    if not is_one or slices.wanted[moving[0]].aval.shape != ():
        return None
    keys, axes = slices.keys(), set(compat.varying(slices.wanted[moving[0]].aval))
    return moving[0] if all(axes.issubset(compat.varying(keys[i].aval)) for i in active) else None


def _moving(slices: _Slices, active: Sequence[int]) -> list[int]:
    """Find the results that have tangents if these arguments have."""
    axis = slices.axis
    keys = [*axis.cut, *((v, None) for v in axis.reads)]
    moving = {keys[i] for i in active}
    for step in axis.steps:
        is_moving = any((a, n) in moving for a, n in zip(step.reads, step.needs, strict=True) if compat.is_var(a))
        if is_moving and (step.eqn is None or step.eqn.primitive.name not in ZERO_TANGENT):
            moving.update((v, o if isinstance(o, Place) else None)
                          for v, o in zip(step.writes, step.outs, strict=True) if is_inexact(v))  # fmt: skip
    states = zip(slices.wanted, slices.states(), strict=True)
    return [i for i, (v, s) in enumerate(states) if (v, s if isinstance(s, Place) else None) in moving]


def _with_gradient(
    slices: _Slices, primals: Values, active: Sequence[int], tangents: Sequence[Any], loss: int
) -> tuple[Values, Any]:
    """The results, and the tangent of the loss by its gradient."""
    n_cut = len(slices.axis.cut)
    key = (*active, loss)
    step = slices.steps[key] = slices.steps.get(key) or _gradient_step(slices, active, loss)
    kinds = [slices.axis.cut[i][1] if i < n_cut else jax.typeof(primals[i]) for i in active]
    fixed = [i for i in range(n_cut) if i not in active]
    outs, gradients = slices.run(step, slices.sorted(primals), kinds, fixed)
    moved = [jnp.sum(g * t.astype(g.dtype)).real for g, t in zip(gradients, tangents, strict=True)]
    wide = _wide(outs[loss].dtype)
    return outs, sum((m.astype(wide) for m in moved), jnp.zeros((), wide)).astype(outs[loss].dtype)


def _gradient_step(slices: _Slices, active: Sequence[int], loss: int) -> Callable[..., tuple[Values, Values]]:
    """One slice's results and the gradient of its loss; of slices of the full size that is traced once."""

    def step(start: Any, size: int, parts: Values, wholes: Values) -> tuple[Values, Values]:
        given = (*parts, *wholes)

        def scalar(*moving: Any) -> tuple[Any, Values]:
            outs = slices.one(start, size, *slices.sorted(_put(given, active, moving)))
            return outs[loss], outs

        gradient = jax.value_and_grad(scalar, tuple(range(len(active))), has_aux=True)
        (_, outs), gradients = gradient(*(given[i] for i in active))
        return outs, gradients

    once = jax.jit(step, static_argnums=1, inline=True)
    return lambda start, *given: (step if isinstance(start, int) else once)(start, *given)


def _put(args: Sequence[Any], places: Sequence[int], xs: Iterable[Any]) -> list[Any]:
    found = dict(zip(places, xs, strict=True))
    return [found.get(i, x) for i, x in enumerate(args)]


def _zero(x: Any) -> Any:
    return jnp.zeros_like(x) if is_inexact(x) else no_tangent(x)


def _wide(dtype: Any) -> Any:
    """Choose the dtype to sum values of a dtype in."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def first(aval: Any, state: State) -> Any:
    """Make the initial value of a total."""
    if state is None or state == Total("sum"):
        return jnp.zeros(aval.shape, _wide(aval.dtype) if state else aval.dtype)
    is_max = state == Total("max")
    if aval.dtype == jnp.bool_:
        return jnp.full(aval.shape, not is_max)
    least, most = (-jnp.inf, jnp.inf) if is_inexact(aval) else (jnp.iinfo(aval.dtype).min, jnp.iinfo(aval.dtype).max)
    return jnp.full(aval.shape, least if is_max else most, aval.dtype)


def joined(total: Any, part: Any, state: State) -> Any:
    """Combine a total with another slice's part."""
    if state is None:
        return part
    if state == Total("sum"):
        return total + part.astype(total.dtype)
    return jnp.maximum(total, part) if state == Total("max") else jnp.minimum(total, part)


def _first(x: Any, n: int, dim: int) -> Any:
    """The first `n` along a dimension."""
    return x if n == x.shape[dim] else jax.lax.slice_in_dim(x, 0, n, axis=dim)


def flat(ys: Any, place: Place, parts: int = 1) -> Any:
    """Join stacked slices into one array."""
    d = place.dim
    if parts > 1:
        ys = ys.reshape(*ys.shape[: d + 1], parts, ys.shape[d + 1] // parts, *ys.shape[d + 2 :])
    moved, end = jnp.moveaxis(ys, 0, d if parts == 1 else d + 1), d + (2 if parts == 1 else 3)
    return moved.reshape((*moved.shape[:d], math.prod(moved.shape[d:end]), *moved.shape[end:]))
