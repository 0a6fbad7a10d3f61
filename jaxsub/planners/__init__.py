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

What a chain holds and what runs are: `jaxsub.core.chain`. A budget that none of its plans is predicted to fit is
refused with `jaxsub.InfeasibleBudgetError`.

On one chain no planner of the table is predicted to execute more again in a larger budget: `milp` as far as its solver
gets in its time, `optimal` and `auto` from 64 stages on to a thousandth of a forward pass. A function that may be cut
in several ways is planned on more than one chain; where plans need what is predicted a larger budget buys no less there
either, of planners that work out all budgets of a chain at once by a method `solved(chain)`: all of the table that
execute anything again, but `milp`. Where predictions err that is tried on random programs, and not promised.
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
    """What plans a chain."""

    def __call__(self, chain: Chain, budget_bytes: int | None) -> Plan:
        """Plan a chain.

        Args:
            chain: What everything costs.
            budget_bytes: What the plan may be predicted to allocate, in bytes; `None` for the planner's natural plan.

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
    """The names of all planners."""
    return tuple(_TABLE)


def register(name: str, planner: Planner) -> None:
    """Give a planner a name.

    Args:
        name: The name, letters, digits and underscores; one that is taken is given away.
        planner: The planner.

    Raises:
        PlannerError: If the name is no such name, or the planner cannot be called.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise PlannerError(f"a planner's name must be letters, digits and underscores, got {name!r}")
    if not callable(planner) or isinstance(planner, type):
        raise PlannerError(f"a planner is an object called as planner(chain, budget_bytes), got {planner!r}")
    _TABLE[name] = planner


def get(planner: str | Planner) -> Planner:
    """Find a planner by name; a planner is returned as it is.

    Args:
        planner: A name, with whole numbers to make it with where it takes some, such as `recursive(2)`; or a planner.

    Raises:
        PlannerError: If there is no such planner, or it does not take what the parentheses hold.

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
