"""Regions of the function's own: opened and planned anew, or left as they stand where that is better."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from layers import scanned, unrolled

import jaxsub
from jaxsub.core.figures import recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.emission.own_regions import n_own_regions, open_own_regions
from jaxsub.jaxpr.trace import trace

DEPTH, WIDTH, ROWS = 4, 64, 1024
PARAMS = {"up": jnp.ones((DEPTH, WIDTH, 4 * WIDTH)) / 64, "down": jnp.ones((DEPTH, 4 * WIDTH, WIDTH)) / 64}
X = jnp.cos(jnp.arange(ROWS * WIDTH, dtype=jnp.float32)).reshape(ROWS, WIDTH)
SAVING_DOTS = jax.checkpoint_policies.dots_saveable


def layer(x, p):
    return x + jnp.tanh(checkpoint_name(jax.nn.gelu(x @ p["up"]), "hidden") @ p["down"])


def branching(f):
    def step(x, p):
        return lax.cond(p["up"][0, 0] > 0, lambda: f(x, p), lambda: x), None

    return lambda params, x: (lax.scan(step, x, params)[0] ** 2).mean()


def nested(f):
    def pair(x, p):
        return f(f(x, p), p)

    return unrolled(jax.checkpoint(pair))


FORMS = {"unrolled": unrolled, "in a scan": scanned, "in a branch in a scan": branching, "nested": nested}
WRAPPED = {
    "all recomputed": jax.checkpoint(layer),
    "products saved": jax.checkpoint(layer, policy=SAVING_DOTS),
    "without a barrier": jax.checkpoint(layer, prevent_cse=False),
    "a call inside": jax.checkpoint(jax.jit(layer)),
}


def planned(loss, budget, **options):
    return jaxsub.plan(loss, PARAMS, X, budget=budget, progress=False, cache=False, **options)


def traced(loss, *args):
    return trace(loss, args or (PARAMS, X), {})


@functools.cache
def plain_gradient(form):
    """Value and gradient of the layers in one form, without regions."""
    return jax.jit(jax.value_and_grad(FORMS[form](layer)))(PARAMS, X)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_values_and_gradients_are_the_functions_own(form, wrapped):
    loss = FORMS[form](WRAPPED[wrapped])
    program = open_own_regions(traced(loss))
    assert n_own_regions(traced(loss)) > 0 == n_own_regions(program)
    plan = Plan(traced(loss).fingerprint, jaxsub.Budget(), len(program.eqns), opened_regions=1)
    found = jaxsub.jit(jax.value_and_grad(jaxsub.sublinear(loss, plan=plan)))(PARAMS, X)
    chex.assert_trees_all_close(found, plain_gradient(form), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["unrolled", "in a scan"])
@pytest.mark.parametrize("wrapped", ["all recomputed", "products saved"])
def test_what_the_budget_has_room_for_is_not_recomputed(form, wrapped):
    """`jax.checkpoint` round each layer recomputes it whatever memory there is."""
    loss, plain = (FORMS[form](f) for f in (WRAPPED[wrapped], layer))
    budget = jaxsub.measure(plain, PARAMS, X).temp_bytes
    plan, without = (planned(f, budget) for f in (loss, plain))
    assert plan.opened_regions == (DEPTH if form == "unrolled" else 1)
    assert (plan.segments, plan.loops, plan.slices) == (without.segments, without.loops, without.slices)
    assert recomputed_share(plan) < 0.01
    assert jaxsub.measure(jaxsub.sublinear(loss, plan=plan), PARAMS, X).temp_bytes <= budget
    assert "planned anew: " in str(plan)


def test_a_fraction_is_of_what_the_function_needs_as_it_is():
    loss = unrolled(jax.checkpoint(layer))
    now = jaxsub.measure(loss, PARAMS, X).temp_bytes
    plan = planned(loss, 1.0)
    assert plan.opened_regions
    assert plan.measurement.temp_bytes <= plan.plain_measurement.temp_bytes == now
    assert recomputed_share(plan) < 1  # less than its regions recompute


def test_regions_stay_where_nothing_else_fits():
    loss = unrolled(jax.checkpoint(layer))
    budget = jaxsub.measure(loss, PARAMS, X).temp_bytes
    plan = planned(loss, budget, planner="plain", chunks=False)
    assert (plan.opened_regions, plan.segments) == (0, ())
    assert "planned anew" not in str(plan)
    with pytest.raises(jaxsub.InfeasibleBudgetError) as refusal:
        planned(loss, budget // 2, planner="plain", chunks=False)
    assert refusal.value.least_bytes <= budget


def test_regions_stay_where_they_recompute_less():
    loss = unrolled(WRAPPED["products saved"])
    budget = jaxsub.measure(loss, PARAMS, X).temp_bytes
    assert planned(loss, budget, planner="chen", chunks=False).opened_regions == 0
    assert planned(loss, budget, chunks=False).opened_regions == DEPTH


def test_a_policy_cannot_open_them():
    with pytest.raises(jaxsub.UnsupportedError, match="regions of the function's own, opened"):
        planned(unrolled(jax.checkpoint(layer)), 1.0).to_policy()


@pytest.mark.parametrize("form", ["unrolled", "in a branch in a scan"])
def test_a_frontier_is_that_of_the_function_without_them(form):
    loss, plain = (FORMS[form](f) for f in (jax.checkpoint(layer), layer))
    mine, other = (jaxsub.frontier(f, PARAMS, X, points=4, chunks=False, cache=False) for f in (loss, plain))
    for a, b in zip((*mine.points, *mine.others), (*other.points, *other.others), strict=True):
        assert (a.name, a.temp_bytes, a.extra) == (b.name, b.temp_bytes, b.extra)
    assert all(plan.opened_regions for plan in mine.plans)
    found = jaxsub.jit(jax.grad(jaxsub.sublinear(loss, plan=mine.plans[1])))(PARAMS, X)
    chex.assert_trees_all_close(found, jax.jit(jax.grad(plain))(PARAMS, X), rtol=1e-4, atol=1e-5)


def test_the_plans_of_a_frontier_are_measured_without_them():
    loss = unrolled(jax.checkpoint(layer))
    found = jaxsub.frontier(loss, PARAMS, X, points=3, verify=True, chunks=False, cache=False)
    now = jaxsub.measure(loss, PARAMS, X).temp_bytes
    for plan in found.plans:
        needed = jaxsub.measure(jaxsub.sublinear(loss, plan=plan), PARAMS, X).temp_bytes
        assert (plan.measurement.temp_bytes, plan.plain_measurement.temp_bytes) == (needed, now)


def test_without_a_budget_they_stay():
    assert planned(unrolled(jax.checkpoint(layer)), None).opened_regions == 0


OTHERS = {
    "in a backward pass": lambda w, x: jax.grad(lambda w: jax.checkpoint(jnp.sin)(w @ x).sum())(w).sum(),
    "in a loop without end": lambda w, x: lax.while_loop(lambda w: w.sum() < 1, jax.checkpoint(jnp.sin), w @ x).sum(),
    "the plan of a function inside": lambda w, x: jaxsub.sublinear(lambda w: jnp.sin(w @ x).sum(), mirror=[1, 1, 0])(w),
}


@pytest.mark.parametrize("loss", OTHERS.values(), ids=OTHERS)
def test_others_stay(loss):
    w = jnp.ones((4, 4))
    assert n_own_regions(traced(loss, w, w)) == 0


ODD = {
    "an input handed on": lambda w: jax.checkpoint(lambda w: (w, jnp.sin(w)))(w)[0].sum(),
    "a literal handed on": lambda w: jax.checkpoint(lambda w: (1.0, jnp.sin(w)))(w)[0] * w.sum(),
    "a result twice": lambda w: sum(y.sum() for y in jax.checkpoint(lambda w: [jnp.sin(w)] * 2)(w)),
    "a result unused": lambda w: jax.checkpoint(lambda w: (jnp.cos(w), jnp.sin(w)))(w)[1].sum(),
    "a constant array": lambda w: jax.checkpoint(jax.jit(lambda w: w * jnp.asarray(TABLE)))(w).sum(),
    "no arrays": lambda w: w.sum() * jax.checkpoint(lambda: jnp.float32(2))(),
    "a region in a region": lambda w: jax.checkpoint(lambda w: jax.checkpoint(jnp.sin)(jnp.cos(w)))(w).sum(),
    "a callback": lambda w: jax.checkpoint(lambda w: (jax.debug.callback(lambda: None), jnp.sin(w))[1])(w).sum(),
    "random bits": lambda w: jax.checkpoint(lambda w: w * jax.random.bernoulli(jax.random.key(0), 0.5, w.shape))(
        w
    ).sum(),
}
TABLE = jnp.arange(4.0)


@pytest.mark.parametrize("loss", ODD.values(), ids=ODD)
def test_odd_regions_are_opened(loss):
    w = jnp.arange(1.0, 5.0)
    program = traced(loss, w)
    found = open_own_regions(program)
    assert n_own_regions(program) > 0 == n_own_regions(found)
    plan = Plan(program.fingerprint, jaxsub.Budget(), len(found.eqns), opened_regions=1)
    same = jaxsub.sublinear(loss, plan=plan)
    chex.assert_trees_all_close(jax.value_and_grad(same)(w), jax.value_and_grad(loss)(w), rtol=1e-6)


def test_kept_plans_are_found_again(tmp_path):
    loss, plans = scanned(jax.checkpoint(layer)), []
    budget = 2 * jaxsub.measure(loss, PARAMS, X).temp_bytes
    for _ in range(2):
        plans += [jaxsub.plan(loss, PARAMS, X, budget=budget, progress=False, cache=tmp_path)]
    assert plans[0] == plans[1]
    assert plans[0].opened_regions == 1
    plans[0].save(tmp_path / "plan.json")
    again = jaxsub.sublinear(loss, plan=tmp_path / "plan.json")
    assert jaxsub.measure(again, PARAMS, X).temp_bytes == plans[0].measurement.temp_bytes


def test_a_plan_that_only_opens_them_is_loaded(tmp_path):
    """It decides nothing else, and still changes what the gradient needs."""
    loss = unrolled(jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable))
    plan = planned(loss, 1.0, planner="plain", chunks=False)
    assert plan.opened_regions
    assert plan.measurement.temp_bytes < plan.plain_measurement.temp_bytes
    plan.save(tmp_path / "plan.json")
    assert jaxsub.sublinear(loss, plan=tmp_path / "plan.json").plan(PARAMS, X) == plan


def test_a_step_goes_back_to_them_where_its_memory_asks_for_it():
    """Under its own budget the function is opened; that is another plan than leaving it as it is."""
    loss = unrolled(jax.checkpoint(layer))
    small = jaxsub.sublinear(loss, budget="1GiB", planner="plain", chunks=False, progress=False, cache=False)

    def report(f, memory):
        return jaxsub.jit(lambda params: jax.value_and_grad(f)(params, X), memory=memory, cache=False).report(PARAMS)

    assert report(small, "1GiB").sites[0].plan.opened_regions
    needed = report(loss, "1GiB").step_bytes
    met = report(small, int(1.01 * needed))
    assert met.step_bytes <= 1.01 * needed
    assert not met.sites[0].plan.opened_regions


def test_a_plan_says_where_another_function_differs():
    plan = planned(unrolled(jax.checkpoint(layer)), 1.0)
    other = unrolled(jax.checkpoint(lambda x, p: layer(x, p) + 1))
    with pytest.raises(jaxsub.PlanMismatchError, match="The first equation that differs is number"):
        jaxsub.sublinear(other, plan=plan)(PARAMS, X)
