"""Equations that plans evaluate or differentiate by rules of their own: those of JAX need far more memory, compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxsub.jaxpr.grouped_conv_vjp import in_blocks, is_grouped
from jaxsub.jaxpr.late_zeros import with_late_zeros
from jaxsub.jaxpr.max_pool_vjp import by_slices, is_max_pooling
from jaxsub.jaxpr.trace import Program


def rules_of(program: Program) -> str:
    """The platform by whose rules a program is differentiated; empty if not known, or where channels may be sharded."""
    return "" if program.is_sharded else program.platform


def with_own_rules(eqns: Iterable[Any], platform: str) -> list[Any]:
    """Replace equations by others of the same values and gradients; other equations stay as they are."""
    found = [_replaced(eqn, platform) for eqn in eqns]
    return with_late_zeros(found) if platform == "cpu" else found


def _replaced(eqn: Any, platform: str) -> Any:
    if is_max_pooling(eqn):
        return by_slices(eqn)
    return in_blocks(eqn) if platform == "cpu" and is_grouped(eqn) else eqn
