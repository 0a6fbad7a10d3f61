"""Follow an independent axis through equations with inner jaxprs: calls, regions, loops, conditionals, custom rules.

A body is followed like the program outside (`jaxsub.jaxpr.axes` passes itself as `Follow`). A loop's carry is followed
to a fixed point. `custom_jvp` and `custom_vjp` keep their rules: JAX traces the rule at the whole shape, as the
derivative of the equation, and it is followed like any body. The rule of a rule that calls the function itself is
followed for second derivatives, and for higher ones only when they are taken.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax.core
import numpy as np

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis import Body, NotIndependent
from jaxsub.jaxpr.axis_places import Coarser, NoRule, Place, Ruled, State, Total
from jaxsub.jaxpr.derivative_rules import NOT_TRACED, is_inexact, jvp_of, traced_vjp

CHECKED_ORDERS = 2
"""Orders of derivatives that are checked when an axis is followed: values, gradients and second derivatives."""


@dataclass(frozen=True, slots=True)
class Follow:
    """A function that follows the axis through a body, and the order of derivative of its equation."""

    call: Callable[[Any, Sequence[Place | None], Sequence[State], int, bool], Body]
    order: int = 0

    def __call__(self, closed: Any, ins: Sequence[Place | None], wanted: Sequence[State] = (), more: int = 0,
                 joins: bool = False) -> Body:  # fmt: skip
        """Follow it; `more` orders of derivatives further in; of what its values are made may join."""
        return self.call(closed, ins, wanted, self.order + more, joins)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Needs of an equation's operands, places of its results, and its bodies."""

    ruled: Ruled
    bodies: tuple[Body, ...]
    rule: Callable[[], tuple[Body, ...]] = tuple


def held_rule(eqn: Any, ins: Sequence[Place | None], follow: Follow, wanted: Sequence[State] = ()) -> Held | None:
    """Follow an axis through an equation with inner jaxprs; `None` for other equations.

    Results of calls, regions and scans can be wanted in slices, as masks are that the forward pass of an inner gradient
    makes for its backward pass.
    """
    primitive, params = compat.unwrapped(eqn)
    if (body := compat.inlined_body(eqn)) is not None:
        return _call(follow(body, ins, wanted))
    if primitive.name in compat.REGIONS:
        return _call(follow(params["jaxpr"], ins, wanted))
    if primitive.name == "scan":
        return _scan(eqn, ins, follow, wanted)
    rules = {"while": _while, "cond": _cond, "custom_jvp_call": _jvp, "custom_vjp_call": _vjp,
             "custom_linear_solve": _linear_solve}  # fmt: skip
    rule = rules.get(primitive.name)
    return rule(eqn, ins, follow) if rule else None


def _call(body: Body) -> Held:
    return Held((body.ins, body.outs), (body,))


def _merged(a: State, b: State) -> State:
    if a is None or b is None or a == b:
        return a or b
    raise NoRule("its steps or branches carry the axis differently")


def _moved(places: Iterable[State], by: int) -> list[Any]:
    return [Place(p.dim + by, p.unit) if isinstance(p, Place) else p for p in places]


def _looped(
    body: Any, ins: Sequence[Place | None], n_consts: int, n_carry: int, follow: Follow, wanted: Sequence[State] = ()
) -> tuple[Body, list[Place | None]]:
    """A loop's body, its carry the same before and after a step.

    Where each slice would make whole values in each step and take its part, what they are made of joins if it can, as
    the tokens do that a decoder reads.
    """
    found = _carried(body, ins, n_consts, n_carry, follow, wanted, False)
    if follow.order == 0 and any(step.eqn is None for step in found[0].steps):
        with contextlib.suppress(NoRule, NotIndependent, Coarser):
            return _carried(body, ins, n_consts, n_carry, follow, wanted, True)
    return found


