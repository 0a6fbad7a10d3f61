"""The repair of plans, on a planner and a compiler made of tables: which plan is found, and after how many compiles."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsub
from jaxsub.core.chain import Chain, Prediction, Stage
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.plan import Budget, Measurement, Plan, Segment
from jaxsub.search import budget_search as repair
from jaxsub.search.budget_search import LONG_EQUATIONS, MOST_COMPILES, _Search
from jaxsub.search.candidates import FEW_STAGES, promising

BUDGET = 1_000_000


class Table:
    """A planner and its compiler: of (predicted, needed, executed again), in shares of a budget and a forward pass.

    It stands for the verifier too, which counts the plain program's compile.
    """

    remembers = True

    def __init__(self, *rows, n_equations=99):
        self.rows, self.known, self.compiles, self.said = rows, {}, 1, []
        self.program = SimpleNamespace(eqns=range(n_equations))
        self.pricer = SimpleNamespace(chain=lambda cuts: None, refine=lambda plan: False, progress=self.said.append,
                                      anew=lambda **_: self.pricer, is_compiled=True)  # fmt: skip

    def __call__(self, chain, budget_bytes):
        fitting = [row for row in self.rows if row[0] * BUDGET <= budget_bytes]
        if not fitting:
            raise InfeasibleBudgetError("", requested_bytes=budget_bytes, least_bytes=int(self.rows[0][0] * BUDGET) + 1)
        number = self.rows.index(min(fitting, key=lambda row: row[2]))
        prediction = Prediction(int(self.rows[number][0] * BUDGET), self.rows[number][2], 1.0, 0, "by hand")
        return Plan("f", Budget(), 99, (Segment(0, number + 1),), prediction=prediction)

    def is_known(self, plan):
        return plan.segments in self.known

    def measure(self, plan):
        if plan.segments not in self.known:
            self.compiles += 1
            self.known[plan.segments] = int(self.rows[plan.segments[0].stop - 1][1] * BUDGET)
        return Measurement(self.known[plan.segments], 0, 0, 0, 0.0, 0.0, "cpu")


def repaired(*rows):
    """What the plan that is found executes again, and how many programs were compiled."""
    table = Table(*rows)
    search = _Search(table, table, BUDGET)
    search.run((), MOST_COMPILES - 1)
    return search.best.prediction.extra_flops, table.compiles


def test_a_plan_between_one_that_fits_and_one_that_does_not_is_found():
    """Predictions err, by more or less: the cheapest plan that fits is looked for below the least that does not."""
    rows = ((0.9012, 0.925, 0.577), (0.9065, 0.9335, 0.572), (0.9281, 0.9621, 0.479), (0.9411, 1.0198, 0.253),
            (0.9939, 1.0413, 0.094))  # fmt: skip
    assert repaired(*rows) == (0.479, 5)


@pytest.mark.parametrize(("needed", "again"), [(0.99, 0.4), (1.01, 1.5)])
def test_a_much_cheaper_plan_is_tried_a_little_above_the_budget(needed, again):
    """One more compile, and it is kept where it fits."""
    assert repaired((0.95, 0.97, 1.5), (1.005, needed, 0.4)) == (again, 3)


def test_what_is_left_over_is_filled():
    """A plan that fits as exactly as the first errs, and spares a little, is worth one more compile."""
    assert repaired((0.98, 0.965, 0.45), (1.01, 0.995, 0.4)) == (0.4, 3)
    assert repaired((0.98, 0.965, 0.45), (1.02, 0.995, 0.4)) == (0.45, 2)
    assert repaired((0.98, 0.965, 0.45), (1.01, 0.995, 0.447)) == (0.45, 2)


def test_what_is_left_over_is_filled_by_less_where_more_did_not_fit():
    """A plan that misses says by how much; the next cheaper one that may fit is looked for below it."""
    rows = ((0.952, 0.98, 1.33), (0.9615, 0.99, 1.26), (0.971, 1.007, 1.18), (0.999, 1.035, 1.02))
    assert repaired(*rows) == (1.26, 5)
    assert repaired(*rows[:1], (0.9615, 1.001, 1.26), *rows[2:]) == (1.33, 5)


def test_little_is_not_dared_for():
    """A plan that fits and leaves little is taken where the next one spares little, or nobody expects it to fit."""
    assert repaired((0.95, 0.97, 0.45), (1.01, 0.99, 0.4)) == (0.45, 2)
    assert repaired((0.95, 0.97, 1.5), (1.02, 0.99, 0.4)) == (1.5, 2)


def test_what_spares_nothing_is_not_compiled():
    """Between a plan that fits and one that does not, what executes no less again than the first, or cannot fit."""
    assert repaired((0.9, 0.94, 0.5), (0.98, 1.02, 0.3)) == (0.5, 3)
    assert repaired((0.9, 0.94, 0.5), (0.985, 0.99, 0.35), (0.99, 1.03, 0.3)) == (0.5, 3)
    assert repaired((0.9, 0.94, 0.5), (0.96, 0.98, 0.4), (0.98, 1.02, 0.3)) == (0.4, 4)
    assert repaired((0.8892, 0.8889, 1.2), (1.0005, 1.0, 0.9)) == (0.9, 3)


@pytest.mark.parametrize(("n_equations", "again", "compiles"), [(LONG_EQUATIONS, 0.4, 4), (20_359, 0.5, 3)])
def test_of_a_long_program_the_first_plan_that_fits_is_taken(n_equations, again, compiles):
    """One is looked for however long it takes; what would be better is not, and the progress says so."""
    table = Table((0.9, 0.94, 0.5), (0.96, 0.98, 0.4), (0.98, 1.02, 0.3), n_equations=n_equations)
    search = _Search(table, table, BUDGET)
    search.run((), MOST_COMPILES - 1)
    assert (search.best.prediction.extra_flops, table.compiles) == (again, compiles)
    told = ["a plan that fits is taken: to compile 20,359 equations takes long"]
    assert table.said == told * (compiles == 3)


def fitted(monkeypatch, n_bytes, *ways, cuts=None, is_quick=True):
    """The share of the budget needed, what is executed again, and the compiles: of a program cut in several ways.

    Each way is a table of its own, its least plan first; a refusal says the least that it names.
    """
    monkeypatch.setattr(repair, "finish", lambda program, plan, budget: plan)
    monkeypatch.setattr(repair, "_infeasible", lambda verifier, search, n: InfeasibleBudgetError(
        "", requested_bytes=n, least_bytes=search.least_seen.measurement.temp_bytes))  # fmt: skip
    table = Table(*(row for rows in ways for row in rows))
    table.plain = lambda: Plan("f", Budget(), 99, measurement=Measurement(2 * BUDGET, 0, 0, 0, 0.0, 0.0, "cpu"))
    table.pricer.chain = lambda cuts: SimpleNamespace(stages=(), rows=ways[cuts[0]])

    def planner(chain, budget_bytes):
        plan = Table(*chain.rows)(chain, budget_bytes)
        number = table.rows.index(chain.rows[plan.segments[0].stop - 1])
        return plan.replace(segments=(Segment(0, number + 1),))

    planner.is_quick = is_quick
    choices = cuts or [(k, 99) for k in range(len(ways))]
    try:
        found = repair.fit(table, planner, Budget(), int(n_bytes * BUDGET), choices)
    except InfeasibleBudgetError as refused:
        return refused.least_bytes / BUDGET, None, table.compiles
    return found.measurement.temp_bytes / BUDGET, found.prediction.extra_flops, table.compiles


def test_the_least_that_is_named_is_met(monkeypatch):
    """Stages that are predicted to fit and do not: what other stages need is named, and found when it is asked for."""
    ways = ((0.97, 1.1, 0.5),), ((0.9, 1.0, 0.6),)
    assert fitted(monkeypatch, 0.5, *ways)[:2] == (1.0, None)
    assert fitted(monkeypatch, 1.0, *ways)[:2] == (1.0, 0.6)


PACKED = ((0.8, 0.97, 1.14), (0.9, 1.05, 0.5)), ((0.85, 0.93, 1.0),)
"""The least of the first way is predicted lower than that of the second, but packed worse."""


def test_the_least_is_of_all_ways_to_cut(monkeypatch):
    """It is what the compiler says is least, not what is predicted to be, and no plan of a larger budget needs less."""
    assert fitted(monkeypatch, 0.3, *PACKED) == (0.93, None, 3)
    assert fitted(monkeypatch, 0.93, *PACKED)[:2] == (0.93, 1.0)
    assert fitted(monkeypatch, 0.3, PACKED[0], ((0.95, 0.9, 1.0),))[:2] == (0.97, None)  # not expected to be least


def test_the_last_bytes_are_not_bought_dearly(monkeypatch):
    """Nearly the least may execute far less again, and be packed better: of one way to cut both are looked at."""
    nearly = ((0.8, 0.97, 3.1), (0.8004, 0.96, 2.3))
    assert fitted(monkeypatch, 0.3, nearly)[:2] == (0.96, None)
    assert fitted(monkeypatch, 0.96, nearly)[:2] == (0.96, 2.3)
    assert fitted(monkeypatch, 0.3, ((0.8, 0.95, 3.1), nearly[1]))[:2] == (0.95, None)


def test_what_needs_less_than_the_least_that_was_predicted_is_named(monkeypatch):
    """Packing may add much to the least and nothing to a larger plan: what needs less is looked for between them."""
    between = (0.8, 0.97, 3.1), (0.86, 0.99, 1.5), (0.9, 0.9, 0.6)
    assert fitted(monkeypatch, 0.3, between) == (0.9, None, 4)
    assert fitted(monkeypatch, 0.9, between)[:2] == (0.9, 0.6)
    assert fitted(monkeypatch, 0.3, (between[0], (0.85, 0.88, 0.7), (0.87, 0.87, 0.6)))[:2] == (0.87, None)
    assert fitted(monkeypatch, 0.3, ((0.8, 0.807, 3.1), (0.803, 0.803, 0.6))) == (0.807, None, 2)  # hardly apart
    level = (0.6, 0.97, 3.1), (0.785, 0.9699, 1.5), (0.87, 0.87, 0.6)  # a few bytes less are no reason to stay below
    assert fitted(monkeypatch, 0.3, level)[:2] == (0.87, None)
    assert fitted(monkeypatch, 0.3, between, is_quick=False) == (0.97, None, 2)  # a planner that takes long
    monkeypatch.setattr(Table, "remembers", False)  # who asks for what is named might find no compile left for it
    assert fitted(monkeypatch, 0.3, between) == (0.97, None, 2)


def test_more_budget_does_not_mean_more_executed_again(monkeypatch):
    """Where a plan executes much again, the least plan of other stages, which a smaller budget gets, is looked at."""
    assert fitted(monkeypatch, 1.0, *PACKED) == (0.93, 1.0, 4)
    little = ((0.8, 0.97, 0.45), (0.9, 1.05, 0.3)), ((0.85, 0.93, 0.4),)
    assert fitted(monkeypatch, 1.0, *little) == (0.97, 0.45, 3)


def test_the_least_plan_is_not_taken_for_want_of_a_better_guess(monkeypatch):
    """Where all that was expected to fit did not, what errs as they did is tried beside the least, which fits."""
    near = (0.89, 0.964, 0.033), (0.937, 1.041, 0.003), (0.979, 1.038, 0.002), (0.998, 1.016, 0.0)
    assert fitted(monkeypatch, 1.0, ((0.4, 0.45, 4.0), *near)) == (0.964, 0.033, 6)
    assert fitted(monkeypatch, 1.0, ((0.4, 0.45, 0.4), *near)) == (0.45, 0.4, 5)


def test_a_budget_too_small_for_a_way_to_cut_executes_no_less_again(monkeypatch):
    """It is planned on another way to cut; a larger one that the first way fits executes no more than that."""
    ways = ((0.9, 0.9, 0.3), (1.2, 1.2, 0.1)), ((0.6, 0.6, 0.5), (0.8, 0.8, 0.2))
    assert [fitted(monkeypatch, share, *ways)[1] for share in (0.7, 0.8, 0.9, 1.0, 1.2)] == [0.5, 0.2, 0.2, 0.2, 0.1]
    mispredicted = ways[0], tuple((p, p + 0.7, 0.3 - p / 10) for p in (0.5, 0.6, 0.7, 0.8))
    assert fitted(monkeypatch, 1.0, *mispredicted)[1:] == (0.3, 3)
    assert fitted(monkeypatch, 1.0, *ways, is_quick=False)[1] == 0.3
    long = [(k, *range(100, 101 + FEW_STAGES)) for k in range(2)]
    assert fitted(monkeypatch, 0.9, *ways, cuts=long)[1] == 0.3


@pytest.mark.parametrize("seed", range(10))
def test_more_budget_never_executes_more_again_where_predictions_hold(monkeypatch, seed):
    """Of random plans, on three ways to cut."""
    rng = np.random.default_rng(seed)
    ways = [tuple((p, p, 1 - p + 0.8 * e) for p, e in np.sort(rng.random((5, 2)), axis=0) * (1, -1)) for _ in range(3)]
    found = [fitted(monkeypatch, share, *ways)[1] for share in np.arange(0.1, 1.0, 0.05)]
    again = [flops for flops in found if flops is not None]
    assert again == sorted(again, reverse=True)


@pytest.mark.parametrize("n_bytes", [0.3, 0.7, 0.93, 0.95, 1.0, 1.2])
def test_all_ways_together_are_compiled_few_times(monkeypatch, n_bytes):
    """However many there are, and however badly all are predicted."""
    ways = [tuple((p + 0.01 * k, p + 0.3 + 0.02 * k, 3 - p) for p in np.arange(0.4, 1.5, 0.05)) for k in range(4)]
    assert fitted(monkeypatch, n_bytes, *ways)[2] <= MOST_COMPILES


@pytest.mark.parametrize(
    ("coarse", "fine", "is_fine"), [(0.05, 0.0, True), (0.5, 0.49, True), (0.05, 0.042, False), (0.008, 0.0, False)]
)
def test_a_large_stage_is_cut_where_that_pays(coarse, fine, is_fine):
    """A stage whose backward pass takes much of the budget, if what is executed again becomes clearly less."""
    again = {(0, 9): coarse, (0, 5, 9): fine}
    large = (SimpleNamespace(start=0, stop=9, transient_bytes=BUDGET),)
    pricer = SimpleNamespace(
        is_compiled=False, anew=lambda **_: pricer, chain=lambda cuts: SimpleNamespace(cuts=cuts, stages=large)
    )

    def planner(chain, budget_bytes):
        return Plan("f", Budget(), 9, prediction=Prediction(budget_bytes, again[chain.cuts], 1.0, 0, "by hand"))

    assert [o.cuts for o in promising(pricer, planner, BUDGET, list(again))] == [list(again)[is_fine]]


@pytest.mark.parametrize(("ahead", "again", "barriers"), [(1, 0.0, ()), (0, 0.3, (1,))])
def test_barriers_are_left_out_where_they_hold_zeros_ahead(monkeypatch, ahead, again, barriers):
    """They are, where what needs too much with them fits without."""
    fenced, without = ((0.8, 0.9, 0.3), (0.99, 1.2, 0.0)), ((0.81, 0.95, 0.3), (0.98, 0.97, 0.0))
    monkeypatch.setattr(repair, "finish", lambda program, plan, budget: plan)
    table = Table(*fenced, *without)
    table.plain = lambda: Plan("f", Budget(), 99, measurement=Measurement(2 * BUDGET, 0, 0, 0, 0.0, 0.0, "cpu"))
    table.pricer.chain = lambda cuts: Chain((Stage(0, 9, ahead_bytes=ahead), Stage(9, 99, joined_bytes=1)), (), ())

    def planner(chain, budget_bytes):
        rows = fenced if any(stage.joined_bytes for stage in chain.stages) else without
        plan = Table(*rows)(chain, budget_bytes)
        number = table.rows.index(rows[plan.segments[0].stop - 1])
        return plan.replace(segments=(Segment(0, number + 1),), barriers=(1,))

    planner.is_quick = True
    found = repair.fit(table, planner, Budget(), BUDGET, [(0, 99)])
    assert (found.prediction.extra_flops, found.barriers) == (again, barriers)
    assert table.compiles <= MOST_COMPILES


def test_where_nothing_helps_the_least_is_the_function_as_it_is():
    """One layer's gradient cannot be made smaller by recomputation: no larger plan is offered as the least."""

    def layer(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    plain = jaxsub.measure(layer, *args).temp_bytes
    with pytest.raises(InfeasibleBudgetError, match=r"below what the function needs as it is, and no plan") as refused:
        jaxsub.plan(layer, *args, budget=plain // 3, progress=False)
    assert refused.value.least_bytes == plain
    assert jaxsub.plan(layer, *args, budget=plain, progress=False).n_regions == 0
