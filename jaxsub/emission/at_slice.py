"""Evaluate equations at the shape of a slice of an independent axis.

Plain equations are bound with new parameters where those hold shapes (`resized`), at their own source lines and in
their scopes. Equations with inner jaxprs go through JAX's own functions (`scan`, `while_loop`, `switch`, `checkpoint`,
`custom_jvp`, `custom_vjp`, `custom_linear_solve`) with bodies evaluated at the slice's shape. Each result's shape is
checked against the analysis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxsub.core.decisions import UNSPLIT, Split
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis import Body, Step
from jaxsub.jaxpr.axis_places import Place, State
from jaxsub.jaxpr.derivative_rules import is_inexact, no_tangent
from jaxsub.jaxpr.flops import bodies_of
from jaxsub.jaxpr.own_rules import with_own_rules
from jaxsub.jaxpr.random_bits import part_of_bits
from jaxsub.jaxpr.shardings import has_explicit_axes

Env = dict[tuple[Any, Place | None], Any]
"""Values of variables: whole ones, totals among them, and slices."""
Values = tuple[Any, ...]
PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True, slots=True)
class At:
    """A slice: the unit it starts at, how many units it has; over which devices the axis is split, and its length.

    Where it is known what it is compiled for, equations are differentiated by the rules of plans.
    """

    start: Any
    size: int
    split: Split = UNSPLIT
    length: int = 0
    platform: str | None = None

    def index(self, unit: int) -> Any:
        """Where in the axis the elements of the slice are, so many for each unit: its share of what each device has."""
        start, parts = jnp.asarray(self.start * unit, jnp.int32), self.split.parts
        share = jax.lax.iota(jnp.int32, self.size * unit // parts)
        if parts == 1:
            return start + share
        first = jax.lax.iota(jnp.int32, parts) * (self.length * unit // parts)
        return (first[:, None] + (start // parts + share)).ravel()


def read(env: Env, atom: Any, place: Place | None) -> Any:
    """Read the value of an atom, whole or sliced."""
    return env[atom, place] if compat.is_var(atom) else atom.val


def evaluate(steps: Sequence[Step], env: Env, at: At | None) -> None:
    """Evaluate steps in order, at a slice's shape or whole, and put their results into `env`."""
    for step in steps:
        reads = zip(step.reads, step.needs, strict=True)
        args = [_kept_split(step, a, read(env, a, need), need, at) for a, need in reads]
        for var, out, x in zip(step.writes, step.outs, _outcome(step, args, at), strict=True):
            if at is not None and jnp.shape(x) != _shape_at(var.aval, out, at):
                raise AssertionError(f"`{step.eqn}` in slices made {jnp.shape(x)}, not {_shape_at(var.aval, out, at)}")
            env[var, out if isinstance(out, Place) else None] = _kept_split(step, var, x, out, at)


def _kept_split(step: Step, atom: Any, x: Any, place: State, at: At | None) -> Any:
    """Keep what a product reads and makes split as the arguments are, or as its type says, and so their cotangents.

    Where weights are split over the same devices, XLA may else gather a slice's few rows in the place of a weight.
    """
    is_product = step.eqn is not None and step.eqn.primitive.name in PRODUCTS
    if at is None or not at.split.names or not isinstance(place, Place) or not is_product:
        return x
    names, sizes = zip(*at.split.mesh, strict=True)
    mesh = jax.sharding.get_abstract_mesh()
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names)) if mesh.empty else mesh
    said = atom.aval.sharding.spec if has_explicit_axes([atom]) else (PartitionSpec.UNCONSTRAINED,) * jnp.ndim(x)
    dims = [at.split.names if d == place.dim else names for d, names in enumerate(said)]
    with compat.standing_at(step.eqn):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*dims)))


def _shape_at(aval: Any, state: State, at: At) -> tuple[int, ...]:
    if not isinstance(state, Place):
        return tuple(aval.shape)
    return tuple(at.size * state.unit if d == state.dim else s for d, s in enumerate(aval.shape))


def _outcome(step: Step, args: Sequence[Any], at: At | None) -> Sequence[Any]:
    if at is None:
        return _bound(step.eqn, step.eqn.params, args, None)
    if step.eqn is None:
        place: Any = step.outs[0]
        return [jax.lax.dynamic_slice_in_dim(args[0], at.start * place.unit, at.size * place.unit, place.dim)]
    if step.bodies:
        with compat.standing_at(step.eqn):
            return _with_bodies(step, args, at)
    shapes = [_shape_at(v.aval, out, at) for v, out in zip(step.writes, step.outs, strict=True)]
    if (found := _by_position(step, args, shapes[0], at)) is not None:
        return [found]
    params = resized(step.eqn, list(map(jnp.shape, args)), shapes)
    if has_explicit_axes((*step.reads, *step.writes)):
        if bodies_of(step.eqn):  # it runs whole, as it was traced
            return _with_explicit_axes(step.eqn, args)
        if step.eqn.primitive.name == "reshard":
            return args
        params.update({name: None for name in ("sharding", "out_sharding") if name in params})
    return _bound(compat.on_mesh_here(step.eqn), params, args, at.platform)


