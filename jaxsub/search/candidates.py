"""Which way to cut a program a planner is asked on, for which budget, and what it then offers, before any compile.

Ways to cut and a budget in bytes go in; offers come out: a way to cut, and the budget to plan for on it. What regions
cost is asked of the compiler as far as plans use them; whole programs are compiled by `jaxsub.search.budget_search`
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxsub.core.chain import Chain
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.plan import Plan
from jaxsub.costs.chain_builder import Pricer
from jaxsub.planners import Planner

LARGE, GAIN = 0.25, 0.009
"""Finer stages are tried where a plan executes anything worth it again, in stages whose backward pass takes this share
of the budget, and taken where they spare this share of a forward pass, .3 % of a gradient: they cost compiles, and
barriers."""

NOTHING = 1e-3
"""What is executed again below this share of a forward pass counts as nothing: a scalar here and there."""

FEW_STAGES, COUNTING = 64, 0.25
"""What a budget too small for a way to cut buys on others is looked at where these have at most so many stages: longer
chains execute far more again at their least than at larger budgets. Counting may say that they need as much more."""

NEARLY = 1e-3
"""Share of the least predicted peak: plans that need as much more are tried before the one with the least."""

HALF = 0.5
"""Where more than this share of a forward pass is executed again, plans of other stages are looked at: prices of theirs
cost compiles, and budgets that buy more seldom gain by it."""

PACKING = 0.12
"""Ways to cut on which the least is predicted within this share of the lowest may hold the least: by as much the
compiler's packing of buffers adds to what is alive."""

REFINEMENTS = 6
"""How often a planner is asked again after the compiler has corrected the price of regions it used."""


def settle(pricer: Pricer, cuts: Sequence[int], planner: Planner, budget_bytes: int | None,
           slack: float = 0.0) -> Plan:  # fmt: skip
    """Ask a planner until every region it uses has a true price.

    A planner that says nothing fits is asked for its least, or a share more: last bytes can cost a forward pass.
    """
    for _ in range(REFINEMENTS):
        chain = pricer.chain(cuts)
        try:
            plan = planner(chain, budget_bytes)
        except InfeasibleBudgetError as error:
            plan = planner(chain, int(error.least_bytes * (1 + slack)))
        if not pricer.refine(plan):
            break
    return plan


def natural(pricer: Pricer, cut_choices: Sequence[Sequence[int]], planner: Planner) -> Plan:
    """The plan without a budget: on the first way to cut on which it is predicted to need the least, or nearly."""
    plans = [settle(pricer, cuts, planner, None) for cuts in cut_choices]
    least = min(map(predicted_bytes, plans))
    return next(plan for plan in plans if predicted_bytes(plan) <= least * (1 + NEARLY))


def lowest(pricer: Pricer, planner: Planner, choices: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The ways to cut whose least plans may be the least, those first on which it is predicted lowest.

    They are the same whatever the budget: who asks for what the smallest of these plans needs gets it.
    """
    least = sorted((_least_on(pricer.anew().chain(cuts), planner), i) for i, cuts in enumerate(choices))
    return [choices[i] for n_bytes, i in least if n_bytes <= least[0][0] * (1 + PACKING)]


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to cut, and how to plan on it.

    Attributes:
        cuts: The way to cut.
        budget_bytes: What to plan for.
        again: What is expected to be executed again, as a share of a forward pass; infinite where nothing fits.
    """

    cuts: Sequence[int]
    budget_bytes: int
    again: float


def promising(pricer: Pricer, planner: Planner, budget_bytes: int, choices: Sequence[Sequence[int]]) -> list[Offer]:
    """The first way to cut on which the planner predicts to fit, or else the one on which it needs least.

    Where that way executes anything again that is worth it, stages whose own backward pass takes much of the budget are
    cut as finely as any way cuts them, if that is predicted to pay. A budget too small for that way is planned on
    others; where the largest such budget executes less again there, that comes first: it serves the larger one too.
    """
    least: list[tuple[int, Sequence[int]]] = []
    for i, cuts in enumerate(choices):
        chain = pricer.anew().chain(cuts)
        try:
            own = Offer(cuts, budget_bytes, share_again(planner(chain, budget_bytes)))
        except InfeasibleBudgetError as error:
            least.append((error.least_bytes, cuts))
            continue
        large = [stage for stage in chain.stages if stage.transient_bytes > LARGE * budget_bytes]
        inside = {cut for other in choices for cut in other for stage in large if stage.start < cut < stage.stop}
        if own.again > GAIN and inside - set(cuts):
            finer = tuple(sorted({*cuts, *inside}))
            again = _again_within(pricer.anew().chain(finer), planner, budget_bytes)
            own = Offer(finer, budget_bytes, again) if again < own.again - GAIN else own
        return [*_of_smaller(pricer, planner, own, cuts, choices[i + 1 :]), own]
    cuts = next(cuts for n_bytes, cuts in least if n_bytes <= min(least)[0] * (1 + NEARLY))
    return [Offer(cuts, budget_bytes, math.inf)]


def _of_smaller(
    pricer: Pricer, planner: Planner, own: Offer, cuts: Sequence[int], others: Iterable[Sequence[int]]
) -> list[Offer]:
    """What a budget too small for a way is offered on others, where that executes less again; a list of one offer.

    It is counted first, and asked of the compiler only where counting does not rule it out. A planner that takes long
    for every budget says so, and is not asked.
    """
    others = [other for other in others if max(len(other), len(cuts)) <= FEW_STAGES + 1]
    if own.again <= NOTHING or not others or not getattr(planner, "is_quick", True):
        return []
    counted = [(pricer.anew(is_counted=True), COUNTING)] if pricer.is_compiled else []
    found: list[Offer] = []
    for of, room in (*counted, (pricer, 0.0)):
        below = int(_too_small(of.anew().chain(cuts), planner, own.budget_bytes) * (1 + room))
        found = [f for f in promising(of, planner, below, others)[:1] if f.again < own.again] if below else []
        if not found:
            break
    return found


def _too_small(chain: Chain, planner: Planner, budget_bytes: int) -> int:
    """The largest budget that is planned on other ways too: none of a way's plans fits, or much is executed again."""
    low, high = _least_on(chain, planner) - 1, budget_bytes
    if _again_within(chain, planner, low + 1) <= HALF:
        return low
    while high - low > max(1, NEARLY * low):
        middle = (low + high) // 2
        is_much = _again_within(chain, planner, middle) > HALF
        low, high = (middle, high) if is_much else (low, middle)
    return low


def _again_within(chain: Chain, planner: Planner, budget_bytes: int) -> float:
    """What the planner executes again on a way to cut, as a share of a forward pass; infinite where nothing fits."""
    try:
        return share_again(planner(chain, budget_bytes))
    except InfeasibleBudgetError:
        return math.inf


def _least_on(chain: Chain, planner: Planner) -> int:
    """The least that the planner predicts to fit on a way to cut."""
    try:
        return predicted_bytes(planner(chain, 1))
    except InfeasibleBudgetError as error:
        return error.least_bytes


def share_again(plan: Plan) -> float:
    """What a plan executes again, as a share of one forward pass; 0 where it does not say."""
    return plan.prediction.extra_flops / max(plan.prediction.forward_flops, 1.0) if plan.prediction else 0.0


def predicted_bytes(plan: Plan) -> int:
    """The predicted peak of a plan, in bytes; 0 where it does not say."""
    return plan.prediction.temp_bytes if plan.prediction else 0
