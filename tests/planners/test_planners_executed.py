"""Every planner's plans of 180 random graphs, executed on the abstract machine that checks each step."""

import random
import sys

import pytest
from machine import Machine, random_chain

from jaxsub.core.chain import Chain, Run
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.core.simulate import predict
from jaxsub.planners import get, names

pytestmark = pytest.mark.once
GRAPHS = 180
BATCHES = 6
SLOW = ("milp",)
SHARES = (0.0, 0.3, 0.7, 1.0)


@pytest.fixture
def answers(monkeypatch):
    """The runs that planners have turned into plans, each with its plan, in order."""
    caught: list[tuple[Plan, tuple[Run, ...]]] = []

    def caught_plan_from_runs(chain, runs, **options):
        runs = tuple(runs)
        caught.append((plan_from_runs(chain, runs, **options), runs))
        return caught[-1][0]

    for name, module in sys.modules.items():
        if name.startswith("jaxsub.planners.") and hasattr(module, "plan_from_runs"):
            monkeypatch.setattr(module, "plan_from_runs", caught_plan_from_runs)
    return caught


def runs_of(plan: Plan, answers: list[tuple[Plan, tuple[Run, ...]]]) -> tuple[Run, ...]:
    """The runs behind a plan."""
    return next(r for p, r in answers if (p.segments, p.prediction) == (plan.segments, plan.prediction))


def stage_by_stage(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The same runs, unwrapped ones told stage by stage."""
    return tuple(
        Run(r.start, r.stop, None, stage_by_stage(r.children)) if r.children else one
        for r in runs
        for one in ([r] if r.children or r.option else [Run(s, s + 1) for s in range(r.start, r.stop)])
    )


def budgets(planner, chain: Chain) -> list[int]:
    """From the least that a planner says would fit to what the plain program needs."""
    plain_bytes = predict(chain, chain.plain()).temp_bytes
    try:
        least_bytes = planner(chain, 0).prediction.temp_bytes
    except InfeasibleBudgetError as refusal:
        least_bytes = refusal.least_bytes
    most_bytes = max(plain_bytes, least_bytes)
    return [least_bytes + int(share * (most_bytes - least_bytes)) for share in SHARES]


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        pytest.param(name, batch, marks=[pytest.mark.exhaustive] * (name in SLOW and batch > 0))
        for name in names()
        for batch in range(BATCHES)
    ],
)
def test_plans_are_valid_within_budget_and_monotone(name, batch, answers):
    """Each step of each plan finds what it needs, no plan needs more than its budget, and more memory is not slower."""
    planner = get(name)
    for seed in range(batch, GRAPHS, BATCHES):
        chain = random_chain(random.Random(seed).randint, 2 + seed % 9)
        flops = float("inf")
        for budget_bytes in budgets(planner, chain):
            answers.clear()
            plan = planner(chain, budget_bytes)
            machine = Machine(chain).execute(stage_by_stage(runs_of(plan, answers)))
            assert machine.peak_bytes == plan.prediction.temp_bytes <= budget_bytes
            assert machine.extra_flops == pytest.approx(plan.prediction.extra_flops)
            assert plan.prediction.extra_flops <= flops + 1e-6
            flops = plan.prediction.extra_flops


def test_a_plan_that_lies_is_found_out(answers):
    """The check can fail: a plan whose runs need more than it says is seen on the machine."""
    chain = random_chain(random.Random(5).randint, 8)
    plan = get("optimal")(chain, budgets(get("optimal"), chain)[0])
    plain = Machine(chain).execute(chain.plain())
    assert plain.peak_bytes > plan.prediction.temp_bytes
    assert Machine(chain).execute(stage_by_stage(runs_of(plan, answers))).peak_bytes < plain.peak_bytes
