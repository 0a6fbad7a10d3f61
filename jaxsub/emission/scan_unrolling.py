"""Loops written out: several steps of a scan, or all of them, one after the other as one program.

What a scan stacks it stacks in arrays of one length, there from the first step of a block to its last; so its blocks
are all alike, and the carries at their starts stand until the last is done with. Steps that are written out are stages
like any others: regions of them may grow shorter as less memory is left for them, as the best schedules have it, and
what a stage kept is free as soon as its backward pass is through. The price is a program that grows with the steps, so
only few equations are written out.

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
    """Several steps of a loop as one: a program of constants, carry and stacked slices of xs, in this order.

    Args:
        body: The body, from `body_program`.
        n_consts: How many of its inputs are constants, those of its own among them.
        n_carry: How many it carries.
        n_steps: How many steps it takes.
        reverse: Whether the last slices come first.

    Returns:
        The program; it returns the carry and stacked slices of ys.

    Example:
        >>> from jaxsub.emission.scans import body_program
        >>> from jaxsub.jaxpr.trace import trace
        >>> def f(ws, x):
        ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
        >>> body = body_program(trace(f, (jnp.ones((6, 2, 2)), jnp.ones((2, 2))), {}), 0)
        >>> [eqn.primitive.name for eqn in unrolled(body, 0, 1, 2, reverse=False).eqns]
        ['slice', 'squeeze', 'dot_general', 'tanh', 'slice', 'squeeze', 'dot_general', 'tanh']
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
    stacks = [a.update(shape=(n_steps, *a.shape)) for a in (v.aval for v in sliced)]
    closed = jax.make_jaxpr(steps)(*[v.aval for v in alone], *stacks)
    eqns, invars, outvars, consts = flatten_jaxpr(closed, keeps_slices=True)
    positions = {len(consts) + i for i in body.differentiated}
    names = ["const"] * len(invars)
    written = program_of(eqns, invars, outvars, [*consts, *body.consts], positions, None, None, names, closed)
    return body.part(written)
