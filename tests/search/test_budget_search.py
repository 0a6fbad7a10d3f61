"""The search for plans, on a planner and a compiler made of tables: which plan is found, after how many compiles."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from jaxsub.core.chain import Prediction
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Budget, Plan, Segment
from jaxsub.core.tuning import TUNING
from jaxsub.search import budget_search
from jaxsub.search.bracket import Bracket, largest
from jaxsub.search.budget_search import fit
from jaxsub.search.candidates import Candidates
from jaxsub.search.compile_worth import EFFORTS, NOTHING, Effort, Elsewhere

BUDGET = 1_000_000


class Table:
    """A planner, a pricer and a compiler: of (predicted, needed, recomputed), in shares of a budget and a forward pass.

    Each partition has rows of its own, the least first. A program of one equation more is `n_equations` long, and
    the plain program needs `plain_needs` budgets. `is_alike`: partitions differ in their barriers alone.
    """

    def __init__(self, *ways, n_equations=99, seconds=0.0, plain_needs=3.0, platform="cuda", is_alike=False):
        self.ways, self.known, self.compiles, self.seconds, self.plain_needs = ways, {}, 0, seconds, plain_needs
        self.program, self.is_alike = SimpleNamespace(eqns=range(n_equations)), is_alike
        self.pricer = SimpleNamespace(chain=self.chain, target=SimpleNamespace(platform=platform))

    def chain(self, cuts):
        rows = next(rows for k, rows in enumerate(self.ways) if cuts[0] == k)
        return SimpleNamespace(stages=(), rows=rows, way=cuts[0])

    def __call__(self, chain, budget_bytes):
        fitting = [row for row in chain.rows if row[0] * BUDGET <= budget_bytes]
        if not fitting:
            raise InfeasibleBudgetError(
                "", requested_bytes=budget_bytes, least_bytes=int(chain.rows[0][0] * BUDGET) + 1
            )
        number = chain.rows.index(min(fitting, key=lambda row: row[2]))
        prediction = Prediction(int(chain.rows[number][0] * BUDGET), chain.rows[number][2], 1.0, 0, "by hand")
        start = 0 if self.is_alike else chain.way
        return Plan("f", Budget(), 99, (Segment(start, start + number + 1),), (chain.way,), prediction=prediction)

    def empty(self):
        return Plan("f", Budget(), 99)

    def plain(self):
        return self.empty().replace(measurement=self.measure(self.empty()))

    def is_known(self, plan):
        return (plan.segments, plan.barriers) in self.known

    def expected_seconds(self, plan):
        return self.seconds

    def measure(self, plan):
        key = plan.segments, plan.barriers
        if key not in self.known:
            self.compiles += 1
            needed = self.plain_needs
            if plan.segments:
                way, (segment,) = plan.barriers[0], plan.segments
                needed = self.ways[way][segment.stop - segment.start - 1][1]
            self.known[key] = int(needed * BUDGET)
        return Measurement(self.known[key], 0, 0, 0, 0.0, self.seconds, "cpu")


@pytest.fixture(autouse=True)
def by_tables(monkeypatch):
    """The plain program is predicted to need 3 budgets; a refusal says nothing but the least that it names."""
    monkeypatch.setattr(budget_search, "finish", lambda program, plan, budget: plan)
    plain = Plan("f", Budget(), 99, prediction=Prediction(3 * BUDGET, 0.0, 1.0, 0, "by hand"))
    monkeypatch.setattr(Candidates, "plain", lambda self: plain)
    monkeypatch.setattr(budget_search, "_infeasible", lambda verifier, least, plain, n: InfeasibleBudgetError(
        "", requested_bytes=n, least_bytes=least.measurement.temp_bytes))  # fmt: skip


def fitted(n_bytes, *ways, cuts=None, effort=None, seen=None, elsewhere=NOTHING, **table):
    """The share of the budget needed, what is recomputed (`None` where that is the least named), and the compiles."""
    table = Table(*ways, **table)
    choices = cuts or [(k, 99) for k in range(len(ways))]
    candidates = Candidates(table.pricer, table, choices)
    try:
        found = fit(table, candidates, int(n_bytes * BUDGET), effort or Effort(), elsewhere=elsewhere, seen=seen)
    except InfeasibleBudgetError as refused:
        return refused.least_bytes / BUDGET, None, table.compiles
    return found.measurement.temp_bytes / BUDGET, found.prediction.extra_flops, table.compiles


def repaired(*rows, **table):
    """What the plan that is found recomputes, and the compiles: of one partition."""
    return fitted(1.0, rows, **table)[1:]


def test_a_plan_between_one_that_fits_and_one_that_does_not_is_found():
    """Predictions err, by more or less: the cheapest plan that fits is looked for below the least that does not."""
    rows = ((0.9012, 0.925, 0.577), (0.9065, 0.9335, 0.572), (0.9281, 0.9621, 0.479), (0.9411, 1.0198, 0.253),
            (0.9939, 1.0413, 0.094))  # fmt: skip
    assert repaired(*rows) == (0.479, 4)


def test_what_is_left_over_is_filled():
    """A plan that fits says by how much predictions err: one that spares enough and is expected to fit is tried."""
    assert repaired((0.98, 0.965, 0.45), (1.01, 0.995, 0.4)) == (0.4, 2)
    assert repaired((0.98, 0.965, 0.45), (1.02, 0.995, 0.4)) == (0.45, 1)
    assert repaired((0.98, 0.965, 0.45), (1.01, 0.995, 0.43)) == (0.45, 1)


def test_room_is_left_until_it_is_known_by_how_much_predictions_err():
    """The first plan leaves room where that is cheap; after a miss the planner is asked for what is known to fit."""
    rows = [(n / 100, n / 100 + 0.1, (100 - n) / 250) for n in range(80, 101, 2)]
    assert repaired(*rows) == (0.048, 2)  # of .88
    near = [(predicted, predicted + 0.01, extra) for predicted, _, extra in rows]
    assert repaired(*near) == (0.008, 1)  # of .98: that of 1 would have missed


def test_what_spares_too_little_is_not_compiled():
    """Between a plan that fits and one that does not, what recomputes hardly less than the first."""
    assert repaired((0.9, 0.94, 0.5), (0.98, 1.02, 0.3)) == (0.5, 2)
    assert repaired((0.9, 0.94, 0.5), (0.96, 0.98, 0.4), (0.98, 1.02, 0.3)) == (0.4, 3)
    assert repaired((0.9, 0.94, 0.5), (0.96, 0.98, 0.48), (0.98, 1.02, 0.3)) == (0.5, 2)


def test_of_many_compiles_each_must_spare_twice_as_much():
    """The fifth twice as much as the first four, and so on; with the highest effort all the same."""
    rows, some = ((0.98, 0.965, 0.45), (1.01, 0.995, 0.4)), [1.0] * 3
    assert fitted(1.0, rows, seen=some[:2])[1:] == (0.4, 2)
    assert fitted(1.0, rows, seen=some[:])[1:] == (0.45, 1)
    assert fitted(1.0, rows, seen=some[:], effort=EFFORTS["high"])[1:] == (0.4, 2)


def test_after_many_compiles_in_vain_no_other_program_is_tried():
    """Ten plans of others that did not fit are enough, but for the highest effort."""
    rows, some, refused = ((0.6, 0.9, 0.6),), [1.3] * 10, Elsewhere(is_refused=True)
    assert fitted(1.0, rows, seen=some[:9], elsewhere=refused)[1:] == (0.6, 1)
    assert fitted(1.0, rows, seen=some[:], elsewhere=refused)[1:] == (None, 0)
    assert fitted(1.0, rows, seen=some[:])[1:] == (0.6, 1)  # nobody knows yet what is needed
    assert fitted(1.0, rows, seen=some[:], elsewhere=refused, effort=EFFORTS["high"])[1:] == (0.6, 1)
    assert fitted(1.0, rows, seen=some[:], elsewhere=refused, effort=EFFORTS["low"])[1:] == (None, 0)


def test_what_is_expected_elsewhere_comes_first():
    """Once a prediction was too low, another program may be expected to recompute less; what fits at once is taken."""
    rows = (0.6, 0.9, 0.6), (0.98, 1.2, 0.2)
    assert fitted(1.0, rows)[1] == 0.6
    elsewhere = Elsewhere(is_better=lambda error, share: error > 1.2 and share > 0.5)
    assert fitted(1.0, rows, elsewhere=elsewhere) == (0.0, None, 1)
    assert fitted(1.0, rows[:1], elsewhere=elsewhere)[1] == 0.6


def test_low_effort_takes_the_first_plan_that_fits():
    """It is compiled once where it fits, and repaired where it does not."""
    rows = (0.98, 0.965, 0.45), (1.01, 0.995, 0.2)
    assert fitted(1.0, rows, effort=Effort(math.inf))[1:] == (0.45, 1)
    assert fitted(1.0, ((0.9, 0.94, 0.5), (0.98, 1.02, 0.3)), effort=Effort(math.inf))[1:] == (0.5, 2)


def test_time_that_is_up_ends_the_search_for_something_better():
    """A compile that would end too late is not begun once a plan fits; while none does it is begun all the same."""
    rows = (0.98, 0.965, 0.45), (1.01, 0.995, 0.2)
    assert fitted(1.0, rows, effort=Effort(max_seconds=60), seconds=1.0)[1:] == (0.2, 2)
    assert fitted(1.0, rows, effort=Effort(max_seconds=60), seconds=100.0)[1:] == (0.45, 1)
    late = Effort(max_seconds=1)
    assert fitted(1.0, ((0.9, 0.94, 0.5), (0.98, 1.02, 0.3)), effort=late, seconds=100.0)[1:] == (0.5, 2)


@pytest.mark.parametrize(("n_equations", "again", "compiles"), [(TUNING.long_equations, 0.4, 3), (20_359, 0.5, 2)])
def test_of_a_long_program_the_first_plan_that_fits_is_taken(n_equations, again, compiles):
    """One is looked for however long it takes; what would be better is not."""
    rows = (0.9, 0.94, 0.5), (0.96, 0.98, 0.4), (0.98, 1.02, 0.3)
    assert repaired(*rows, n_equations=n_equations) == (again, compiles)


def test_the_plain_program_is_compiled_only_where_it_may_fit():
    """Three budgets are predicted for it: for one it is not, for 2.5 beside a plan that recomputes it is."""
    rows = ((0.9, 0.97, 0.5),)
    assert fitted(1.0, rows) == (0.97, 0.5, 1)
    assert fitted(2.5, rows)[2] == 2
    assert fitted(2.5, ((0.9, 0.97, TUNING.compile_gain / 2),))[2] == 1


def test_the_least_that_is_named_is_met():
    """Stages that are predicted to fit and do not: what other stages need is named, and found when it is asked for."""
    ways = ((0.97, 1.1, 0.5),), ((0.9, 1.0, 0.6),)
    assert fitted(0.7, *ways)[:2] == (1.0, None)
    assert fitted(1.0, *ways)[:2] == (1.0, 0.6)


PACKED = ((0.8, 0.95, 1.14), (0.9, 1.05, 0.5)), ((0.85, 0.93, 1.0),)
"""The least of the first way is predicted lower than that of the second, but packed worse."""


def test_the_least_is_of_all_ways_to_cut():
    """It is what the compiler says is least, not what is predicted to be, and no plan of a larger budget needs less."""
    assert fitted(0.7, *PACKED)[:2] == (0.93, None)
    assert fitted(0.93, *PACKED)[:2] == (0.93, 1.0)
    assert fitted(0.7, PACKED[0], ((0.95, 0.9, 1.0),))[:2] == (0.95, None)  # not expected to be least


def test_least_plans_that_differ_in_barriers_alone_are_compiled_once():
    """Two partitions whose least plans have the same regions say the same; others are compiled, each of them."""
    rows = ((0.8, 0.95, 1.14),)
    assert fitted(0.7, rows, rows, is_alike=True) == (0.95, None, 1)
    assert fitted(0.7, rows, rows) == (0.95, None, 2)


def test_the_last_bytes_are_not_bought_dearly():
    """Nearly the least may recompute far less, and be packed better: of one partition both are looked at."""
    nearly = ((0.8, 0.97, 3.1), (0.8004, 0.96, 2.3))
    assert fitted(0.7, nearly)[:2] == (0.96, None)
    assert fitted(0.96, nearly)[:2] == (0.96, 2.3)


def test_what_needs_less_than_the_least_that_was_predicted_is_named():
    """Packing may add much to the least and nothing to a larger plan: what needs less is looked for between them."""
    between = (0.8, 0.95, 3.1), (0.86, 0.99, 1.5), (0.9, 0.9, 0.6)
    assert fitted(0.7, between)[:2] == (0.9, None)
    assert fitted(0.9, between)[:2] == (0.9, 0.6)
    assert fitted(0.7, ((0.8, 0.807, 3.1), (0.803, 0.803, 0.6)))[::2] == (0.807, 1)  # hardly apart
    far = (0.8, 1.0, 3.1), *between[1:]  # no packing, but a prediction that errs
    assert fitted(0.7, far) == (1.0, None, 1)
    assert fitted(1.0, far)[0] <= 1.0


def test_where_only_the_least_fits_less_recomputation_is_looked_for():
    """Two plans near the budget miss it, the second by more; then the least is not taken if less recomputation fits."""
    rows = (0.49, 0.72, 3.8), (0.74, 0.84, 0.5), (0.88, 0.92, 0.24), (0.992, 1.07, 0.1), (0.997, 1.001, 0.09)
    assert repaired(*rows) == (0.24, 5)


def test_what_is_predicted_too_large_is_asked_for_as_much_more():
    """Only the least may fit by prediction; it needs three quarters of that, and a plan beside it fits too."""
    assert fitted(1.0, ((1.05, 0.8, 2.0), (1.15, 0.9, 0.6), (1.4, 1.3, 0.1)))[1] == 0.6


def test_where_nothing_fits_plans_by_hand_that_cannot_are_not_compiled():
    """One needs hardly more than the budget, as predicted, and others twice as much."""
    table = Table(((1.6, 1.6, 1.0),), ((1.01, 1.02, 0.7), (1.9, 1.9, 0.1), (2.0, 2.0, 0.0)))
    candidates = Candidates(table.pricer, table, [(0, 99)])
    by_hand = [table(table.chain((1, 99)), share * BUDGET) for share in (1.01, 1.9, 2.0)]
    with pytest.raises(InfeasibleBudgetError):
        fit(table, candidates, BUDGET, Effort(), lambda: by_hand)
    assert table.compiles == 2


def test_asking_for_less_ends_where_it_does_not_help():
    """What one stage needs by itself holds the peak: a plan that was predicted to need less needs as much."""
    rows = tuple((share, 1.1, 1.5 - share) for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
    assert fitted(1.0, rows) == (1.1, None, 3)
    assert fitted(1.0, ((0.75, 0.99, 0.6), (0.86, 1.09, 0.4), (0.98, 1.1, 0.2))) == (0.99, 0.6, 3)


def test_another_partition_is_asked_for_as_much_less_as_predictions_erred():
    """It is compiled only where it would fit if its prediction erred by no more than the best one so far."""
    errs = (0.9, 1.2, 0.5), (1.0, 1.3, 0.4)
    assert fitted(1.0, errs, ((0.8, 1.1, 0.6), (0.95, 1.3, 0.45))) == (1.1, None, 2)
    assert fitted(1.0, errs, ((0.7, 0.95, 0.6), (0.95, 1.3, 0.45))) == (0.95, 0.6, 2)


def test_partitions_are_ranked_again_by_what_was_measured():
    """On the first nothing was predicted to be recomputed; where half of that fits, another recomputes least."""
    coarse, fine = ((1.0, 2.0, 0.0),), ((0.28, 0.35, 4.0), (0.48, 0.52, 0.5), (0.9, 0.95, 0.1))
    assert fitted(1.0, coarse, fine) == (0.95, 0.1, 3)
    assert fitted(0.99, coarse, fine) == (0.95, 0.1, 1)
    heavy = (0.28, 0.35, 4.0), (0.6, 0.95, 3.9), (0.95, 1.9, 0.0)  # only the least of all fits at first
    assert fitted(1.0, coarse, heavy, fine)[1] <= 0.5


def test_a_program_is_asked_for_as_much_less_as_others_of_the_function_needed_more():
    """As with runs in slices, where one fits: by what the best of the predictions was too low; others are told too."""
    rows, seen = ((0.68, 0.9, 0.6), (1.0, 1.3, 0.58)), [1.25, 1.4]
    assert fitted(1.0, rows, elsewhere=Elsewhere(0.9)) == (0.9, 0.6, 2)
    assert fitted(1.0, rows, elsewhere=Elsewhere(0.9), seen=seen) == (0.9, 0.6, 1)
    assert seen == [1.25, 1.4, pytest.approx(0.9 / 0.68)]


@pytest.mark.parametrize(
    ("by_hand", "wanted"),
    [
        ((0.9, 0.95, 0.2), (0.2, 1)),  # predicted to be better than the planner's: compiled first
        ((0.9, 0.95, 0.595), (0.6, 1)),  # hardly better
        ((0.9, 1.5, 0.2), (0.6, 2)),  # it does not fit
        ((1.2, 1.0, 0.2), (0.6, 1)),  # it is not predicted to, nor likely to
    ],
)
def test_plans_by_hand_come_first_where_they_are_predicted_to_be_better(by_hand, wanted):
    """Then the planner's is compiled only if it spares enough beside them."""
    table = Table(((0.9, 0.95, 0.6),), (by_hand,))
    candidates = Candidates(table.pricer, table, [(0, 99)])
    found = fit(table, candidates, BUDGET, Effort(), lambda: [table(table.chain((1, 99)), 2 * BUDGET)])
    assert (found.prediction.extra_flops, table.compiles) == wanted


