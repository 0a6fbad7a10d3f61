"""`optimal` against brute force, against Griewank and Walther, and on an abstract machine that checks every step."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machine import Machine, MachineError, all_runs, extra_steps, random_chain, uniform

from jaxsub.core.chain import Chain, Crossing, Item, Option, Prediction, Run, Stage
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.simulate import extra_flops, predict
from jaxsub.core.tuning import TUNING
from jaxsub.planners import dp_tables as tables
from jaxsub.planners import optimal
from jaxsub.planners.dp_tables import depth, tables_of
from jaxsub.planners.optimal import Optimal, solve
from jaxsub.planners.split_regions import split_regions

pytestmark = pytest.mark.once
MIB = 2**20


def chains(most: int = 5) -> st.SearchStrategy[Chain]:
    """Chains of up to `most` stages with small whole numbers, skips, shared weights, items and options."""
    return st.builds(
        lambda seed, n: random_chain(random.Random(seed).randint, n), st.integers(0, 2**32), st.integers(1, most)
    )


def points(chain: Chain) -> list[tuple[int, float]]:
    """Predicted bytes and extra FLOPs of every plan there is."""
    return [(p.temp_bytes, p.extra_flops) for p in (predict(chain, runs) for runs in all_runs(chain))]


def pareto(found: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Those that nothing else beats in both, bytes rising."""
    best: list[tuple[int, float]] = []
    for n_bytes, flops in sorted(found):
        if not best or flops < best[-1][1]:
            best.append((n_bytes, flops))
    return best


def network(n: int, seed: int = 0) -> Chain:
    """A deep network of a few kinds of stages with three options each and one long skip, sizes in MiB."""
    rng = random.Random(seed)
    kinds = [[rng.randint(a * MIB, b * MIB) for a, b in ((1, 4), (20, 60), (10, 40), (10, 30))] for _ in range(5)]
    stages, items = [], []
    for s in range(n):
        crossing, transient, keep, keep_transient = rng.choice(kinds)
        stages.append(Stage(s, s + 1, 0, 5e9, 4e9, crossing, transient, keep, keep_transient))
        saved = ((), 0, 4e9), ((0,), keep // 3, 2e9), ((0, 1), keep // 2, 5e8)
        items.append(Item(s, s + 1, tuple(Option(names, size, transient, flops) for names, size, flops in saved)))
    crossings = [Crossing(s, s + 1, 2 * stages[s].forward_bytes, 2 * stages[s].forward_bytes) for s in range(n - 1)]
    return Chain(tuple(stages), tuple(items), (*crossings, Crossing(1, n - 1, 4 * MIB, 4 * MIB)))


@given(chains())
def test_machine_and_prediction_agree(chain):
    """The machine executes every plan of a chain, and finds the bytes and FLOPs that are predicted."""
    for runs, _ in zip(all_runs(chain), range(200), strict=False):
        machine, prediction = Machine(chain).execute(runs), predict(chain, runs)
        assert (machine.peak_bytes, machine.extra_flops) == (prediction.temp_bytes, prediction.extra_flops)


def test_machine_refuses_a_step_without_its_input():
    """A backward step whose input nothing holds is refused."""
    machine = Machine(uniform(3))
    machine.live.clear()
    with pytest.raises(MachineError, match="stage 2 needs"):
        machine._reads(2, machine.live)


@settings(max_examples=400)
@given(chains())
def test_optimal_equals_brute_force(chain):
    """The frontier is that of all plans, byte for byte and FLOP for FLOP."""
    assert [f[:2] for f in solve(chain).frontier(10**6)] == pareto(points(chain))


def hosting(seed: int, n: int) -> Chain:
    """A random chain whose outputs have places for what is stored."""
    rng = random.Random(seed)
    chain = random_chain(rng.randint, n)

    def sizes(n_bytes: int) -> tuple[int, ...]:
        return (n_bytes,) if n_bytes else ()

    def places() -> tuple[int, ...]:
        return tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 2)))

    stages = (replace(s, keep_sizes=sizes(s.keep_bytes), gradient_sizes=places()) for s in chain.stages)
    items = (replace(i, options=tuple(replace(o, saved_sizes=sizes(o.saved_bytes)) for o in i.options))
             for i in chain.items)  # fmt: skip
    crossings = (replace(c, sizes=sizes(c.n_bytes)) for c in chain.crossings)
    return replace(chain, stages=tuple(stages), items=tuple(items), crossings=tuple(crossings))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_optimal_is_no_worse_where_outputs_host(seed, n):
    """A plan fits with what outputs host, and recomputes no more than the best of a chain that hosts nothing.

    What outputs host depends on the whole plan, which no table knows: it is no more than a chance that is taken.
    """
    chain = hosting(seed, n)
    alone = replace(chain, stages=tuple(replace(s, gradient_sizes=()) for s in chain.stages))
    found, solution = points(alone), solve(chain)
    for budget_bytes in {n_bytes for n_bytes, _ in found}:
        prediction = predict(chain, solution.runs(budget_bytes))
        assert prediction.temp_bytes <= budget_bytes
        assert prediction.extra_flops <= min(flops for n_bytes, flops in found if n_bytes <= budget_bytes)


