"""`milp`: its programs against brute force and on a machine of their own, its bounds, and `optimal` against it."""

import contextlib
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import pytest
import zoo
from jaxprs import by_result
from layers import tanh_layers
from machine import Machine, all_runs, random_chain, uniform

import jaxsub
from jaxsub.core.chain import Chain, Crossing, Run, Stage
from jaxsub.core.errors import InfeasibleBudgetError, PlannerError
from jaxsub.core.simulate import predict
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.trace import trace
from jaxsub.planners import get, milp
from jaxsub.planners.milp import MAX_STAGES, Milp, least_flops
from jaxsub.planners.milp_model import Schedules, Solved
from jaxsub.planners.milp_nested import Regions, runs_of
from jaxsub.planners.optimal import Optimal, solve
from jaxsub.search.verify import cut_choices

CLOSE = 1e-4  # the solver's tolerance, on figures of small whole numbers


def small(seed: int, most: int = 5) -> Chain:
    rng = random.Random(seed)
    return random_chain(rng.randint, rng.randint(1, most))


def keeping(seed: int) -> Chain:
    """The same, but some of what crosses a cut is gone where its reader keeps something else instead."""
    rng, chain = random.Random(seed), small(seed)
    return replace(chain, crossings=tuple(replace(c, is_spent=rng.random() < 0.7) for c in chain.crossings))


def is_bare(runs: tuple[Run, ...]) -> bool:
    """Whether some nest holds a single nest or a single region, which is never better than what it holds."""
    lone = [r.children[0] for r in runs if len(r.children) == 1]
    return any(c.option is not None or c.children for c in lone) or any(is_bare(r.children) for r in runs)


def points(chain: Chain) -> list[tuple[int, float]]:
    """Predicted bytes and extra FLOPs of every plan there is."""
    found = (predict(chain, runs) for runs in all_runs(chain) if not is_bare(runs))
    return [(p.temp_bytes, p.extra_flops) for p in found]


def budgets(found: list[tuple[int, float]]) -> list[int]:
    return sorted({n_bytes for n_bytes, _ in found})[::4]


@pytest.mark.parametrize("seed", range(40))
def test_the_program_of_plans_equals_brute_force(seed):
    """At every budget the cheapest of all plans is found, and reads back as runs that fit and cost as much."""
    chain = small(seed)
    found = points(chain)
    for budget_bytes in budgets(found):
        program = Regions(chain, budget_bytes)
        solved = program.solve()
        assert solved.is_proved
        assert solved.flops == pytest.approx(min(f for b, f in found if b <= budget_bytes), abs=CLOSE)
        runs = runs_of(program, solved.values)
        assert predict(chain, runs).extra_flops == pytest.approx(solved.flops, abs=CLOSE)
        assert Machine(chain).execute(runs).peak_bytes <= budget_bytes


def stands_in(program: Schedules, state: SimpleNamespace) -> None:
    """Where something is kept in the place of what a stage read, that place is counted."""
    for w in (program.modes[o] for o in state.kept if program.modes[o].is_kept):
        spent = {c for c, x in enumerate(program.crossings) if x.is_spent and x.last == w.start}
        assert spent <= state.values, f"what stage {w.start} keeps would lie where nothing is counted"


