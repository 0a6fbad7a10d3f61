"""Planners: one method a file, one signature, (Chain, budget_bytes) -> Plan, and the table of their names.

A planner of your own is any object that can be called so, in five lines:

    >>> import jaxsub
    >>> from jaxsub.core.chain import Run
    >>> from jaxsub.core.plan import plan_from_runs
    >>> class EveryOther:
    ...     def __call__(self, chain, budget_bytes):
    ...         runs = [chain.recompute(s) if s % 2 else Run(s, s + 1) for s in range(len(chain.stages))]
    ...         return plan_from_runs(chain, runs, budget=jaxsub.Budget(budget_bytes), planner="every_other")

Pass it as `planner=`, or give it a name with `jaxsub.planners.register("every_other", EveryOther())` and pass that:

    >>> import jax.numpy as jnp
    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> args = [jnp.eye(4)] * 6, jnp.ones((3, 4))
    >>> plan = jaxsub.plan(loss, *args, planner=EveryOther(), verify=False)
    >>> plan.planner, plan.n_regions
    ('every_other', 3)

`jaxsub.core.chain` explains chains and runs. A planner raises `jaxsub.InfeasibleBudgetError` where none of its plans is
predicted to fit.

On one chain a larger budget never gets a plan that is predicted to recompute more: for `milp` as far as its solver gets
in its time, for `optimal` and `auto` from 64 stages on to a thousandth of a forward pass. Over several partitions of a
program the same holds, where predictions are exact, for planners that plan a chain for all budgets at once (a method
`solved(chain)`): all of the table but `milp`. Where predictions err it is tested on random programs, not promised.
"""

from __future__ import annotations

import difflib
import re
from typing import Protocol

from jaxsub.core.chain import Chain
from jaxsub.core.errors import PlannerError
from jaxsub.core.plan import Plan
from jaxsub.planners.auto import Auto
from jaxsub.planners.baselines import Barriers, Plain
from jaxsub.planners.cheap import Cheap
from jaxsub.planners.chen import Chen
from jaxsub.planners.milp import Milp
from jaxsub.planners.optimal import Optimal
from jaxsub.planners.recursive import Recursive
from jaxsub.planners.revolve import Revolve


class Planner(Protocol):
    """Any object that plans a chain."""

    def __call__(self, chain: Chain, budget_bytes: int | None) -> Plan:
        """Plan a chain.

        Args:
            chain: The stages, their options and their costs.
            budget_bytes: The most that the plan may be predicted to allocate, in bytes; `None` for the planner's
                natural plan.

        Raises:
            InfeasibleBudgetError: If none of its plans is predicted to fit; asking for `least_bytes` must succeed.
        """
        raise NotImplementedError


_TABLE: dict[str, Planner] = {
    "auto": Auto(),
    "optimal": Optimal(),
    "milp": Milp(),
    "chen": Chen(),
    "cheap": Cheap(),
    "recursive": Recursive(),
    "revolve": Revolve(),
    "barriers": Barriers(),
    "plain": Plain(),
}


def names() -> tuple[str, ...]:
    """List the names of all planners."""
    return tuple(_TABLE)


def register(name: str, planner: Planner) -> None:
    """Give a planner a name.

    Args:
        name: Letters, digits and underscores; a name that is taken now means this planner.
        planner: The planner.

    Raises:
        PlannerError: If the name has other characters, or the planner cannot be called.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise PlannerError(f"a planner's name must be letters, digits and underscores, got {name!r}")
    if not callable(planner) or isinstance(planner, type):
        raise PlannerError(f"a planner is an object called as planner(chain, budget_bytes), got {planner!r}")
    _TABLE[name] = planner


def get(planner: str | Planner) -> Planner:
    """Find a planner by name; return a planner as it is.

    Args:
        planner: A name, with whole numbers as arguments where the planner takes some, such as `recursive(2)`; or a
            planner.

    Raises:
        PlannerError: If there is no such planner, or it does not take these arguments.

    Example:
        >>> get("recursive(2)")
        Recursive(k=2)
    """
    if not isinstance(planner, str):
        if callable(planner) and not isinstance(planner, type):
            return planner
        raise PlannerError(f"a planner is a name or an object called as planner(chain, budget_bytes), got {planner!r}")
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([\d\s,]*)\))?\s*", planner)
    if match is None or match[1] not in _TABLE:
        raise PlannerError(f"there is no planner {planner!r}{_near(planner)}; there are {', '.join(sorted(_TABLE))}")
    found = _TABLE[match[1]]
    return found if match[2] is None else _made_with(found, match[1], match[2])


def _near(name: str) -> str:
    near = difflib.get_close_matches(name.strip().lower(), _TABLE, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _made_with(planner: Planner, name: str, text: str) -> Planner:
    numbers = [int(number) for number in text.split(",") if number.strip()]
    try:
        return type(planner)(*numbers)
    except (TypeError, ValueError) as error:
        raise PlannerError(f"the planner {name!r} does not take ({text.strip()}): {error}") from error
