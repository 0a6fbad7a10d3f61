"""`checkpoint`: wrap a function under any policy.

`jax.checkpoint` applies the policy where it can; otherwise the function is traced, the policy makes a plan of it, and
the plan is emitted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxsub.core.checks import require_function, several
from jaxsub.core.wrapped import name_of
from jaxsub.emission.emit import emit
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.static_leaves import fixed_leaves, passed, put_back, without
from jaxsub.jaxpr.trace import Program, trace
from jaxsub.policies.kinds import Policy, SaveAll, SaveCostly, SaveNothing
from jaxsub.policies.names import JaxPolicy, get
from jaxsub.policies.remat3 import plan_where_ignored


def checkpoint(
    fun: Callable[..., Any],
    *,
    policy: str | Policy | JaxPolicy | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Wrap a function so that a policy decides what it saves: `jax.checkpoint` for every policy here.

    Args:
        fun: The function. Static leaves of its arguments, such as functions and the static fields of Equinox's
            modules, are passed through.
        policy: The policy or its name; see `get`.
        prevent_cse: As for `jax.checkpoint`, where JAX alone applies the policy.
        static_argnums: Positions of static arguments, as for `jax.checkpoint`.

    Returns:
        A function with the same arguments and results.

    Raises:
        PolicyError: If there is no such policy.
        TypeError: If `fun` is no function.
        UnsupportedError: At the call, with jax_remat3, if a foreign policy saves results that JAX does not call it for
            and that a region here cannot save: results in loops and branches, or moved to another memory.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> block = checkpoint(lambda w, x: jnp.tanh(x @ w), policy="save_within(1MiB)")
        >>> jax.grad(lambda w: block(w, jnp.ones((3, 2))).sum())(jnp.zeros((2, 2))).tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """
    require_function(fun, "policies.checkpoint", "the policy")
    found = get(policy)
    numbers = several(static_argnums, "static_argnums")

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        flat, leaves = _of_arrays(fun, args, kwargs, numbers)
        if isinstance(found, SaveAll):
            return fun(*args, **kwargs)
        if isinstance(found, SaveNothing):
            return compat.checkpoint(flat, prevent_cse=prevent_cse)(*leaves)
        if not isinstance(found, Policy):
            return _call_foreign(found, flat, leaves, prevent_cse)
        return _call_planned(found, flat, leaves, prevent_cse)

    return checkpointed


def _call_foreign(policy: JaxPolicy, flat: Callable[..., Any], leaves: Sequence[Any], prevent_cse: bool) -> Any:
    """Call under a foreign policy: by JAX wherever JAX calls it."""
    if not compat.ignores_policies():
        return compat.checkpoint(flat, policy=policy, prevent_cse=prevent_cse)(*leaves)
    if policy is jax.checkpoint_policies.everything_saveable:
        return flat(*leaves)
    program = trace(flat, leaves, {}, argnums=tuple(range(len(leaves))))
    if (plan := plan_where_ignored(policy, program)) is not None:
        run = emit(program, plan)
    else:
        run = jax.checkpoint(emit(program, SaveAll().plan(program)), policy=policy, prevent_cse=prevent_cse)
    return passed(program.out_tree, run(*program.consts, *leaves))


def _call_planned(policy: Policy, flat: Callable[..., Any], leaves: Sequence[Any], prevent_cse: bool) -> Any:
    """Trace once, since tracing a module advances its random streams; then emit the policy's plan.

    JAX calls a policy for every equation, inside loops too, so it applies `SaveCostly` itself, unless it ignores
    policies or the function has regions of its own, whose equations it would decide as if outside regions.
    """
    if not any(jax.numpy.issubdtype(jax.numpy.result_type(x), jax.numpy.inexact) for x in leaves):
        return flat(*leaves)  # no gradient flows through it
    program = trace(flat, leaves, {}, argnums=tuple(range(len(leaves))))
    if isinstance(policy, SaveCostly) and not compat.ignores_our_policies() and not _has_regions(program):
        run = compat.checkpoint(emit(program, SaveAll().plan(program)), policy=policy, prevent_cse=prevent_cse)
    else:
        run = emit(program, policy.plan(program))
    return passed(program.out_tree, run(*program.consts, *leaves))


def _has_regions(program: Program) -> bool:
    return any(compat.unwrapped(eqn)[0].name in compat.REGIONS for eqn in program.eqns)


def _of_arrays(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], static: Sequence[int]
) -> tuple[Callable[..., Any], list[Any]]:
    """Make the function of its array leaves alone, and list those leaves."""
    outside = [n for n in static if not -len(args) <= n < len(args)]
    if outside:
        raise ValueError(f"static_argnums names argument {outside[0]}, but there are {len(args)} positional ones.")
    static_places = {n % len(args) for n in static}
    dynamic = [None if i in static_places else a for i, a in enumerate(args)]
    structure = jax.tree.structure((dynamic, kwargs))
    fixed = fixed_leaves((dynamic, kwargs))

    def flat(*arrays: Any) -> Any:
        positional, keywords = put_back(structure, arrays, fixed)
        return fun(*(args[i] if i in static_places else a for i, a in enumerate(positional)), **keywords)

    flat.__name__ = flat.__qualname__ = name_of(fun)
    return flat, jax.tree.leaves(without((dynamic, kwargs), fixed))