def executed(program: Schedules, solved: Solved) -> tuple[int, float]:
    """Execute a schedule of Checkmate's step by step: its peak in bytes and its recompute.

    Buffers are sets of names; nothing is asked of the program but which of its variables are 1.
    """
    chain, n, last = program.chain, len(program.chain.stages), len(program.chain.stages) - 1
    on = {key for key, v in program.at.items() if solved.values[v] > 0.5}
    chosen = {w.stop - 1: (o, w) for o, w in enumerate(program.modes) if ("Z", (o,)) in on}
    state = SimpleNamespace(values=set(), kept=set(), peak=0, flops=0.0)

    def note(extra: int) -> None:
        held = sum(program.crossings[c].n_bytes for c in state.values)
        held += sum(program.modes[o].stored_bytes for o in state.kept)
        state.peak = max(state.peak, held + extra)

    def read(s: int) -> set[int]:
        return {c for c, x in enumerate(program.crossings) if x.made < s <= x.last}

    def step(s: int, wanted: set[int], kept: set[int], around: int) -> None:
        """One forward step; `wanted` and `kept` are what is still wanted after the steps that follow."""
        assert read(s) <= state.values, f"stage {s} lacks what it reads"
        note(chain.stages[s].forward_bytes + around)
        state.values |= {c for c, x in enumerate(program.crossings) if x.made == s}
        state.kept |= {o for o in kept if program.modes[o].stop == s + 1}

    def keep(values: set[int], steps: list[int], done: int) -> None:
        later = set().union(*(read(s) for s in steps if s > done)) if steps else set()
        state.values &= values | later
        stands_in(program, state)

    def held(kind: str, t: int) -> set[int]:
        return {key[1] for name, key in on if name == kind and key[0] == t}

    def kept_at(t: int) -> set[int]:
        fixed = {o for o, w in chosen.values() if w.stored_bytes and not w.is_remade and w.stop - 1 <= t}
        return held("K", t) | fixed

    forward = list(range(chosen[last][1].start if last in chosen else n))
    forward = [s for s in forward if s < last]
    for s in forward:
        keep(held("S", last), forward, s - 1)
        step(s, held("S", last), kept_at(last), 0)
    for t in reversed(range(n)):
        state.values &= held("S", t)
        state.kept &= kept_at(t)
        stands_in(program, state)
        again = sorted(i for name, key in on if name == "R" and key[0] == t for i in key[1:])
        end = {c for c in held("E", t) if program.crossings[c].made < t}
        for s in again:
            keep(end | {c for c in held("S", t) if program.crossings[c].made >= s}, again, s - 1)
            step(s, end, held("RK", t), chain.held_bytes(t + 1))
            state.flops += chain.stages[s].forward_flops
        state.values &= end
        if t in chosen:
            o, mode = chosen[t]
            assert read(mode.start) <= state.values, f"the backward pass of stage {t} lacks what it reads"
            assert not mode.stored_bytes or o in state.kept
            state.kept -= {o}
            state.kept &= kept_at(t - 1)
            note(mode.back_bytes)
            state.flops += mode.flops
    return state.peak, state.flops


@pytest.mark.parametrize("seed", range(40))
def test_schedules_can_be_executed_and_bound_plans(seed):
    """Checkmate's cheapest schedule runs in its budget at its price; no plan is cheaper; the relaxation is below."""
    chain = keeping(seed)
    found = points(chain)
    for budget_bytes in budgets(found):
        program = Schedules(chain, budget_bytes)
        solved = program.solve()
        peak, flops = executed(program, solved)
        assert peak <= budget_bytes
        assert flops == pytest.approx(solved.flops, abs=CLOSE)
        assert solved.flops <= min(f for b, f in found if b <= budget_bytes) + CLOSE
        assert least_flops(chain, budget_bytes) <= solved.flops + CLOSE


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_where_outputs_host_values(seed):
    """Whatever the places of gradients hold of what a plan stores, no plan is below the bound at its own peak."""
    rng, chain = random.Random(seed), small(seed)
    stages = tuple(replace(s, keep_sizes=(s.keep_bytes,), gradient_sizes=(rng.randint(1, 9),)) for s in chain.stages)
    crossings = tuple(replace(c, sizes=(c.n_bytes,)) for c in chain.crossings)
    hosting = replace(chain, stages=stages, crossings=crossings)
    found = points(hosting)
    assert len(chain.stages) < 3 or found != points(chain)
    for budget_bytes in budgets(found):
        least = min(f for b, f in found if b <= budget_bytes)
        assert least_flops(hosting, budget_bytes) <= least + CLOSE
        with contextlib.suppress(InfeasibleBudgetError):  # `optimal` does not look for what outputs could host
            plan = Milp(5)(hosting, budget_bytes)
            assert plan.prediction.temp_bytes <= budget_bytes
            assert not plan.is_optimal or plan.prediction.extra_flops <= least + CLOSE