@pytest.mark.parametrize(("platform", "wanted"), [("cpu", (0.5, 2)), ("cuda", (0.6, 1))])
def test_plans_by_hand_that_may_fit_are_tried_beside_one_that_does(platform, wanted):
    """Predicted a tenth too large; predictions of plans by hand err by as much on a CPU, and seldom for a GPU."""
    table = Table(((0.9, 0.95, 0.6),), ((1.1, 1.0, 0.5),), platform=platform)
    candidates = Candidates(table.pricer, table, [(0, 99)])
    found = fit(table, candidates, BUDGET, Effort(), lambda: [table(table.chain((1, 99)), 2 * BUDGET)])
    assert (found.prediction.extra_flops, table.compiles) == wanted


def test_plans_by_hand_are_tried_where_the_least_says_that_predictions_are_too_high():
    """Nothing is predicted to fit; the least needs less than that, and so does a plan by hand that recomputes less."""
    by_hand = (1.5, 1.0, 0.1), (1.9, 1.4, 0.0)
    table = Table(((1.05, 0.8, 0.6), (1.9, 1.4, 0.0)), by_hand)
    candidates = Candidates(table.pricer, table, [(0, 99)])
    made = [table(table.chain((1, 99)), share * BUDGET) for share in (1.5, 1.9)]
    found = fit(table, candidates, BUDGET, Effort(), lambda: made)
    assert (found.prediction.extra_flops, table.compiles) == (0.1, 2)
    sure = Table(((1.05, 1.0, 0.6),), by_hand)
    fit(sure, Candidates(sure.pricer, sure, [(0, 99)]), BUDGET, Effort(), lambda: made)
    assert sure.compiles == 1