@given(chains())
def test_every_budget_gets_the_cheapest_plan_in_least_memory(chain):
    """At every budget no plan that fits is cheaper, and none as cheap takes less."""
    found = points(chain)
    solution = solve(chain)
    for budget_bytes in {n_bytes for n_bytes, _ in found}:
        prediction = predict(chain, solution.runs(budget_bytes))
        least = min((flops, n_bytes) for n_bytes, flops in found if n_bytes <= budget_bytes)
        assert (prediction.extra_flops, prediction.temp_bytes) == least


@pytest.mark.parametrize("max_depth", [None, 3])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_out_of_the_tables_of_long_chains_changes_no_plan(monkeypatch, seed, max_depth):
    """A run that recomputes more than a whole plan in as many slots is part of no plan; others may be."""
    chain = random_chain(random.Random(seed).randint, 20, n_items=30)
    most_bytes, bound = predict(chain, chain.plain()).temp_bytes, tables._most_flops

    def plans(most):
        monkeypatch.setattr(
            tables, "_most_flops", lambda costs, _: np.full(costs.n_slots + 1, np.minimum(most, tables.MOST_FLOPS))
        )
        found = tables_of(chain, most_bytes, 90, max_depth)
        return found, [(m, found.top[0, m], found.runs(m)) for m in map(int, found.steps(most_bytes))]

    whole, expected = plans(tables.MOST_FLOPS)
    least = whole.top[0]
    assert plans(least * 1.0001)[1] == expected
    assert plans(least * 0.05)[1] != expected
    bounds = bound(whole.costs, whole.singles)
    assert np.isinf(least[bounds < least]).all()
    assert (bounds < tables.MOST_FLOPS).any()


@pytest.mark.parametrize("max_depth", [None, 3])
@pytest.mark.parametrize("seed", range(4))
def test_tables_for_some_memory_and_work_hold_the_same_plans(seed, max_depth):
    """Tables that are filled for more memory and less work than others hold every plan of theirs that is such a one."""
    chain = random_chain(random.Random(seed).randint, 20, n_items=30)
    most_bytes = predict(chain, chain.plain()).temp_bytes
    whole = tables_of(chain, most_bytes, 90, max_depth)
    steps = [int(m) for m in whole.steps(most_bytes)]
    floor, most_flops = steps[len(steps) // 3], float(whole.top[0, steps[len(steps) // 2]])
    for least_slots, most in ((floor, np.inf), (-1, most_flops), (floor, most_flops)):
        part = tables_of(chain, most_bytes, 90, max_depth, max(0, least_slots + 0.5) * whole.unit_bytes, most)
        wanted = [m for m in steps if m > least_slots and whole.top[0, m] <= most]
        assert len(wanted) > 3
        assert [m for m in map(int, part.steps(most_bytes)) if part.top[0, m] <= most] == wanted
        assert [part.runs(m) for m in wanted] == [whole.runs(m) for m in wanted]
        if least_slots > 0:
            assert min(map(int, part.steps(most_bytes))) > least_slots


def test_long_chains_get_the_same_plans_from_tables_that_hold_less(monkeypatch):
    """At every budget, and at every step from the most memory down to the least."""
    chain, filled = network(70, seed=3), []
    most_bytes = predict(chain, chain.plain()).temp_bytes

    def found():
        for share in (0.9, 0.7, 0.5, 0.35, 0.25, 0.22):
            yield solve(chain).runs(int(share * most_bytes))
        yield from (runs for runs, *_ in solve(chain, slots=50)._steps(0, most_bytes, stride=3))

    def spied(*args):
        filled.append(args[4:])
        return tables_of(*args)

    monkeypatch.setattr(optimal, "tables_of", spied)
    from_part = list(found())
    assert any(least_bytes > 0 for least_bytes, _ in filled)
    assert any(most_flops < np.inf for _, most_flops in filled)
    monkeypatch.setattr(optimal, "tables_of", lambda *args: tables_of(*args[:4]))
    assert from_part == list(found())


@pytest.mark.parametrize(("n", "seed"), [(6, 0), (6, 1), (6, 2), (7, 3), (7, 4), (8, 5)])
def test_longer_chains_equal_brute_force(n, seed):
    """Equal cost on chains of up to eight stages."""
    chain = random_chain(random.Random(seed).randint, n, n_items=1)
    assert [f[:2] for f in solve(chain).frontier(10**6)] == pareto(points(chain))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("seed", "n_items"),
    [(9, 0), *((seed, n_items) for seed in range(6) for n_items in (0, 1))],
)
def test_nine_stages_equal_brute_force(seed, n_items):
    """Equal cost on chains of nine stages, the longest that brute force masters, with options and without."""
    chain = random_chain(random.Random(seed).randint, 9, n_items=n_items)
    assert [f[:2] for f in solve(chain).frontier(10**6)] == pareto(points(chain))


