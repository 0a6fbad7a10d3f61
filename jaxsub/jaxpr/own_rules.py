"""Equations that plans differentiate by rules of their own: what compilers make of JAX's needs far more memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxsub.jaxpr.grouped_conv_vjp import in_blocks, is_grouped
from jaxsub.jaxpr.max_pool_vjp import by_slices, is_max_pooling
from jaxsub.jaxpr.trace import Program


def rules_of(program: Program) -> str:
    """The platform by whose rules a program is differentiated; empty if not known, or where channels may be sharded."""
    return "" if program.is_sharded else program.platform


def with_own_rules(eqns: Iterable[Any], platform: str) -> list[Any]:
    """Replace equations by others of the same values and gradients; other equations stay as they are."""
    return [_replaced(eqn, platform) for eqn in eqns]


def _replaced(eqn: Any, platform: str) -> Any:
    if is_max_pooling(eqn):
        return by_slices(eqn)
    return in_blocks(eqn) if platform == "cpu" and is_grouped(eqn) else eqn
