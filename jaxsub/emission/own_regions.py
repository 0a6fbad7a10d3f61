"""The function's own `jax.checkpoint` regions, opened: what is inside them is planned like everything else.

A region in a backward pass stays, such as that of a gradient in a loss; so does one that a plan of an inner function
emitted, and one inside a derivative rule or a `shard_map`.
"""

from __future__ import annotations

import os
from typing import Any

from jaxsub.emission.bodies import PLANNED, with_bodies
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.inline import inline_regions
from jaxsub.jaxpr.trace import Program, remembered


@remembered
def n_own_regions(program: Program) -> int:
    """How many regions of the function's own are in a program, its loops and its conditionals.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxsub.jaxpr.trace import trace
        >>> layer = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
        >>> n_own_regions(trace(lambda x: layer(layer(x)).sum(), [jnp.ones(3)], {}))
        2
    """
    return _count(program.eqns)


def _count(eqns: Any) -> int:
    found = 0
    for eqn in eqns:
        params = eqn.params
        if _is_own(eqn):
            found += 1 + _count(compat.open_jaxpr(compat.unwrapped(eqn)[1]["jaxpr"]).eqns)
        elif eqn.primitive.name in PLANNED:
            bodies = params["branches"] if "branches" in params else (params["jaxpr"],)
            found += sum(_count(compat.open_jaxpr(body).eqns) for body in bodies)
        elif (inner := compat.inlined_body(eqn)) is not None:
            found += _count(compat.open_jaxpr(inner).eqns)
    return found


@remembered
def open_own_regions(program: Program) -> Program:
    """Inline the function's own regions, in loops and conditionals too.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxsub.jaxpr.trace import trace
        >>> program = trace(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))(x).sum(), [jnp.ones(3)], {})
        >>> [e.primitive.name for e in open_own_regions(program).eqns]
        ['cos', 'sin', 'reduce_sum']
    """
    found = program.with_eqns(*inline_regions(program.eqns, program.outvars, _is_own))
    nodes = [i for i, eqn in enumerate(found.eqns) if eqn.primitive.name in PLANNED and _count([eqn])]
    if not nodes:
        return found
    eqns = list(found.eqns)
    for node in nodes:
        eqns[node] = with_bodies(found, node, lambda body, _: _jaxpr_of(open_own_regions(body)))
    return found.with_eqns(eqns)


def _jaxpr_of(body: Program) -> Any:
    return compat.make_jaxpr_of(body.eqns, body.invars, body.outvars)


def _is_own(eqn: Any) -> bool:
    """Whether an equation is a region as the user wrote it."""
    primitive, params = compat.unwrapped(eqn)
    if primitive.name not in compat.REGIONS or params.get("differentiated"):
        return False
    made_at = getattr(compat.open_jaxpr(params["jaxpr"]).debug_info, "func_src_info", None) or ""
    return os.path.join(compat.OURS, "emission", "") not in made_at