@given(chains(8), st.floats(0, 1.2))
def test_plans_run_on_the_machine_within_budget(chain, share):
    """What is planned is executed in its budget, or refused with a budget that then works."""
    budget_bytes = int(share * predict(chain, chain.plain()).temp_bytes)
    solution = solve(chain)
    least_bytes = predict(chain, solution.least()).temp_bytes
    if budget_bytes < least_bytes:
        with pytest.raises(InfeasibleBudgetError) as refusal:
            solution.runs(budget_bytes)
        assert (refusal.value.requested_bytes, refusal.value.least_bytes) == (budget_bytes, least_bytes)
        budget_bytes = least_bytes
    runs = solution.runs(budget_bytes)
    assert Machine(chain).execute(runs).peak_bytes <= budget_bytes


@pytest.mark.parametrize("n", range(1, 61))
def test_uniform_chains_cost_what_griewank_and_walther_say(n):
    """Extra forward steps on n equal stages with s slots are the least there are; conventions: `extra_steps`."""
    chain = uniform(n)
    solution = solve(chain, 12, max_depth=60)
    for slots in range(1, 13):
        prediction = predict(chain, solution.runs(slots))
        assert prediction.extra_flops == extra_steps(n, slots)
        assert prediction.temp_bytes <= slots


@given(chains())
def test_natural_plan_is_the_least_memory_for_its_flops(chain):
    """Without a budget it is the least memory among plans that recompute no more than allowed."""
    allowed = TUNING.natural_share * chain.forward_flops
    prediction = Optimal()(chain).prediction
    assert prediction.temp_bytes == min(n_bytes for n_bytes, flops in points(chain) if flops <= allowed + 1e-5)


@pytest.mark.parametrize("n", [33, 70])
def test_monotone_and_within_budget_with_coarse_slots(n):
    """With slots far coarser than bytes every plan fits, and a larger budget is never slower."""
    chain = network(n)
    plain_bytes = predict(chain, chain.plain()).temp_bytes
    solution = solve(chain)
    least_bytes = predict(chain, solution.least()).temp_bytes
    flops = float("inf")
    for step in range(20):
        budget_bytes = int(least_bytes * (plain_bytes / least_bytes) ** (step / 19)) + 1
        prediction = predict(chain, solution.runs(budget_bytes))
        assert prediction.temp_bytes <= budget_bytes
        assert prediction.extra_flops <= flops
        flops = prediction.extra_flops
    assert flops == 0


