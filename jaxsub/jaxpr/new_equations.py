"""Make equations: of barriers, of slices, and of calls of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxsub.jaxpr import compat

IN_SLICES = "jaxsub_slices"
"""What a `jit` equation is called that executes a run of equations in slices."""


def runs_in_slices(eqn: Any) -> bool:
    """Tell whether an equation executes a run of equations in slices."""
    return bool(eqn.params.get("name") == IN_SLICES)


def is_over_slices(eqn: Any) -> bool:
    """Tell whether a loop, or a function with its own derivative, is of `jaxsub.emission.chunks`, not the user's."""
    info = getattr(compat.open_jaxpr(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))), "debug_info", None)
    return getattr(info, "func_src_info", "").startswith(IN_SLICES)


def call_eqn(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """An equation that calls a function, also under `jax.disable_jit()`."""
    with jax.disable_jit(False):
        (call,) = compat.open_jaxpr(jax.make_jaxpr(jax.jit(function))(*avals)).eqns
    return call


def in_place_of(eqn: Any, function: Callable[..., Any]) -> Any:
    """An equation that evaluates a function, traced to one equation, of another's operands and replaces it."""
    with jax.disable_jit(False):
        closed = jax.make_jaxpr(function)(*(compat.shape_of(v.aval) for v in eqn.invars))
    (found,) = compat.open_jaxpr(closed).eqns
    return found.replace(invars=list(eqn.invars), outvars=list(eqn.outvars), source_info=eqn.source_info)


@functools.cache
def barrier_eqn() -> Any:
    """An equation of an optimization barrier, to replace the variables of."""
    return jax.make_jaxpr(jax.lax.optimization_barrier)(1.0).eqns[0]


def slice_eqn(made: Any) -> Any:
    """An equation that takes a variable from a larger array, a new variable: for analyses, not to be evaluated."""
    return _slice_eqn().replace(invars=[compat.new_var(made.aval), *_slice_eqn().invars[1:]], outvars=[made])


@functools.cache
def _slice_eqn() -> Any:
    pair = jax.ShapeDtypeStruct((2,), "float32")
    return jax.make_jaxpr(lambda x: jax.lax.dynamic_slice(x, (0,), (1,)))(pair).eqns[-1]
