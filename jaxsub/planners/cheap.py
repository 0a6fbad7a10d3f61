"""Drop the results of low-cost operations, keep those of costly ones: the paper's §4.2.

Each stage becomes a region that saves just what makes its recompute cheapest, and then as little as it can: in
convolution, batch norm, activation, the convolution's output is saved and the rest is made again. The last stage is
not wrapped, so its backward pass starts at once; nor is a stage without options: what is cheap in it is not known.

There is one such plan and no search: a budget is met by it or refused.

Source: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, §4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.chain import Chain, Option, Run
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.planners.memo import Answer


def cheap_runs(chain: Chain) -> tuple[Run, ...]:
    """The runs that recompute what is cheap and save the rest: a region for each stage but the last.

    Args:
        chain: The chain; of its items only those of a single stage count.

    Example:
        >>> from jaxsub.core.chain import Item, Stage
        >>> options = (Option((), 0, 4, 9.0), Option((0,), 1, 4, 0.5), Option((0, 1), 2, 4, 0.5))
        >>> chain = Chain((Stage(0, 2), Stage(2, 4)), (Item(0, 1, options), Item(1, 2, options)), ())
        >>> [run.option and run.option.saved for run in cheap_runs(chain)]
        [(0,), None]
    """
    options = {item.start: item.options for item in chain.items if item.stop - item.start == 1}
    last = len(chain.stages) - 1
    best = (_cheapest(options.get(s, ())) if s != last else None for s in range(last + 1))
    return tuple(Run(s, s + 1, option) for s, option in enumerate(best))


def _cheapest(options: tuple[Option, ...]) -> Option | None:
    return min(options, key=lambda o: (o.recompute_flops, o.saved_bytes, o.transient_bytes), default=None)


@dataclass(frozen=True, slots=True)
class Cheap:
    """Plan by dropping the results of low-cost operations.

    References:
        Chen et al., 2016, §4.2.
    """

    def __call__(self, chain: Chain, budget_bytes: int | None = None) -> Plan:
        """Plan a chain.

        Args:
            chain: The chain.
            budget_bytes: What the compiler may allocate beside arguments and outputs; `None` for any.

        Returns:
            The plan; its prediction is exact on the chain.

        Raises:
            InfeasibleBudgetError: If the plan does not fit the budget.
        """
        plan = plan_from_runs(chain, cheap_runs(chain), budget=Budget(n_bytes=budget_bytes), planner="cheap")
        assert plan.prediction is not None
        least = plan.prediction.temp_bytes
        if budget_bytes is not None and least > budget_bytes:
            raise InfeasibleBudgetError(
                f"Budget `{format_bytes(budget_bytes)}` is below the predicted peak when only cheap results are "
                f'recomputed, `{format_bytes(least)}`. Pass budget={least} or more, or planner="auto".',
                requested_bytes=budget_bytes,
                least_bytes=least,
            )
        return plan

    def solved(self, chain: Chain) -> Answer:
        """Its one plan of a chain, for all budgets."""
        return partial(self, chain)