def _carried(
    body: Any,
    ins: Sequence[Place | None],
    n_consts: int,
    n_carry: int,
    follow: Follow,
    wanted: Sequence[State],
    joins: bool,
) -> tuple[Body, list[Place | None]]:
    ins = list(ins)
    while True:
        carried = slice(n_consts, n_consts + n_carry)
        found = follow(body, ins, (*ins[carried], *wanted), joins=joins)
        more: list[Any] = list(map(_merged, ins, found.ins))
        after = [_merged(a, b) for a, b in zip(more[carried], found.outs, strict=False)]
        if any(isinstance(a, Total) for a in after):
            raise NoRule("it carries a total over the axis from step to step")
        more[carried] = after
        if more == ins:
            return found, ins
        ins = more


def _scan(eqn: Any, ins: Sequence[Place | None], follow: Follow, wanted: Sequence[Any]) -> Held:
    n_consts, n_carry = compat.scan_sizes(eqn)
    n_first = n_consts + n_carry
    if any(place and place.dim == 0 for place in (*ins[n_first:], *wanted[n_carry:])):
        raise NoRule("it runs step by step along the axis")
    inside = [*ins[:n_first], *_moved(ins[n_first:], -1)]
    body, inside = _looped(eqn.params["jaxpr"], inside, n_consts, n_carry, follow, _moved(wanted[n_carry:], -1))
    needs = [*inside[:n_first], *_moved(inside[n_first:], 1)]
    return Held((needs, [*body.outs[:n_carry], *_moved(body.outs[n_carry:], 1)]), (body,))


def _while(eqn: Any, ins: Sequence[Place | None], follow: Follow) -> Held:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    ins = list(ins)
    while True:
        body, inside = _looped(params["body_jaxpr"], ins[n_cond:], n_body, len(ins) - n_cond - n_body, follow)
        test = follow(params["cond_jaxpr"], [*ins[:n_cond], *inside[n_body:]])
        if test.outs[0] is not None:
            raise NoRule("how long it runs depends on the axis")
        more = [*test.ins[:n_cond], *inside[:n_body], *test.ins[n_cond:]]
        if more == ins:
            return Held((ins, body.outs), (test, body))
        ins = more


def _cond(eqn: Any, ins: Sequence[Place | None], follow: Follow) -> Held:
    if ins[0] is not None:
        raise NoRule("which branch runs depends on the axis")
    inside: list[Any] = list(ins[1:])
    outs: list[Any] = [None] * len(eqn.outvars)
    while True:
        bodies = tuple(follow(branch, inside, outs) for branch in eqn.params["branches"])
        more, found = inside, outs
        for body in bodies:
            more, found = list(map(_merged, more, body.ins)), list(map(_merged, found, body.outs))
        if (more, found) == (inside, outs):
            return Held(([None, *inside], outs), bodies)
        inside, outs = more, found


def _linear_solve(eqn: Any, ins: Sequence[Place | None], follow: Follow) -> Held:
    """Follow the product, the solution and that of the transpose; JAX makes the transposed product of the first."""
    jaxprs, ends = eqn.params["jaxprs"], list(accumulate(eqn.params["const_lengths"]))
    ins, n_given, at_solve = list(ins), len(ins) - ends[3], slice(ends[1], ends[2])
    used = [(jaxprs.matvec, slice(0, ends[0])), (jaxprs.transpose_solve, slice(ends[2], ends[3]))]
    used = used if jaxprs.transpose_solve is not None else used[:1]
    while True:
        more, given = list[Any](ins), ins[ends[3] :]
        solve = follow(jaxprs.solve, [*ins[at_solve], *given])
        solved: list[Any] = list(solve.outs[:n_given])
        bodies = [follow(jaxpr, [*ins[at], *solved], given) for jaxpr, at in used]
        more[at_solve], more[ends[3] :] = solve.ins[:-n_given], solve.ins[-n_given:]
        for (_, at), body in zip(used, bodies, strict=True):
            if list(body.ins[-n_given:]) != solved or any(isinstance(o, Total) for o in (*body.outs, *solved)):
                raise NoRule("its solution is the same for the whole axis, or a total over it")
            more[at] = body.ins[:-n_given]
            more[ends[3] :] = map(_merged, more[ends[3] :], body.outs)
        if more == ins:
            return Held((ins, solve.outs), (bodies[0], solve, *bodies[1:]))
        ins = more


