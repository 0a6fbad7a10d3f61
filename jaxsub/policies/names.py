"""Policies by name: the ready-made ones, and reading a name from a config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import jax

from jaxsub.core.budget import Budget
from jaxsub.core.errors import PolicyError
from jaxsub.jaxpr.policy_calls import bare
from jaxsub.policies.kinds import Policy, Recursive, SaveAll, SaveCostly, SaveNothing, SaveWithin, Sqrt

JaxPolicy = Callable[..., Any]
"""A policy by JAX's protocol: `policy(primitive, *avals, **params)`, true where the result may be saved."""

save_nothing = SaveNothing()
save_all = SaveAll()
save_costly = SaveCostly()
sqrt = Sqrt()


def save_within(limit: str | int) -> SaveWithin:
    """Make the policy that saves at most `limit`.

    Args:
        limit: Bytes as an int, or text such as `"2GiB"` or `"512MB"`.

    Raises:
        BudgetError: If the limit cannot be read or is not positive.
        PolicyError: If it is a fraction: a policy has no total to take it of.

    Example:
        >>> save_within("2GiB")
        SaveWithin(n_bytes=2147483648)
    """
    n_bytes = Budget.parse(limit).n_bytes
    if n_bytes is None:
        raise PolicyError(f'save_within takes bytes as an int or as text such as "2GiB", got {limit!r}.')
    return SaveWithin(n_bytes)


def recursive(k: int = 1) -> Recursive:
    """Make the policy of the paper's recursion.

    Args:
        k: How many results to save at every level, at least 1.

    Example:
        >>> print(recursive(2))
        recursive(2)
    """
    return Recursive(k)


def names() -> tuple[str, ...]:
    """List the names of all policies, with their arguments."""
    return ("save_nothing", "save_all", "save_costly", "save_within(BYTES)", "sqrt", "recursive(K)")


def label(policy: Policy | JaxPolicy) -> str:
    """Name a policy for people: ours by its name, JAX's by that of its function.

    Example:
        >>> import jax
        >>> label(save_costly), label(jax.checkpoint_policies.everything_saveable)
        ('save_costly', 'everything_saveable')
        >>> label(jax.checkpoint_policies.save_from_both_policies(save_all, save_all))
        'save_from_both_policies'
    """
    policy = bare(policy)
    if isinstance(policy, Policy):
        return str(policy)
    named = [n for n, p in vars(jax.checkpoint_policies).items() if p is policy]
    if named:
        return named[0]
    function = getattr(getattr(policy, "func", policy), "__qualname__", "")
    if function:
        return str(function).split(".<locals>")[0]
    if is_dataclass(policy) and (values := {f.name: getattr(policy, f.name) for f in fields(policy)}):
        # sets are sorted: the same text in every process
        words = (f"{name}={sorted(v) if isinstance(v, frozenset) else v!r}" for name, v in values.items())
        return f"{type(policy).__name__}({', '.join(words)})"
    return type(policy).__name__ if " at 0x" in repr(policy) else repr(policy)


def get(policy: str | Policy | JaxPolicy | None) -> Policy | JaxPolicy:
    """Find a policy by name; return a policy as it is. `None` is `save_nothing`, as for JAX.

    Args:
        policy: A name such as `"save_costly"`, `"save_costly(+exp, -sort)"`, `"save_within(2GiB)"`, `"sqrt"` or
            `"recursive(2)"`; a policy of ours or of JAX's; or `None`.

    Raises:
        PolicyError: If there is no such policy, or it does not take these arguments.
        BudgetError: If the limit of `save_within` cannot be read.

    Example:
        >>> get("save_within(1.5KiB)")
        SaveWithin(n_bytes=1536)
    """
    if policy is None:
        return save_nothing
    if not isinstance(policy, str):
        if callable(policy) and not isinstance(policy, type):
            return policy
        raise PolicyError(
            f"A policy is a name or an object of jaxsub.policies or jax.checkpoint_policies, got {policy!r}."
        )
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", policy)
    name, text = (match[1], (match[2] or "").strip()) if match else (policy, "")
    if name in _MAKERS:
        return _MAKERS[name](text)
    raise PolicyError(f"There is no policy {policy!r}; there are {', '.join(names())}.")


def _numbers(text: str, make: Callable[..., Policy]) -> Policy:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wanted = len(inspect.signature(make).parameters)
    if len(parts) > wanted or not all(part.isdecimal() for part in parts):
        raise PolicyError(f"{make.__name__}({text}): give at most {wanted} whole number.")
    return make(*map(int, parts))


def _costly(text: str) -> SaveCostly:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if part[0] not in "+-"]:
        raise PolicyError(f"save_costly({text}): write +name for costly and -name for cheap, got {wrong[0]!r}.")
    return SaveCostly([p[1:] for p in parts if p[0] == "+"], [p[1:] for p in parts if p[0] == "-"])  # type: ignore[arg-type]


def _bare(policy: Policy) -> Callable[[str], Policy]:
    def make(text: str) -> Policy:
        if text:
            raise PolicyError(f"The policy {policy} takes nothing in parentheses, got {text!r}.")
        return policy

    return make


_MAKERS: dict[str, Callable[[str], Policy]] = {
    "save_nothing": _bare(save_nothing),
    "save_all": _bare(save_all),
    "save_costly": _costly,
    "save_within": save_within,
    "sqrt": _bare(sqrt),
    "recursive": lambda text: _numbers(text, recursive),
}