def test_a_budget_far_below_everything_is_refused_after_one_compile():
    """What one stage needs at once exceeds it: the least is named, and found when it is asked for."""
    ways = ((0.9, 0.95, 0.5), (1.0, 1.0, 0.3)), ((0.92, 0.93, 0.6),)
    assert fitted(0.3, *ways) == (0.95, None, 1)
    assert fitted(0.95, *ways)[0] <= 0.95


def test_where_predictions_are_far_too_high_the_function_as_it_is_is_looked_at():
    """It is predicted to need 3 budgets and needs one, as the least plan does: a budget of one fits it."""
    rows = ((2.8, 1.01, 0.5),)
    assert fitted(0.9, rows, plain_needs=1.0)[1:] == (None, 2)
    table = Table(rows, plain_needs=1.0)
    found = fit(table, Candidates(table.pricer, table, [(0, 99)]), BUDGET, Effort())
    assert (found.segments, found.measurement.temp_bytes) == ((), BUDGET)


def test_of_partitions_the_first_is_taken_unless_another_spares_enough():
    """More than `partition_gain` of a forward pass; of long chains only the first that is predicted to fit is tried."""
    ways = ((0.9, 0.9, 0.3), (1.2, 1.2, 0.1)), ((0.6, 0.6, 0.5), (0.8, 0.8, 0.2))
    assert [fitted(share, *ways)[1] for share in (0.7, 0.8, 0.9, 1.0, 1.2)] == [0.5, 0.2, 0.2, 0.2, 0.1]
    hardly = ways[0], ((0.8, 0.8, 0.3 - TUNING.partition_gain / 2),)
    assert fitted(1.0, *hardly)[1] == 0.3
    long = [(k, *range(100, 101 + TUNING.long_chain)) for k in range(2)]
    assert fitted(0.9, *ways, cuts=long)[1] == 0.3