def test_schedules_are_more_than_plans():
    """Somewhere a schedule is cheaper than every plan: the bound is no plan in disguise."""
    stages = tuple(Stage(s, s + 1, transient_bytes=1, keep_bytes=1) for s in range(9))
    chain = Chain(stages, (), tuple(Crossing(s, s + 1, 1, 0) for s in range(8)))
    assert Schedules(chain, 5).solve().flops < Regions(chain, 5).solve().flops - 0.5


def test_no_schedule_fits_too_small_a_budget():
    """Below what any schedule needs the bound is infinite."""
    chain = uniform(4, keep_bytes=1, transient_bytes=3)
    assert least_flops(chain, 1) == float("inf")
    assert Schedules(chain, 1).solve().values is None


@pytest.mark.parametrize("seed", range(8))
def test_milp_is_never_worse_than_optimal(seed):
    """Its plans fit, cost at most what `optimal`'s do, lie above their bound, and say whether they are proved."""
    chain = random_chain(random.Random(seed).randint, 9)
    plain, least = (predict(chain, runs).temp_bytes for runs in (chain.plain(), solve(chain).least()))
    for share in (0.1, 0.5):
        budget_bytes = int(least + share * (plain - least))
        plan, other = Milp(20)(chain, budget_bytes), Optimal()(chain, budget_bytes)
        assert plan.prediction.temp_bytes <= budget_bytes
        assert plan.prediction.extra_flops <= other.prediction.extra_flops
        assert 0 <= plan.lower_bound <= plan.prediction.extra_flops
        assert plan.gap >= 0
        assert plan.planner == "milp"
        assert plan.is_optimal


def test_milp_finds_what_slots_lose():
    """Where the tables of `optimal` are coarse, the program of plans finds the cheaper plan."""
    chain = random_chain(random.Random(6).randint, 9)
    runs, better = solve(chain, slots=3).least(), 0
    for budget_bytes in range(predict(chain, runs).temp_bytes, predict(chain, chain.plain()).temp_bytes, 4):
        coarse = predict(chain, solve(chain, slots=3).runs(budget_bytes)).extra_flops
        found, is_proved = Milp(20)._better(chain, budget_bytes, coarse)
        if found is not None:
            better += 1
            assert is_proved
            assert predict(chain, found).extra_flops < coarse
    assert better


def test_milp_without_time_is_optimal_without_proof():
    """When the solver has no time, what comes back is `optimal`'s plan, with a bound that holds and no proof."""
    chain = random_chain(random.Random(1).randint, 30)
    plain, least = (predict(chain, runs).temp_bytes for runs in (chain.plain(), solve(chain).least()))
    budget_bytes = least + (plain - least) // 4
    plan, other = Milp(1e-3)(chain, budget_bytes), Optimal()(chain, budget_bytes)
    assert plan.prediction == other.prediction
    assert not plan.is_optimal
    assert plan.lower_bound < plan.prediction.extra_flops


def test_milp_refuses_in_words():
    """Too many stages, budgets that nothing fits, and no time at all are refused."""
    stages = tuple(Stage(s, s + 1) for s in range(MAX_STAGES + 1))
    with pytest.raises(PlannerError, match=r"at most 60 stages, and this one has 61\. Pass planner=\"optimal\""):
        Milp()(Chain(stages, (), ()), 10)
    assert least_flops(Chain(stages, (), ()), 10) is None
    with pytest.raises(InfeasibleBudgetError):
        Milp()(uniform(4, transient_bytes=3), 1)
    with pytest.raises(ValueError, match="some time, got seconds=0"):
        Milp(0)
    assert get("milp(5)") == Milp(5)