def _traced(make: Callable[..., Any], *args: Any) -> Any:
    """Trace a derivative rule; some are not meant for all inputs at once, and say so in their own way."""
    try:
        return make(*args)
    except NOT_TRACED as error:
        raise NoRule("its derivative rule does not take tangents of all it reads") from error


def _jvp(eqn: Any, ins: Sequence[Place | None], follow: Follow) -> Held:
    jvp, avals, tangents = jvp_of(eqn)
    can_move = [is_inexact(a) for a in avals]
    trace = functools.cache(lambda: _traced(jax.make_jaxpr(jvp), avals, tangents))

    def derived(main: Body) -> tuple[Body, ...]:
        moving = [p for p, m in zip(main.ins, can_move, strict=True) if m]
        moved = [o for o, v in zip(main.outs, eqn.outvars, strict=True) if is_inexact(v)]
        return (follow(trace(), (*main.ins, *moving), (*main.outs, *moved), 1),)

    def more(main: Body, rules: tuple[Body, ...]) -> list[Any]:
        found, tangents = list(rules[0].ins[: len(avals)]), iter(rules[0].ins[len(avals) :])
        return [_merged(p, next(tangents)) if m else p for p, m in zip(found, can_move, strict=True)]

    return _ruled(eqn, ins, follow, derived, more)


def _vjp(eqn: Any, ins: Sequence[Place | None], follow: Follow) -> Held:
    trace = functools.cache(lambda: _traced(traced_vjp, eqn))

    def derived(main: Body) -> tuple[Body, ...]:
        results = [o for o, v in zip(main.outs, eqn.outvars, strict=True) if is_inexact(v)]
        if any(o is None for o in results):
            raise NoRule("it has its own backward pass, and a result that is the same for the whole axis")
        closed_forward, closed_backward = trace()
        first = follow(closed_forward, main.ins, main.outs, 1)
        kept: tuple[Any, ...] = first.outs[len(eqn.outvars) :]
        if any(isinstance(k, Total) for k in kept):
            raise NoRule("its backward pass reads a total over the axis")
        cotangents = [o if isinstance(o, Place) else None for o in results]
        wanted = [p for p, a in zip(main.ins, eqn.invars, strict=True) if is_inexact(a)]
        wanted = wanted[len(wanted) - len(closed_backward.out_avals) :]  # what is closed over comes first
        second = follow(closed_backward, (*kept, *cotangents), wanted, 1)
        for out, place, atom in zip(second.outs, wanted, second.jaxpr.outvars, strict=True):
            if place is None and not isinstance(out, Total) and not _is_zero(second.jaxpr, atom):
                raise NoRule("the gradient of what it reads whole is no sum over the axis")
        if second.ins != (*kept, *cotangents):
            raise NoRule("its backward pass needs more along the axis than its forward pass")
        return first, second

    return _ruled(eqn, ins, follow, derived, lambda main, rules: list(rules[0].ins))


def _ruled(
    eqn: Any,
    ins: Sequence[Place | None],
    follow: Follow,
    derived: Callable[[Body], tuple[Body, ...]],
    more: Callable[[Body, tuple[Body, ...]], list[Any]],
) -> Held:
    """Follow the function and its rule; rules of high orders only when they are needed."""
    ins = tuple(ins)
    while True:
        main = follow(eqn.params["call_jaxpr"], ins)
        if main.ins == ins and follow.order >= CHECKED_ORDERS:
            break
        found = tuple(more(main, derived(main))) if main.ins == ins else main.ins
        if found == ins:
            break
        ins = found

    @functools.cache
    def rule() -> tuple[Body, ...]:
        found = derived(main)
        if tuple(more(main, found)) != main.ins:
            raise NoRule("its derivative rule needs more along the axis than the function")
        return found

    return Held((main.ins, main.outs), (main,), rule)


def _is_zero(jaxpr: Any, atom: Any) -> bool:
    """Tell whether an output of a jaxpr is zeros."""
    if not compat.is_var(atom):
        return bool(np.all(np.asarray(atom.val) == 0))
    maker = next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None)
    if maker is None or maker.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape"):
        return False
    return _is_zero(jaxpr, maker.invars[0])