@pytest.mark.parametrize("seed", range(10))
def test_more_budget_never_recomputes_more_where_predictions_hold(seed):
    """Of random plans, on three partitions; up to what another partition must spare to be looked at."""
    rng = np.random.default_rng(seed)
    ways = [tuple((p, p, max(0, 1 - p + 0.8 * e)) for p, e in np.sort(rng.random((5, 2)), axis=0) * (1, -1))
            for _ in range(3)]  # fmt: skip
    found = [fitted(share, *ways)[1] for share in np.arange(0.1, 1.0, 0.05)]
    again = [flops for flops in found if flops is not None]
    assert all(later <= earlier + TUNING.compile_gain for i, earlier in enumerate(again) for later in again[i:])


@pytest.mark.parametrize("n_bytes", [0.3, 0.7, 0.93, 0.95, 1.0, 1.2])
def test_all_ways_together_are_compiled_few_times(n_bytes):
    """However many there are, and however badly all are predicted."""
    ways = [tuple((p + 0.01 * k, p + 0.3 + 0.02 * k, 3 - p) for p in np.arange(0.4, 1.5, 0.05)) for k in range(4)]
    assert fitted(n_bytes, *ways)[2] <= TUNING.most_compiles + 2


@pytest.mark.parametrize(("coarse", "fine", "is_fine"), [(0.05, 0.0, True), (0.5, 0.49, True), (0.05, 0.042, False)])
def test_a_large_stage_is_cut_where_that_pays(coarse, fine, is_fine):
    """A stage whose backward pass takes much of the budget, if what is recomputed becomes clearly less."""
    again = {(0, 9): coarse, (0, 5, 9): fine}
    large = (SimpleNamespace(start=0, stop=9, transient_bytes=BUDGET),)
    pricer = SimpleNamespace(chain=lambda cuts: SimpleNamespace(cuts=cuts, stages=large))

    def planner(chain, budget_bytes):
        return Plan("f", Budget(), 9, prediction=Prediction(budget_bytes, again[chain.cuts], 1.0, 0, "by hand"))

    assert Candidates(pricer, planner, list(again)).ranked(BUDGET)[0] == list(again)[is_fine]


