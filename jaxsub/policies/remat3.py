"""Policies under `jax_remat3`: refuse those that JAX would silently ignore, and apply those of our wrappers by a plan.

JAX's new rematerialisation calls a policy for few primitives, in some versions for none, and silently recomputes all
other results. A policy of ours that is passed to JAX is refused where that would change its decisions. For a foreign
policy that is passed to our wrappers, this module calls it for each equation and makes a plan that saves those results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Segment
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of
from jaxsub.jaxpr.policy_calls import Careful, answer
from jaxsub.jaxpr.trace import Program
from jaxsub.policies.kinds import Policy
from jaxsub.policies.names import JaxPolicy, label

ENTERED = ("jit", "pjit", "closed_call", "scan", "cond")
"""Primitives inside which `jax_remat3` calls the policy for each equation."""

ANSWERS = {"SaveableType": True, "RecomputeType": False}
"""Answers of JAX's policies beside true and false, by the names of their types."""


def plan_where_ignored(policy: JaxPolicy, program: Program) -> Plan | None:
    """Make the region that saves a policy's results; `None` where JAX itself calls the policy for all of them.

    `UnsupportedError` if a region of ours cannot save these results either: those inside loops, branches and custom
    derivatives, or moved to another memory.
    """
    asked = compat.asked_by_remat3()
    if compat.is_known_to_remat3(policy):
        return None
    wanted, ignored, inside = [], set(), set()
    for node, eqn in zip(program.graph.nodes, program.eqns, strict=True):
        if _wants(policy, eqn):
            wanted += [v for v in node.outputs if program.graph.values[v].consumers]
            ignored |= {compat.unwrapped(eqn)[0].name} - asked
        else:
            inside |= set(_wanted_inside(policy, eqn)) - asked
    if inside:
        raise UnsupportedError(
            f"With jax_remat3, JAX {jax.__version__} silently ignores the policy {label(policy)} for "
            f"{', '.join(sorted(inside))} inside loops, branches or functions with derivatives of their own. "
            'Use one of jaxsub.policies, such as "save_costly", or turn jax_remat3 off.'
        )
    if not ignored:
        return None
    n = len(program.eqns)
    segment = Segment(0, n, tuple(sorted(wanted)))
    return Plan(program.fingerprint, Budget(), n, (segment,), planner="policy")


def _wants(policy: JaxPolicy, eqn: Any) -> bool:
    """Tell whether a policy saves an equation's results."""
    primitive, params = compat.unwrapped(eqn)
    if primitive.name in compat.REGIONS:
        return False
    said = Careful(policy)(primitive, *(v.aval for v in eqn.invars), **params)
    kind = type(said).__name__
    if kind == "Offloadable":
        raise UnsupportedError(
            f"With jax_remat3, JAX {jax.__version__} silently ignores the policy {label(policy)}, which moves results "
            "to another memory. Turn jax_remat3 off for it."
        )
    return ANSWERS[kind] if kind in ANSWERS else bool(said)


def _wanted_inside(policy: JaxPolicy, eqn: Any) -> Iterator[str]:
    """Yield the names of primitives whose results a policy saves inside an equation, outside regions of their own."""
    if compat.unwrapped(eqn)[0].name in compat.REGIONS:
        return
    for body in bodies_of(eqn):
        for inner in compat.open_jaxpr(body).eqns:
            if _wants(policy, inner):
                yield compat.unwrapped(inner)[0].name
            else:
                yield from _wanted_inside(policy, inner)


def refuse_ignored(policy: Any, jaxpr: Any) -> None:
    """Refuse a policy of ours that was passed to JAX and saves results that JAX does not call it for."""
    if not isinstance(policy, Policy) or not compat.ignores_policies():
        return
    asked = compat.asked_by_remat3()
    if ignored := sorted(name for name in _saved_by(policy, jaxpr) if name not in asked):
        raise UnsupportedError(
            f"With jax_remat3, JAX {jax.__version__} recomputes {', '.join(ignored)} and silently ignores the policy "
            f'{policy}, which saves that. Use jaxsub.policies.checkpoint(fun, policy="{policy}"), '
            "jaxsub.flax.linen.remat, jaxsub.flax.nnx.remat or jaxsub.equinox.filter_checkpoint instead, or turn "
            "jax_remat3 off."
        )


def _saved_by(policy: Callable[..., Any], jaxpr: Any) -> Iterator[str]:
    """Yield the names of primitives whose results a policy saves, inside loops, branches and calls too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ENTERED:
            for body in bodies_of(eqn):
                yield from _saved_by(policy, compat.open_jaxpr(body))
        elif answer(policy, eqn):
            yield eqn.primitive.name


compat.watch_regions(refuse_ignored)