@pytest.mark.parametrize("seed", [9, 11])
def test_monotone_from_one_scale_to_the_next(seed):
    """Where a budget passes from one filling of the tables to a coarser one, it gets no slower plan."""
    chain = network(33, seed)
    solution = solve(chain, slots=100)
    for rung in range(5, 0, -1):
        most_bytes, flops = solution.max_bytes * 0.8**rung, float("inf")
        for share in (0.99, 0.999999, 1.000001, 1.01, 1.06, 1.08, 1.1, 1.14):
            now = extra_flops(chain, solution.runs(int(share * most_bytes)))
            assert now <= flops
            flops = now


@pytest.mark.parametrize("share", [0.7, 0.3, 0.1])
def test_coarse_slots_lose_little(share):
    """500 slots cost under half a percent of a forward pass more than 8000."""
    chain = network(40)
    budget_bytes = int(share * predict(chain, chain.plain()).temp_bytes)
    coarse, fine = (extra_flops(chain, solve(chain, slots=slots).runs(budget_bytes)) for slots in (500, 8000))
    assert coarse <= fine + 0.005 * chain.forward_flops


@pytest.mark.parametrize("max_depth", [1, 2, 8])
def test_nesting_is_bounded(max_depth):
    """However tight the budget, regions stand no deeper in each other than allowed, and deeper ones are cheaper."""
    chain = uniform(60)
    runs = solve(chain, max_depth=max_depth).least()
    assert depth(runs) <= max_depth
    free = solve(chain, max_depth=60).least()
    assert depth(free) > 8
    assert predict(chain, free).temp_bytes < predict(chain, runs).temp_bytes


def test_nesting_goes_as_deep_as_48_layers_need():
    """Two states at a time are enough for 48 equal stages, for which eight levels of nesting are too few."""
    chain = uniform(48)
    assert predict(chain, solve(chain).runs(2)).temp_bytes == 2
    assert predict(chain, solve(chain, max_depth=8).least()).temp_bytes > 2


@settings(max_examples=150)
@given(chains(5), st.integers(1, 2))
@example(random_chain(random.Random(5).randint, 5), 1)  # the cheapest lies between two steps of deeper plans
def test_bounded_plans_equal_brute_force(chain, max_depth):
    """At every budget no plan that fits and nests no deeper than allowed is cheaper."""
    shallow = [runs for runs in all_runs(chain) if depth(runs) <= max_depth]
    found = [(p.temp_bytes, p.extra_flops) for p in (predict(chain, runs) for runs in shallow)]
    solution = solve(chain, max_depth=max_depth)
    for budget_bytes in {n_bytes for n_bytes, _ in found}:
        runs = solution.runs(budget_bytes)
        assert depth(runs) <= max_depth
        assert extra_flops(chain, runs) == min(flops for n_bytes, flops in found if n_bytes <= budget_bytes)


@pytest.mark.parametrize("max_depth", [1, 2, 3])
def test_nesting_is_bounded_at_every_budget(max_depth):
    """Where the cheapest plan nests too deep, the cheapest that does not is taken."""
    chain = random_chain(random.Random(8).randint, 25, n_items=0)
    bounded, free = solve(chain, max_depth=max_depth), solve(chain, max_depth=25)
    least_bytes = predict(chain, bounded.least()).temp_bytes
    budgets = range(least_bytes, least_bytes + 25)
    assert any(depth(free.runs(budget_bytes)) > max_depth for budget_bytes in budgets)
    assert all(depth(bounded.runs(budget_bytes)) <= max_depth for budget_bytes in budgets)


def test_least_bytes_of_a_refusal_work():
    """A budget that nothing fits is refused in words, and the least it names is met."""
    chain = network(33)
    with pytest.raises(InfeasibleBudgetError, match=r"Budget `1.00 MiB` is below the least predicted peak") as refusal:
        Optimal()(chain, MIB)
    assert Optimal()(chain, refusal.value.least_bytes).prediction.temp_bytes <= refusal.value.least_bytes


