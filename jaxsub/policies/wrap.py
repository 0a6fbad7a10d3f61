"""`checkpoint`: wrap a function under any policy.

Where JAX can carry a policy out it does, by `jax.checkpoint`; otherwise the function is traced, the policy makes a
plan of it, and the plan is emitted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxsub import compat
from jaxsub.emit import emit
from jaxsub.errors import UnsupportedError
from jaxsub.flops import bodies_of
from jaxsub.leaves import fixed_leaves, put_back, without
from jaxsub.policies.kinds import Policy, SaveAll, SaveCostly, SaveNothing
from jaxsub.policies.names import JaxPolicy, get
from jaxsub.program import Program, trace

REGIONS = ("checkpoint", "remat", "remat2", "call_hi_primitive")
"""Primitives of the user's own regions, by version; the last is that of `jax_remat3`."""

ENTERED = ("jit", "pjit", "closed_call", "scan", "cond")
"""Primitives inside which `jax_remat3` asks about each equation."""


def checkpoint(
    fun: Callable[..., Any],
    *,
    policy: str | Policy | JaxPolicy | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Wrap a function so that its backward pass finds what a policy saves: `jax.checkpoint` for every policy here.

    Args:
        fun: The function. Functions among the leaves of its arguments, and what Equinox's modules hold beside
            arrays, are handed through as they are.
        policy: What to save; see `get`.
        prevent_cse: As for `jax.checkpoint`, where a policy is carried out by JAX alone.
        static_argnums: Positions of arguments that are no arrays, as for `jax.checkpoint`.

    Returns:
        A function with the same arguments and results.

    Raises:
        PolicyError: If there is no such policy.
        UnsupportedError: At the call, if JAX would silently ignore a policy that is not ours.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> block = checkpoint(lambda w, x: jnp.tanh(x @ w), policy="save_within(1MiB)")
        >>> jax.grad(lambda w: block(w, jnp.ones((3, 2))).sum())(jnp.zeros((2, 2))).tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """
    found = get(policy)
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        flat, leaves = _of_arrays(fun, args, kwargs, numbers)
        if isinstance(found, SaveAll):
            return fun(*args, **kwargs)
        if isinstance(found, SaveNothing):
            return jax.checkpoint(flat, prevent_cse=prevent_cse)(*leaves)
        if not isinstance(found, Policy):
            _check_foreign(found)
            return jax.checkpoint(flat, policy=found, prevent_cse=prevent_cse)(*leaves)
        return _call_planned(found, flat, leaves, prevent_cse)

    return checkpointed


def _check_foreign(policy: Any) -> None:
    module = getattr(policy, "__module__", "") or ""
    if not isinstance(policy, Policy) and not module.startswith("jax.") and compat.ignores_policies():
        raise UnsupportedError(
            f"With jax_remat3, JAX {jax.__version__} silently ignores the policy {policy!r}. "
            'Use one of jaxsub.policies, such as "save_costly", or turn jax_remat3 off.'
        )


def _refuse_ignored(policy: Any, jaxpr: Any) -> None:
    """Refuse a policy of ours that was handed to JAX itself and would save what JAX does not ask it about."""
    if not isinstance(policy, Policy) or not compat.ignores_policies():
        return
    asked = compat.asked_by_remat3()
    if ignored := sorted(name for name in _saved_by(policy, jaxpr) if name not in asked):
        raise UnsupportedError(
            f"With jax_remat3, JAX {jax.__version__} recomputes {', '.join(ignored)} and silently ignores the policy "
            f'{policy}, which saves that. Use jaxsub.policies.checkpoint(fun, policy="{policy}"), '
            "jaxsub.flax.linen.remat or jaxsub.flax.nnx.remat instead, or turn jax_remat3 off."
        )


def _saved_by(policy: Policy, jaxpr: Any) -> Iterator[str]:
    """The names of the primitives that a policy saves results of, inside loops, branches and calls too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ENTERED:
            for body in bodies_of(eqn):
                yield from _saved_by(policy, compat.open_jaxpr(body))
        elif policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params):
            yield eqn.primitive.name


compat.watch_regions(_refuse_ignored)


def _call_planned(policy: Policy, flat: Callable[..., Any], leaves: Sequence[Any], prevent_cse: bool) -> Any:
    """Trace once, since a module counts what it draws as it is traced; then emit what the policy plans.

    JAX asks a policy of every equation, within loops too, so `SaveCostly` is left to it where it can be: not where it
    ignores policies, and not around regions of their own, which it would ask about as if they were none.
    """
    if not any(jax.numpy.issubdtype(jax.numpy.result_type(x), jax.numpy.inexact) for x in leaves):
        return flat(*leaves)  # nothing flows back through it
    program = trace(flat, leaves, {}, argnums=tuple(range(len(leaves))))
    if isinstance(policy, SaveCostly) and not compat.ignores_policies() and not _has_regions(program):
        run = jax.checkpoint(emit(program, SaveAll().plan(program)), policy=policy, prevent_cse=prevent_cse)
    else:
        run = emit(program, policy.plan(program))
    return jax.tree.unflatten(program.out_tree, run(*program.consts, *leaves))


def _has_regions(program: Program) -> bool:
    return any(node.primitive in REGIONS for node in program.graph.nodes)


def _of_arrays(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], static: Sequence[int]
) -> tuple[Callable[..., Any], list[Any]]:
    """The function of its array leaves alone, and those leaves."""
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

    flat.__name__ = flat.__qualname__ = getattr(fun, "__name__", "function")
    return flat, jax.tree.leaves(without((dynamic, kwargs), fixed))