@pytest.mark.parametrize("n_stages", [24, pytest.param(MAX_STAGES, marks=pytest.mark.exhaustive)])
def test_the_bound_of_many_stages_is_close(n_stages):
    """A deep network of equal stages: the relaxation is within a tenth of a forward pass of the plan."""
    stages = tuple(Stage(s, s + 1, forward_bytes=1, transient_bytes=4, keep_bytes=6, keep_transient_bytes=7)
                   for s in range(n_stages))  # fmt: skip
    chain = Chain(stages, (), tuple(Crossing(s, s + 1, 2, 2) for s in range(n_stages - 1)))
    plan = Optimal()(chain, predict(chain, chain.plain()).temp_bytes // 4)
    bound = least_flops(chain, plan.prediction.temp_bytes, seconds=120)
    assert 0 < bound <= plan.prediction.extra_flops <= bound + 0.1 * chain.forward_flops


LAYERS = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 8, jax.ShapeDtypeStruct((512, 16), jnp.float32)


@pytest.mark.parametrize("planner", ["chen", "optimal", "milp"])
def test_plans_are_bounded_where_asked(planner):
    """With `bound=True`, and always from `milp`, a plan says how far from the least it can be, in words too."""
    args = LAYERS[0][:6], LAYERS[1]
    plan = jaxsub.plan(tanh_layers, *args, planner=planner, bound=True, verify=False)
    assert 0 < plan.lower_bound <= plan.prediction.extra_flops
    assert f"bound      at most {plan.gap:.1%} of a forward pass above the least possible" in str(plan).splitlines()
    without = jaxsub.plan(tanh_layers, *args, planner=planner, verify=False)
    assert (without.gap is None) == (planner != "milp")
    assert without.segments == plan.segments


def test_a_bound_that_nobody_can_give_is_a_warning(monkeypatch):
    """Where there are too many stages there is a plan, no bound, and a warning that says the limit."""
    monkeypatch.setattr(milp, "MAX_STAGES", 5)
    with pytest.warns(UserWarning, match=r"No lower bound was found: the program has \d+ stages, and .* at most 5"):
        plan = jaxsub.plan(tanh_layers, *LAYERS, budget=0.5, bound=True, verify=False)
    assert plan.gap is None
    assert "bound " not in str(plan)


def test_what_milp_plans_computes_the_same():
    """A loss planned by `milp` fits its budget as compiled, and its gradient is the same."""
    args = [jnp.full((16, 16), 0.05)] * 8, jnp.ones((128, 16))
    f = jaxsub.sublinear(tanh_layers, budget=0.5, planner="milp(5)", cache=False)
    plan = f.plan(*args)
    assert plan.planner == "milp"
    assert plan.measurement.temp_bytes <= 0.5 * plan.plain_measurement.temp_bytes
    chex.assert_trees_all_close(jax.grad(f)(*args), jax.grad(tanh_layers)(*args), rtol=1e-5)


def network(model: zoo.Model) -> Chain:
    """A model at toy size, from shapes alone."""
    loss, init = model.build(**model.toy_size)
    return chain_of(loss, jax.eval_shape(init, jax.random.key(0)))


def chain_of(loss, args) -> Chain:
    program = trace(loss, args, {})
    return Pricer(program, get_target(None)).chain(cut_choices(program)[0])


def random_dag(seed: int):
    """A network of 8 to 14 layers of random widths, some of which read an earlier one too."""
    rng = random.Random(seed)
    n = rng.randint(8, 14)
    widths = [rng.choice((16, 32, 64)) for _ in range(n + 1)]
    reads = [sorted({i, *(rng.randrange(i + 1) for _ in range(rng.random() < 0.4))}) for i in range(n)]

    def loss(ws, x):
        made = [x]
        for w, read in zip(ws, reads, strict=True):
            made.append(jnp.tanh(jnp.concatenate([made[j] for j in read], axis=1) @ w))
        return jnp.mean(made[-1] ** 2)

    shapes = [(sum(widths[j] for j in read), widths[i + 1]) for i, read in enumerate(reads)]
    return loss, ([jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes],
                  jax.ShapeDtypeStruct((1024, widths[0]), jnp.float32))  # fmt: skip


@by_result
def test_names_that_cost_nothing_stay_out_of_nests():
    """Of two towers an option saves what crosses its end, for no bytes: even so no nest may save it."""
    chain = network(zoo.BY_NAME["branches"])
    assert any(o.saved and not o.saved_bytes for item in chain.items for o in item.options)
    budget_bytes = int(1.22 * predict(chain, solve(chain).least()).temp_bytes)
    program = Regions(chain, budget_bytes)
    runs = runs_of(program, program.solve(seconds=20).values)
    assert predict(chain, runs).temp_bytes <= budget_bytes
    assert any(child.children for run in runs for child in run.children)


def over_milp(chain: Chain, seconds: float, program: type[Schedules] = Schedules) -> list[float]:
    """By what share `optimal` recomputes more than the cheapest schedule found, or plan, at 5 budgets.

    What outputs host is left out of both: for schedules only the most that it could be is known. Less than a thousandth
    of a forward pass is no difference.
    """
    chain = replace(chain, stages=tuple(replace(s, gradient_sizes=()) for s in chain.stages))
    solution, over = solve(chain), []
    plain, least = (predict(chain, runs).temp_bytes for runs in (chain.plain(), solution.least()))
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        budget_bytes = int(least + share * (plain - least))
        flops = predict(chain, solution.runs(budget_bytes)).extra_flops
        found = program(chain, budget_bytes).solve(most=flops * (1 - 1e-6), seconds=seconds) if flops else None
        best = min(flops, found.flops) if found is not None else flops
        over.append(flops / best - 1 if flops - best > 1e-3 * chain.forward_flops else 0.0)
    return over


def near(over: list[float]) -> None:
    """Mostly equal, and never 5 % apart."""
    assert statistics.median(over) < 1e-6
    assert max(over) <= 0.05


BLOCKS = [
    ("lstm", dict(layers=1, steps=2)), ("resnet", dict(depths=(1,))), ("gpt", dict(layers=1)),
    ("chain", dict(layers=2)), ("mlp", dict(layers=2)), ("vit", dict(layers=1)), ("unet", dict(levels=2)),
    ("resnet", dict(depths=(1, 1))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(*block, marks=[pytest.mark.exhaustive] * (i > 2), id=f"{i}-{block[0]}")
     for i, block in enumerate(BLOCKS)],
)  # fmt: skip
def test_optimal_is_near_every_schedule_of_a_block(name, size):
    """On a network's distinct blocks, cut coarsely and finely, no schedule executes 5 % less again than `optimal`."""
    model = zoo.BY_NAME[name]
    loss, init = model.build(**{**model.toy_size, **size})
    program = trace(loss, jax.eval_shape(init, jax.random.key(0)), {})
    for cuts in cut_choices(program):
        near(over_milp(Pricer(program, get_target(None)).chain(cuts), seconds=10))


def test_optimal_is_near_every_schedule():
    """On random networks with skips no schedule executes 5 % less again than `optimal`."""
    near([share for seed in range(4) for share in over_milp(chain_of(*random_dag(seed)), seconds=5)])


@pytest.mark.exhaustive
def test_optimal_is_near_every_schedule_on_fifty_dags():
    """The same on 50 random networks with skips, at 5 budgets each."""
    near([share for seed in range(50) for share in over_milp(chain_of(*random_dag(seed)), seconds=20)])


@pytest.mark.exhaustive
def test_optimal_is_near_milp_on_whole_networks():
    """On whole networks of the zoo, toys too, no plan executes 5 % less again than that of `optimal`."""
    near([share for model in zoo.MODELS for share in over_milp(network(model), 5, Regions)])


@pytest.mark.exhaustive
def test_optimal_is_mostly_near_every_schedule_on_whole_networks():
    """On whole networks of the zoo, toys too, schedules that are no regions in each other are seldom 5 % better.

    At 4 of 110 budgets one was: there a stage is recomputed from values that no nest may hold alone.
    """
    over = [share for model in zoo.MODELS for share in over_milp(network(model), seconds=5)]
    assert statistics.median(over) < 1e-6
    assert sum(share > 0.05 for share in over) <= 0.08 * len(over)