def test_free_plans_are_optimal_and_plain_fits_its_own_budget():
    """With the plain program's bytes nothing is recomputed, and the plan says that it is optimal."""
    chain = network(33)
    plan = Optimal()(chain, predict(chain, chain.plain()).temp_bytes)
    assert plan.prediction.extra_flops == 0
    assert plan.is_optimal
    assert not Optimal()(chain, plan.prediction.temp_bytes // 4).is_optimal


def test_values_are_saved_inside_nests_too():
    """Near the least memory that spares much; where JAX would recompute them, they are saved at the top level only.

    What ends a nest saves nothing.
    """
    chain = network(33)
    least_bytes = predict(chain, solve(chain).least()).temp_bytes

    def saving(runs: tuple[Run, ...]) -> list[Run]:
        return [r for run in runs for r in (run, *saving(run.children)) if r.option is not None and r.option.saved]

    def ends(runs: tuple[Run, ...]) -> list[Run]:
        return [end for run in runs if run.children for end in (run.children[-1], *ends(run.children))]

    outermost = replace(chain, saves_in_nests=False)
    for share in (1.05, 1.5, 3):
        budget_bytes = int(share * least_bytes)
        runs, inside = solve(outermost).runs(budget_bytes), solve(chain).runs(budget_bytes)
        assert saving(runs) == [run for run in runs if run.option is not None and run.option.saved]
        assert extra_flops(chain, inside) <= extra_flops(chain, runs)
        assert not [run for run in saving(inside) if run in ends(inside)]
        if share == 1.05:
            assert len(saving(inside)) > len([run for run in inside if run.option is not None and run.option.saved])
            assert extra_flops(chain, inside) < 0.97 * extra_flops(chain, runs)


@pytest.mark.parametrize(("n", "most_seconds"), [(33, 0.5), (160, 10)])
def test_planning_time(n, most_seconds):
    """Planning takes tens of milliseconds for 33 stages, under a second for 160; five times more on a busy machine."""
    chain = network(n)
    budget_bytes = predict(chain, chain.plain()).temp_bytes // 5
    start = time.perf_counter()
    Optimal()(chain, budget_bytes)
    assert time.perf_counter() - start < most_seconds


@pytest.mark.parametrize(
    ("n", "extra", "temp_bytes", "is_taken"), [(64, 5.09, 9, True), (64, 5.2, 9, False), (64, 5.09, 11, False),
                                               (63, 5.09, 9, False)]
)  # fmt: skip
def test_of_a_long_chain_fewer_regions_are_taken(n, extra, temp_bytes, is_taken):
    """If they need no more and recompute as much up to a thousandth of a forward pass."""
    chain = uniform(n)
    many = (*(chain.recompute(s) for s in range(n - 1)), Run(n - 1, n))
    few = (chain.nest(0, n - 1), Run(n - 1, n))
    best, other = (Prediction(m, e, 100.0, 0, "by hand") for m, e in ((10, 5.0), (temp_bytes, extra)))
    assert solve(chain)._simplest([(many, best), (few, other)]) == (few if is_taken else many)


def regions(n: int, long: Option) -> tuple[Chain, tuple[Run, ...]]:
    """A chain whose stages may each be a region that keeps 2 + 1 bytes and recomputes one FLOP, and a long run."""
    chain, short = uniform(n), Option((0,), 2, 5, 1.0)
    items = (*(Item(s, s + 1, (Option((), 0, 5, 3.0), short)) for s in range(n - 1)), Item(0, n - 1, (long,)))
    return replace(chain, items=items), (Run(0, n - 1, long), Run(n - 1, n))


@pytest.mark.parametrize(
    ("kept", "transient", "flops", "n_runs"),
    [(11, 20, 4.0, 5), (12, 20, 4.0, 5), (10, 20, 4.0, 2), (11, 20, 3.9, 2), (11, 4, 4.0, 2)],
)
def test_long_regions_stand_split_regions_that_cost_no_more(kept, transient, flops, n_runs):
    """Not where the pieces keep a byte more, recompute more, or are predicted to need more."""
    chain, runs = regions(5, Option((0, 1, 2, 3), kept, transient, flops))
    assert len(split_regions(chain, runs)) == n_runs


@given(chains(4))
def test_pieces_need_no_more_and_execute_no_more_again(chain):
    """Whatever the plan; and a planner's own regions are such pieces already."""
    for runs in list(all_runs(chain))[:50]:
        before, after = predict(chain, runs), predict(chain, split_regions(chain, runs))
        assert after.temp_bytes <= before.temp_bytes
        assert after.extra_flops <= before.extra_flops + 1e-5
    for n_bytes, _ in points(chain)[:5]:
        found = solve(chain).runs(max(n_bytes, min(p for p, _ in points(chain))))
        assert split_regions(chain, found) == found
