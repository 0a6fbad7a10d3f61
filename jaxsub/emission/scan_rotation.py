"""Rotate a loop: turn a scan over steps of A then B into A, a scan over steps of B then A, and B.

A loop saves its carry for every step, but a step's derivative may read another value. A step of tanh(x @ w) carries the
activation and differentiates at the value before it: both are saved, or the product is recomputed. Rotated to begin
after the product, the loop carries the value before the activation, and everything else is cheap to recompute. An
unrolled loop does not need this: there a planner cuts anywhere.

A rotated step reads slices of xs of two steps, its own and the next one's. It reads them at their index from the whole
xs, as in `jaxsub.emission.scans`; only gradients come as slices, one step short, and are concatenated at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax.core

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program, program_of

Values = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Rotated:
    """A rotated loop.

    Attributes:
        body: The rotated step, as a program of constants, carry and slices of xs.
        n_carry: How many values it carries.
        first: `first(constants, carry, slices of the first step) -> rotated carry`.
        last: `last(constants, rotated carry, slices of the last step) -> carry and slices of ys`.
        here: Which of the loop's xs a step reads at its own index.
        ahead: Which of them it reads one step ahead; they come after the others.
    """

    body: Program
    n_carry: int
    first: Callable[..., Values]
    last: Callable[..., Values]
    here: tuple[int, ...]
    ahead: tuple[int, ...]


def rotated(body: Program, n_consts: int, n_carry: int, at: int) -> Rotated:
    """Rotate a loop to begin its steps at a node of their body, a `body_program` with its own constants first."""
    consts, carry = body.invars[:n_consts], body.invars[n_consts : n_consts + n_carry]
    xs = body.invars[n_consts + n_carry :]
    before, after = body.eqns[:at], body.eqns[at:]
    read_after = _variables([*(a for e in after for a in e.invars), *body.outvars])
    read_before = _variables(a for e in before for a in e.invars)
    made = [v for e in before for v in e.outvars]
    crossing = tuple(v for v in (*carry, *made) if v in read_after)
    here = tuple(i for i, v in enumerate(xs) if v in read_after)
    ahead = tuple(i for i, v in enumerate(xs) if v in read_before)

    # the first half of the next step: its carry is this step's result, all other variables are new
    new = dict(zip(carry, body.outvars[:n_carry], strict=True))
    next_xs = [compat.new_var(xs[i].aval) for i in ahead]
    new.update(zip((xs[i] for i in ahead), next_xs, strict=True))
    following = []
    for eqn in before:
        outvars = [compat.new_var(v.aval) for v in eqn.outvars]
        following.append(eqn.replace(invars=[new.get(a, a) if compat.is_var(a) else a for a in eqn.invars],
                                     outvars=outvars))  # fmt: skip
        new.update(zip(eqn.outvars, outvars, strict=True))
    invars = [*consts, *crossing, *(xs[i] for i in here), *next_xs]
    active = {body.invars[i] for i in body.differentiated} | set(crossing)
    active |= {v for v, i in zip(next_xs, ahead, strict=True) if xs[i] in active}
    rotated_body = program_of(
        [*after, *following], invars, [*(new[v] for v in crossing), *body.outvars[n_carry:]], list(body.consts),
        {i for i, v in enumerate(invars) if v in active}, None, None, ["const"] * len(invars), body.traced,
    )  # fmt: skip
    return Rotated(
        body.part(rotated_body),
        len(crossing),
        _function(body, before, [*consts, *carry, *xs], crossing),
        _function(body, after, [*consts, *crossing, *xs], body.outvars),
        here,
        ahead,
    )


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {a for a in atoms if compat.is_var(a)}


def _function(body: Program, eqns: Any, invars: Any, outvars: Any) -> Callable[..., Values]:
    jaxpr = compat.make_jaxpr_of(eqns, invars, outvars, body.traced)

    def call(consts: Values, carry: Values, xs: Values) -> Values:
        return tuple(jax.core.eval_jaxpr(jaxpr, (), *body.consts, *consts, *carry, *xs))

    return call