def test_the_bracket_goes_by_the_worst_miss_then_between():
    """Until something fits the worst error is taken to repeat itself; then the next lies between both ends."""
    bracket = Bracket(100.0, slope=1.0)
    bracket.add(100, 130)
    assert bracket.following() == 70
    bracket.add(80, 105)
    assert bracket.following() == 70
    bracket.add(70, 90)
    assert 70 < bracket.following() < 80
    bracket.add(78, 99)
    assert 78 < bracket.following() < 80


def test_a_flat_line_leads_to_half_before_it_leads_to_nothing():
    """Two quantities that need nearly the same say little of what would fit."""
    bracket = Bracket(100.0)
    bracket.add(100, 180)
    bracket.add(80, 179)
    assert bracket.following() == 40
    bracket.add(40, 178)
    assert bracket.following() < 0


@pytest.mark.parametrize(("start", "pace"), [(0, 1), (100, 7), (5000, 3)])
@pytest.mark.parametrize("unit", [1, 8])
def test_the_largest_batch_that_fits_is_found_in_few_steps(start, pace, unit):
    """Of bytes that grow linearly from a start: the largest multiple within the limit, and 0 where none is."""
    asked = []

    def bytes_of(batch):
        asked.append(batch)
        return start + pace * batch

    for limit in (10, 10_000, 10**6):
        asked.clear()
        assert largest(bytes_of, limit, unit) == max(0, (limit - start) // pace // unit * unit)
        assert len(asked) <= 12
