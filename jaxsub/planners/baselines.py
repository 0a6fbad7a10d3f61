"""`plain` and `barriers`: no recomputation at all, without and with gradient barriers.

`plain` leaves the program as it is. `barriers` puts a gradient barrier in front of every stage, so that the weight
gradients of one stage are added up before the backward pass goes on: free at run time, and where weights are shared
often a large saving. Without shared weights the two need the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxsub.core.chain import Chain
from jaxsub.core.output_reuse import unfenced
from jaxsub.core.plan import Plan
from jaxsub.planners.select import Candidates


@dataclass(frozen=True, slots=True)
class Plain:
    """Plan nothing: the program as it is.

    Example:
        >>> from jaxsub.core.chain import Stage
        >>> Plain()(Chain((Stage(0, 4), Stage(4, 9)), (), ())).barriers
        ()
    """

    def __call__(self, chain: Chain, budget_bytes: int | None = None) -> Plan:
        """Plan a chain.

        Args:
            chain: The chain.
            budget_bytes: The budget in bytes; `None` for any.

        Raises:
            InfeasibleBudgetError: If the program is predicted not to fit.
        """
        found = Candidates(unfenced(chain), lambda _: chain.plain(), "plain")
        return found.cheapest([0], budget_bytes).replace(barriers=())


@dataclass(frozen=True, slots=True)
class Barriers:
    """Plan gradient barriers in front of every stage and nothing else.

    Example:
        >>> from jaxsub.core.chain import Stage
        >>> Barriers()(Chain((Stage(0, 4), Stage(4, 9)), (), ())).barriers
        (4,)
    """

    def __call__(self, chain: Chain, budget_bytes: int | None = None) -> Plan:
        """Plan a chain.

        Args:
            chain: The chain.
            budget_bytes: The budget in bytes; `None` for any.

        Raises:
            InfeasibleBudgetError: If the program is predicted not to fit.
        """
        return Candidates(chain, lambda _: chain.plain(), "barriers").cheapest([0], budget_bytes)
