"""Derivative rules of a function's own: equations of `jax.custom_jvp` and `jax.custom_vjp`, differentiated as JAX does.

A jaxpr holds such a rule as a Python function, which no text of the jaxpr shows. What it computes is part of the
program's gradient all the same, and of what that needs: traced at the equation's shapes it is a jaxpr like any other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of

RULED = ("custom_jvp_call", "custom_vjp_call")
"""Primitives with a derivative rule of their own."""

NOT_TRACED = (AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
"""What rules raise that are not made, not meant for all inputs at once, or not outside of their `jax.shard_map`."""

_REFUSED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Why rules refused to be traced for all inputs at once, by the equation's parameter `out_trees`."""


def is_inexact(atom: Any) -> bool:
    """Tell whether an atom, or an array, can have a tangent."""
    return bool(jnp.issubdtype(getattr(getattr(atom, "aval", atom), "dtype", bool), jnp.inexact))


def no_tangent(x: Any) -> np.ndarray:
    """Make the tangent of values without one, such as integers."""
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


def function_of(eqn: Any) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
    """An equation as a function of its operands, and their shapes."""
    invars, outvars = ([compat.new_var(a.aval) for a in atoms] for atoms in (eqn.invars, eqn.outvars))
    jaxpr = compat.make_jaxpr_of([eqn.replace(invars=invars, outvars=outvars)], invars, outvars)
    return lambda *xs: jax.core.eval_jaxpr(jaxpr, (), *xs), [compat.shape_of(v.aval) for v in invars]


def jvp_of(eqn: Any) -> tuple[Callable[..., list[Any]], list[Any], list[Any]]:
    """The forward derivative of an equation: of its operands and of their tangents, results and their tangents.

    Operands without a tangent, such as integers, have none.
    """
    function, shapes = function_of(eqn)
    can_move = [is_inexact(a) for a in shapes]

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        moving = iter(tangents)
        outs, moved = jax.jvp(function, primals, [next(moving) if m else no_tangent(p)
                                                  for p, m in zip(primals, can_move, strict=True)])  # fmt: skip
        return [*outs, *(t for o, t in zip(outs, moved, strict=True) if is_inexact(o))]

    return jvp, shapes, [a for a, m in zip(shapes, can_move, strict=True) if m]


def closed_over(eqns: Iterable[Any]) -> set[Any]:
    """The variables that a `custom_vjp` among equations, or in their bodies, closes over: they have no gradient."""
    found: set[Any] = set()
    for eqn in eqns:
        if eqn.primitive.name == "custom_vjp_call":
            found.update(eqn.invars[: eqn.params.get("num_consts", 0)])
        for body in map(compat.open_jaxpr, bodies_of(eqn)):
            inside = closed_over(body.eqns)
            operands = eqn.invars[len(eqn.invars) - len(body.invars) :]
            found.update(a for a, v in zip(operands, body.invars, strict=False) if v in inside)
    return {a for a in found if compat.is_var(a)}


def with_gradient(eqns: Iterable[Any], variables: Sequence[Any], consts: Sequence[Any]) -> set[int]:
    """Which constants of a program are traced by a function around it, that may take their gradient."""
    fixed = closed_over(eqns)
    return {i for i, const in enumerate(consts) if isinstance(const, jax.core.Tracer) and variables[i] not in fixed}


def traced_vjp(eqn: Any) -> tuple[Any, Any]:
    """The jaxprs of the forward and the backward pass of a `custom_vjp`.

    The first returns results and what is saved; the second reads that and the cotangents of results, and returns
    cotangents of operands, those of floating-point numbers. The first operands have none where the function closes
    over them: JAX refuses to take one. In a rule that calls its own function nothing says which these are.

    A rule that refused is not asked again: JAX would forget the residuals of other rules that are called inside it.
    """
    refused = _REFUSED.get(asked := eqn.params["out_trees"])
    if refused is not None:
        raise TypeError(refused)
    try:
        return _traced_vjp(eqn)
    except (NameError, jax.errors.JAXTypeError):  # that depends on what is around it: named axes, tracers
        raise
    except NOT_TRACED as error:
        _REFUSED[asked] = str(error)
        raise


def _traced_vjp(eqn: Any) -> tuple[Any, Any]:
    function, shapes = function_of(eqn)
    trees: list[Any] = []

    def traced(n_closed: int) -> tuple[Any, Any]:
        def forward(*primals: Any) -> list[Any]:
            outs, pullback = jax.vjp(functools.partial(function, *primals[:n_closed]), *primals[n_closed:])
            leaves, tree = jax.tree.flatten(pullback)
            trees.append(tree)
            return [*outs, *leaves]

        def backward(leaves: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            given = iter(cotangents)
            cts = [next(given) if is_inexact(v) else no_tangent(v.aval) for v in eqn.outvars]
            found = zip(jax.tree.unflatten(trees[-1], leaves)(cts), shapes[n_closed:], strict=True)
            return [c for c, a in found if is_inexact(a)]

        first: Any = jax.make_jaxpr(forward)(*shapes)
        leaves = list(map(compat.shape_of, first.out_avals[len(eqn.outvars) :]))
        given = [compat.shape_of(v.aval) for v in eqn.outvars if is_inexact(v)]
        return first, jax.make_jaxpr(backward)(leaves, given)

    for n_closed in range(eqn.params.get("num_consts", 0), len(shapes)):
        with contextlib.suppress(compat.CLOSED_OVER):
            return traced(n_closed)
    raise TypeError("JAX differentiates this function by none of its operands")


def traced_rule(eqn: Any) -> tuple[Any, ...]:
    """The jaxprs of an equation's derivative by its own rule; none where that cannot be traced by itself."""
    try:
        return _traced(eqn)
    except NOT_TRACED:
        return ()


def _traced(eqn: Any) -> tuple[Any, ...]:
    if eqn.primitive.name == "custom_vjp_call":
        return traced_vjp(eqn)
    jvp, shapes, tangents = jvp_of(eqn)
    return (jax.make_jaxpr(jvp)(shapes, tangents),)


def over_tracers(eqns: Iterable[Any]) -> Any:
    """The first equation, or one in a body, whose rule closes over a value that is traced; `None` if there is none.

    JAX cannot compile what it holds by itself.
    """
    for eqn in eqns:
        if eqn.primitive.name in RULED and _is_over_tracers(eqn):
            return eqn
        for body in bodies_of(eqn):
            if (found := over_tracers(body.eqns)) is not None:
                return found
    return None


def _is_over_tracers(eqn: Any) -> bool:
    try:
        rule = _traced(eqn)
    except jax.errors.JAXTypeError:  # it is over, what traced them
        return True
    except NOT_TRACED:
        return False
    return any(isinstance(c, jax.core.Tracer) for closed in rule for c in _constants(closed))


def _constants(closed: Any) -> Iterator[Any]:
    """The constants of a jaxpr, and of those inside its equations."""
    yield from getattr(closed, "consts", ())
    for eqn in closed.eqns:
        yield from (a.val for a in eqn.invars if not compat.is_var(a))
        for body in bodies_of(eqn):
            yield from _constants(body)
