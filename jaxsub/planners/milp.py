"""`milp`: the least recomputation that fits, by integer programming, and a lower bound for any schedule.

Solutions of Checkmate's program over the chain (`jaxsub.planners.milp_model`), solved by HiGHS through
`scipy.optimize.milp`, are all schedules that run the forward pass once and recompute any stages before each backward
step. Not all of them are nested regions, so not all can be emitted. The planner therefore solves two programs:

1. Is there any schedule that recomputes less than the plan of `optimal`? If not, that plan is optimal; otherwise the
   solver's bound on such schedules, or that of the linear relaxation if larger, is the plan's lower bound.
2. Is there a plan that recomputes less (`jaxsub.planners.milp_nested`)? If so it is taken.

The result is never worse than `optimal`'s plan, and is not rounded to slots. `least_flops` is the linear relaxation
alone: it takes a second or two and is a certified lower bound for every plan of the same chain.

The bound holds in the chain's memory model, up to the solver's tolerance of a millionth: for schedules that run whole
stages, whose backward passes go from the last to the first, where a stage reads all values that cross its first cut.
Options that may not nest (in host memory, or anywhere with `jax_remat3`) save their values in the first forward pass.

Source: Jain et al., *Checkmate* (MLSys 2020).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxsub.core.chain import Chain, Prediction, Run
from jaxsub.core.errors import PlannerError
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.core.simulate import predict
from jaxsub.planners.dp_tables import depth
from jaxsub.planners.milp_model import Schedules
from jaxsub.planners.milp_nested import Regions, runs_of
from jaxsub.planners.optimal import Optimal

MAX_STAGES = 60
"""The program grows with the square of the number of stages, and the time to solve it faster."""

PROOF = 1e-6
"""A plan counts as optimal when nothing is cheaper by more than this share."""

BOUND_SECONDS = 10.0
"""How long `least_flops` may take; a second or two is the rule."""


def least_flops(chain: Chain, budget_bytes: int, seconds: float = BOUND_SECONDS) -> float | None:
    """Bound the FLOPs that any schedule recomputes in a budget from below, by Checkmate's linear relaxation.

    They are weighed as in `jaxsub.core.chain.Prediction.extra_flops`; infinite where no schedule fits; `None` where the
    chain has over 60 stages or the solver takes too long.

    References:
        Jain et al., Checkmate, 2020, section 4.6: the relaxation.
    """
    if len(chain.stages) > MAX_STAGES:
        return None
    found = Schedules(chain, budget_bytes).solve(is_relaxed=True, seconds=seconds)
    return found.bound * (1 - PROOF) if found.is_proved else None


@dataclass(slots=True, eq=False)
class Bounded:
    """A planner that can add lower bounds to its plans afterwards: it remembers the chain of each.

    Attributes:
        planner: The planner.
    """

    planner: Callable[[Chain, int | None], Plan]
    _chains: dict[Prediction, Chain] = field(init=False, default_factory=dict)

    def __call__(self, chain: Chain, budget_bytes: int | None = None) -> Plan:
        """Plan a chain."""
        plan = self.planner(chain, budget_bytes)
        if plan.prediction is not None:
            self._chains[plan.prediction] = chain
        return plan

    def bounded(self, plan: Plan) -> Plan:
        """Add the lower bound of schedules that need no more memory than the plan is predicted to need."""
        if plan.prediction is None or plan.lower_bound is not None:
            return plan
        if plan.prediction.extra_flops == 0:
            return plan.replace(lower_bound=0.0)
        chain = self._chains.get(plan.prediction)
        if chain is None:
            return plan
        found = least_flops(chain, plan.prediction.temp_bytes)
        if found is None:
            warnings.warn(
                f"No lower bound was found: the program has {len(chain.stages)} stages, and bounds are for at most "
                f"{MAX_STAGES} that the solver is done with in {BOUND_SECONDS:.0f} s.",
                stacklevel=2,
            )
            return plan
        return plan.replace(lower_bound=min(found, plan.prediction.extra_flops))


@dataclass(frozen=True, slots=True)
class Milp:
    """The planner `milp`.

    Attributes:
        seconds: About how long the solver may take for one plan; the best found by then is used.

    Raises:
        ValueError: If `seconds` is not positive.

    Example:
        >>> from jaxsub.core.chain import Crossing, Stage
        >>> stages = tuple(Stage(s, s + 1, transient_bytes=1, keep_bytes=1) for s in range(9))
        >>> chain = Chain(stages, (), tuple(Crossing(s, s + 1, 1, 0) for s in range(8)))
        >>> plan = Milp()(chain, 5)
        >>> plan.is_optimal, plan.prediction.extra_flops, round(plan.lower_bound, 4)
        (True, 8.0, 7.0)

    References:
        Jain et al., Checkmate, 2020.
    """

    seconds: float = 60

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"the solver needs some time, got seconds={self.seconds}")

    def __call__(self, chain: Chain, budget_bytes: int | None = None) -> Plan:
        """Plan a chain.

        Args:
            chain: The chain, of at most 60 stages.
            budget_bytes: The budget in bytes; `None` for the memory of `optimal`'s plan without one.

        Raises:
            InfeasibleBudgetError: If no plan is predicted to fit.
            PlannerError: If the chain has more stages.
        """
        if (n := len(chain.stages)) > MAX_STAGES:
            raise PlannerError(
                f"`milp` solves programs of at most {MAX_STAGES} stages, and this one has {n}. "
                'Pass planner="optimal": its plans are near those of `milp`, and it has no such limit.'
            )
        start = Optimal()(chain, budget_bytes)
        assert start.prediction is not None
        most, n_bytes = start.prediction.extra_flops, budget_bytes or start.prediction.temp_bytes
        bound = self._bound(chain, n_bytes, most)
        runs, is_optimal = None, bound >= most * (1 - 2 * PROOF)
        if not is_optimal:
            runs, is_optimal = self._better(chain, n_bytes, most)
        if runs is not None:
            start = plan_from_runs(chain, runs, budget=start.budget, planner="milp")
        assert start.prediction is not None
        return start.replace(
            planner="milp", is_optimal=is_optimal, lower_bound=min(bound, start.prediction.extra_flops)
        )

    def _bound(self, chain: Chain, budget_bytes: int, most: float) -> float:
        """Bound the extra FLOPs of schedules that fit from below; just under `most` where none is cheaper than that."""
        if most == 0:
            return 0.0
        program, below = Schedules(chain, budget_bytes), most * (1 - PROOF)
        relaxed = program.solve(is_relaxed=True, seconds=self.seconds / 2)
        whole = program.solve(most=below, seconds=self.seconds / 2)
        return min(max(relaxed.bound if relaxed.is_proved else 0.0, whole.bound) * (1 - PROOF), below)

    def _better(self, chain: Chain, budget_bytes: int, most: float) -> tuple[tuple[Run, ...] | None, bool]:
        """Find runs that recompute less than `most`, if there are any, and tell whether nothing is better."""
        program = Regions(chain, budget_bytes)
        found = program.solve(most=most * (1 - PROOF), seconds=self.seconds / 2)
        is_exact = found.is_proved and not any(stage.gradient_sizes for stage in chain.stages)
        if found.values is None:
            return None, is_exact
        runs = runs_of(program, found.values)
        prediction = predict(chain, runs)
        is_better = prediction.temp_bytes <= budget_bytes and prediction.extra_flops < most
        if not is_better or depth(runs) > Optimal().max_depth:
            return None, False
        return runs, is_exact