def _with_explicit_axes(eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
    read = [i for i, a in enumerate(eqn.invars) if compat.is_var(a)]
    types = tuple(eqn.invars[i].aval.sharding for i in read)

    def run(*xs: Any) -> list[Any]:
        given = dict(zip(read, xs, strict=True))
        return _bound(eqn, eqn.params, [given.get(i, x) for i, x in enumerate(args)], None)

    explicit: Any = jax.sharding.explicit_axes(run, in_sharding=types)
    found: Sequence[Any] = explicit(*(args[i] for i in read))
    return found


def _by_position(step: Step, args: Sequence[Any], shape: tuple[int, ...], at: At) -> Any:
    """What depends on where in the axis the slice is, `None` for all other equations."""
    place, params = step.outs[0], step.eqn.params
    if not isinstance(place, Place) or step.eqn.primitive.name not in ("iota", "random_bits"):
        return None
    with compat.standing_at(step.eqn):
        match step.eqn.primitive.name:
            case "iota" if place.dim == params["dimension"]:
                return jax.lax.broadcast_in_dim(at.index(place.unit).astype(params["dtype"]), shape, (place.dim,))
            case "random_bits" if (dim := place.dim - args[0].ndim) >= 0:
                index = at.index(place.unit).astype(jnp.uint32)
                return part_of_bits(args[0], params["bit_width"], params["shape"], dim, index)
    return None


def _bound(eqn: Any, params: dict[str, Any], args: Sequence[Any], platform: str | None) -> list[Any]:
    """Evaluate an equation for other operands, for a platform with the rules of plans."""
    variables = [compat.new_var(jax.typeof(x)) if compat.is_var(a) else a
                 for a, x in zip(eqn.invars, args, strict=True)]  # fmt: skip
    invars = [v for v in variables if compat.is_var(v)]
    outvars = [compat.new_var(v.aval) for v in eqn.outvars]
    eqns = [eqn.replace(invars=variables, outvars=outvars, params=params)]
    eqns = eqns if platform is None else with_own_rules(eqns, platform)
    jaxpr = compat.make_jaxpr_of(eqns, invars, outvars)
    return list(jax.core.eval_jaxpr(jaxpr, (), *(x for x, v in zip(args, variables, strict=True) if compat.is_var(v))))


def resized(eqn: Any, shapes: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Adapt the parameters of an equation to other shapes of operands and results."""
    params = dict(eqn.params)
    match eqn.primitive.name:
        case "broadcast_in_dim" | "iota":
            params["shape"] = results[0]
        case "reshape":
            params["new_sizes"] = results[0]
        case "slice":
            kept = zip(eqn.invars[0].aval.shape, shapes[0], params["limit_indices"], strict=True)
            params["limit_indices"] = tuple(new if new != old else limit for old, new, limit in kept)
        case "dynamic_slice":
            params["slice_sizes"] = results[0]
        case "gather":
            kept = zip(eqn.invars[0].aval.shape, shapes[0], params["slice_sizes"], strict=True)
            params["slice_sizes"] = tuple(new if old == size and new != old else size for old, new, size in kept)
    return params


def _inside(body: Body, args: Sequence[Any], at: At) -> Values:
    """Evaluate a body for one slice."""
    env: Env = {(v, p): x for v, p, x in zip(body.jaxpr.invars, body.ins, args, strict=True)}
    env.update({(v, None): x for v, x in zip(body.jaxpr.constvars, body.consts, strict=True)})
    evaluate(body.steps, env, at)
    pairs = zip(body.jaxpr.outvars, body.outs, strict=True)
    found = [(read(env, a, o if isinstance(o, Place) else None), a.aval) for a, o in pairs]
    return tuple(x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype) for x, aval in found)


def _with_bodies(step: Step, args: Sequence[Any], at: At) -> Sequence[Any]:
    """An equation that holds jaxprs, by JAX's own function for it."""
    primitive, params = compat.unwrapped(step.eqn)
    first, last = step.bodies[0], step.bodies[-1]
    match primitive.name:
        case "scan":
            return _scan(step, args, at)
        case "while":
            n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
            tested, known = tuple(args[:n_cond]), tuple(args[n_cond : n_cond + n_body])
            carry = tuple(args[n_cond + n_body :])
            found: Values = jax.lax.while_loop(lambda c: _inside(first, (*tested, *c), at)[0],
                                               lambda c: _inside(last, (*known, *c), at), carry)  # fmt: skip
            return found
        case "cond":
            branches = [lambda *xs, body=body: _inside(body, xs, at) for body in step.bodies]
            outs: Values = jax.lax.switch(args[0], branches, *args[1:])
            return outs
        case "custom_jvp_call":
            return _custom_jvp(step, args, at)
        case "custom_vjp_call":
            return _custom_vjp(step, args, at)
        case "custom_linear_solve":
            return _linear_solve(step, args, at)
        case name if name in compat.REGIONS:
            region = compat.checkpoint(lambda start, *xs: _inside(first, xs, replace(at, start=start)),
                                       policy=params["policy"], prevent_cse=params["prevent_cse"])  # fmt: skip
            results: Values = region(at.start, *args)
            return results
    return _inside(first, args, at)


def _scan(step: Step, args: Sequence[Any], at: At) -> Sequence[Any]:
    (body,), params = step.bodies, step.eqn.params
    n_consts, n_carry = compat.scan_sizes(step.eqn)
    consts, carry, xs = args[:n_consts], tuple(args[n_consts : n_consts + n_carry]), tuple(args[n_consts + n_carry :])

    def run(carry: Values, x: Values) -> tuple[Values, Values]:
        outs = _inside(body, (*consts, *carry, *x), at)
        return outs[:n_carry], outs[n_carry:]

    more = {"_split_transpose": True} if params.get("_split_transpose") else {}
    carry, ys = jax.lax.scan(run, carry, xs, params["length"], params["reverse"], params["unroll"], **more)
    return (*carry, *ys)


def _linear_solve(step: Step, args: Sequence[Any], at: At) -> Sequence[Any]:
    (matvec, solve, *turned), jaxprs = step.bodies, step.eqn.params["jaxprs"]
    ends = list(accumulate(step.eqn.params["const_lengths"]))
    of_matvec, of_solve, of_turned = args[: ends[0]], args[ends[1] : ends[2]], args[ends[2] : ends[3]]
    given = tuple(args[ends[3] :])
    has_aux = len(step.writes) > len(given)

    def product(x: Values) -> Values:
        return _inside(matvec, (*of_matvec, *x), at)

    def solution(body: Body, consts: Sequence[Any], _: Any, b: Values) -> Any:
        found = _inside(body, (*consts, *b), at)
        return (found[: len(given)], found[len(given) :]) if has_aux else found

    of_transpose = partial(solution, turned[0], of_turned) if turned else None
    found = jax.lax.custom_linear_solve(product, given, partial(solution, solve, of_solve), of_transpose,
                                        symmetric=jaxprs.vecmat is jaxprs.matvec, has_aux=has_aux)  # fmt: skip
    return jax.tree.leaves(found)


def _custom_jvp(step: Step, args: Sequence[Any], at: At) -> Sequence[Any]:
    @jax.custom_jvp
    def call(start: Any, *xs: Any) -> Values:
        return _inside(step.bodies[0], xs, replace(at, start=start))

    @call.defjvp
    def _(primals: Values, tangents: Values) -> tuple[Values, Values]:
        (start, *xs), n_outs = primals, len(step.writes)
        (body,) = step.rule()
        moving = [t for t, x in zip(tangents[1:], xs, strict=True) if is_inexact(x)]
        found = _inside(body, (*xs, *moving), replace(at, start=start))
        moved = iter(found[n_outs:])
        return found[:n_outs], tuple(next(moved) if is_inexact(o) else no_tangent(o) for o in found[:n_outs])

    return call(at.start, *args)


def _custom_vjp(step: Step, args: Sequence[Any], at: At) -> Sequence[Any]:
    n_outs = len(step.writes)

    @jax.custom_vjp
    def call(start: Any, *xs: Any) -> Values:
        return _inside(step.bodies[0], xs, replace(at, start=start))

    def forward(start: Any, *xs: Any) -> tuple[Values, Any]:
        found = _inside(step.rule()[0], xs, replace(at, start=start))
        return found[:n_outs], (start, found[n_outs:])

    def backward(kept: Any, cotangents: Values) -> Values:
        start, leaves = kept
        given = [c for c, v in zip(cotangents, step.writes, strict=True) if is_inexact(v)]
        found = list(_inside(step.rule()[1], (*leaves, *given), replace(at, start=start)))
        moving = [i for i, v in enumerate(step.reads) if is_inexact(v)]
        cts = dict(zip(moving[len(moving) - len(found) :], found, strict=True))  # none of what is closed over
        return (None, *map(cts.get, range(len(step.reads))))

    call.defvjp(forward, backward)
    return call(at.start, *args)
