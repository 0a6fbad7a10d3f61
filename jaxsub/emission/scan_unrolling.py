"""Unroll several steps of a scan, or all of them, into one program.

A scan stacks residuals in arrays of one length, which are live for a whole block; so its blocks have one size, and the
carries at their starts are live until the last block is done. Unrolled steps are stages like any others: regions may
get shorter as less memory is left for them, as in the best schedules, and a stage's residuals are dead after its
backward pass. The program grows with the steps, so only few equations are unrolled.

Source: Griewank and Walther, *Revolve* (2000): the best lengths between checkpoints are unequal.
"""

from __future__ import annotations

from typing import Any

import jax.core
import jax.numpy as jnp

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.inline import flatten_jaxpr
from jaxsub.jaxpr.trace import Program, program_of


def unrolled(body: Program, n_consts: int, n_carry: int, n_steps: int, *, reverse: bool) -> Program:
    """Unroll several steps of a loop's body, a `body_program` with its own constants first.

    The program takes constants, carry and stacked slices of xs, and returns the carry and stacked slices of ys; where
    `reverse`, the last slices come first.
    """
    step = compat.make_jaxpr_of(body.eqns, body.invars, body.outvars, body.traced)

    def steps(*args: Any) -> tuple[Any, ...]:
        consts, carry, xs = args[:n_consts], list(args[n_consts : n_consts + n_carry]), args[n_consts + n_carry :]
        made: list[list[Any]] = [[] for _ in range(n_steps)]
        for i in reversed(range(n_steps)) if reverse else range(n_steps):
            slices = (jax.lax.index_in_dim(x, i, keepdims=False) for x in xs)
            outs = jax.core.eval_jaxpr(step, (), *consts, *carry, *slices)
            carry, made[i] = outs[:n_carry], outs[n_carry:]
        return (*carry, *(jnp.stack(y) for y in zip(*made, strict=True)))

    n_alone = n_consts + n_carry
    alone, sliced = body.invars[:n_alone], body.invars[n_alone:]
    stack = jax.make_jaxpr(lambda *xs: [jax.lax.broadcast(x, (n_steps,)) for x in xs])
    closed = jax.make_jaxpr(steps)(*[v.aval for v in alone], *stack(*[v.aval for v in sliced]).out_avals)
    eqns, invars, outvars, consts = flatten_jaxpr(closed, keeps_slices=True)
    positions = {len(consts) + i for i in body.differentiated}
    names = ["const"] * len(invars)
    found = program_of(eqns, invars, outvars, [*consts, *body.consts], positions, None, None, names, closed)
    return body.part(found)
