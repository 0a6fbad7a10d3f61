"""Functions that take a gradient themselves: what its backward pass reads is recomputed, and not live until then."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsub
from jaxsub.core.chain import Prediction
from jaxsub.core.decisions import Form
from jaxsub.core.figures import recomputed_share
from jaxsub.core.graph import graph_of
from jaxsub.core.plan import Plan
from jaxsub.emission.clones import with_clones
from jaxsub.emission.forms import program_in
from jaxsub.jaxpr.flops import jaxpr_flops
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.inner_gradients import find_clones
from jaxsub.search import verify
from jaxsub.search.forms import best_of_forms, forms_of

NODES, EDGES, WIDTH, DEPTH = 64, 2048, 32, 5
KEYS = jax.random.split(jax.random.key(0), 8)


def weight(key, *shape):
    return jax.random.normal(key, shape) / 8


PARAMS = [{"m": weight(jax.random.fold_in(KEYS[0], i), 2 * WIDTH, 4 * WIDTH),
           "o": weight(jax.random.fold_in(KEYS[1], i), 4 * WIDTH, WIDTH)} for i in range(DEPTH)]  # fmt: skip
X = jax.random.normal(KEYS[2], (NODES, 3))
ENDS = jax.random.randint(KEYS[3], (2, EDGES), 0, NODES)
ARGS = PARAMS, X, ENDS


def interaction(h, p, ends):
    messages = jax.nn.silu(jnp.concatenate([h[ends[0]], h[ends[1]]], -1) @ p["m"]) @ p["o"]
    return h + jnp.tanh(jax.ops.segment_sum(messages, ends[1], NODES))


def forces(layer):
    """Squared forces of an energy of messages on a graph: nodes are coupled, so that nothing runs in slices."""

    def energy(params, x, ends):
        h = jnp.sin(x.sum(-1, keepdims=True) * jnp.arange(1, WIDTH + 1) / WIDTH)
        for p in params:
            h = layer(h, p, ends)
        return (h**2).sum()

    return lambda params, x, ends: (jax.grad(energy, 1)(params, x, ends) ** 2).mean()


def mlp(params, x):
    for p in params:
        x = jnp.tanh(jax.nn.silu(x @ p["m"][:WIDTH]) @ p["o"])
    return x


def normed(params, x):
    """A network that couples its examples: what is below is not sliced either."""
    out = mlp(params, x)
    return out / (1 + jnp.linalg.norm(out))


def penalty(params, x, _):
    x = jnp.tile(x, (16, WIDTH))[:, :WIDTH]
    slope = jax.grad(lambda x: normed(params, x).sum())(x)
    return normed(params, x).mean() + ((jnp.linalg.norm(slope) - 1) ** 2).mean()


def adapted(params, x, _):
    """Two steps of an inner training, as meta-learning has them."""
    x = jnp.tile(x, (16, WIDTH))[:, :WIDTH]
    for _ in range(2):
        slopes = jax.grad(lambda p: (normed(p, x) ** 2).sum())(params)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, slopes)
    return (normed(params, x) ** 2).sum()


LOSSES = {"forces": forces(interaction), "penalty": penalty, "adapted": adapted}
BY_HAND = forces(jax.checkpoint(interaction))
ORDINARY = {
    "layers": lambda params, x, _: (mlp(params, jnp.tile(x, (16, WIDTH))[:, :WIDTH]) ** 2).mean(),
    "sums": lambda params, x, _: sum((mlp(params[:i], jnp.tile(x, (1, WIDTH))[:, :WIDTH]) ** 2).mean() for i in (2, 4)),
    "few layers of an inner gradient": lambda params, x, _: (jax.grad(lambda x: jnp.sin(x).sum())(x) ** 2).mean(),
}


ALONE = {"chunks": False, "cache": False, "progress": False}
"""Nothing in slices: what is recomputed alone has to do."""


def traced(loss):
    return trace(loss, ARGS, {})


@functools.cache
def needed(fun):
    return jaxsub.measure(fun, *ARGS).temp_bytes


@functools.cache
def flops_of(fun):
    return jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(fun))(*ARGS)).arithmetic_flops


def assert_close(found, wanted):
    """Each array within a thousandth of its norm: second derivatives in float32 round differently."""

    def off(a, b):
        return jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-6)

    chex.assert_trees_all_close(jax.tree.map(off, found, wanted), jax.tree.map(lambda _: 0.0, wanted), atol=1e-3)


def with_plan(loss, clones):
    program = traced(loss)
    n_nodes = len(with_clones(program, clones).eqns)
    return jaxsub.sublinear(loss, plan=Plan(program.fingerprint, jaxsub.Budget(), n_nodes, clones=tuple(clones)))


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_made_again_changes_no_value_and_no_derivative(name):
    loss = LOSSES[name]
    clones = find_clones(traced(loss).graph)
    assert len(clones) >= DEPTH - 1
    again = with_plan(loss, clones)
    for derivative in (jax.value_and_grad, lambda f: jax.grad(lambda *args: jax.jvp(f, args[:1], args[:1])[1])):
        found, wanted = (jax.jit(derivative(lambda p, f=f: f(p, *ARGS[1:])))(PARAMS) for f in (again, loss))
        assert_close(found, wanted)


@pytest.mark.parametrize("name", ORDINARY)
def test_other_functions_have_nothing_to_make_again(name):
    assert find_clones(traced(ORDINARY[name]).graph) == ()
    assert forms_of(traced(ORDINARY[name])) == (Form(),)


def test_layers_without_number_have_nothing_to_recompute():
    """What each layer works with is a hill of its own."""
    layers = [("matmul", [0], [1]), ("matmul", [1], [64])]
    for i in range(1, 2000):
        layers += [("matmul", [2 * i], [1]), ("matmul", [2 * i + 1], [64])]
    assert find_clones(graph_of(layers, 1, [len(layers)], input_bytes=[1])) == ()


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_any_runs_may_be_made_again(data):
    """Also others than those that are found: the values of each are read from the clone on.

    In 64 bits: in 32 the sum of the forces' squares depends on the order of sums by some 1e-5.
    """
    loss = LOSSES["forces"]
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: a.astype(jnp.float64), (PARAMS, X))
        args = params, x, ENDS
        program = trace(loss, args, {})
        found = find_clones(program.graph)
        chosen = data.draw(st.lists(st.sampled_from(found), unique=True, min_size=1))
        whole = with_clones(program, sorted(chosen, key=lambda clone: clone.start))
        assert len(program.eqns) < len(whole.eqns)
        plan = Plan(program.fingerprint, jaxsub.Budget(), len(whole.eqns), clones=tuple(chosen))
        again = jaxsub.sublinear(loss, plan=plan)
        chex.assert_trees_all_close(jax.jit(again)(*args), jax.jit(loss)(*args), rtol=1e-9)


@functools.cache
def planned(share):
    """The forces under a share of what they need as they are."""
    return jaxsub.plan(LOSSES["forces"], *ARGS, budget=int(share * needed(LOSSES["forces"])), **ALONE)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_forces_fit_where_layers_by_hand_do_not(share):
    """`jax.checkpoint` round each layer of the energy bounds less: with `-s` figures are printed."""
    loss = LOSSES["forces"]
    plain, by_hand = needed(loss), needed(BY_HAND)
    budget = int(share * plain)
    assert budget < by_hand
    plan = planned(share)
    again = jaxsub.sublinear(loss, plan=plan)
    assert plan.clones
    assert needed(again) == plan.measurement.temp_bytes <= budget
    found, wanted = jaxsub.jit(jax.value_and_grad(again))(*ARGS), jax.jit(jax.value_and_grad(loss))(*ARGS)
    assert_close(found, wanted)
    said = recomputed_share(plan) / 3  # of a gradient, whose backward pass is two forward ones
    assert abs(said - (flops_of(again) / flops_of(loss) - 1)) < 0.1
    assert "Runs recomputed for a gradient" in str(plan)
    print(
        f"{share} of plain: layers by hand {by_hand / plain:.2f}, FLOPs {flops_of(again) / flops_of(loss):.2f} of plain"
    )


def test_at_the_memory_of_layers_by_hand_no_more_is_computed():
    loss = LOSSES["forces"]
    plan = jaxsub.plan(loss, *ARGS, budget=needed(BY_HAND), **ALONE)
    assert flops_of(jaxsub.sublinear(loss, plan=plan)) <= flops_of(BY_HAND)


def test_a_gpu_that_is_not_there_needs_as_little():
    loss = LOSSES["forces"]
    plain = jaxsub.measure(loss, *ARGS, target="h100").temp_bytes
    plan = jaxsub.plan(loss, *ARGS, budget=plain // 2, target="h100", **ALONE)
    assert plan.clones
    assert plan.measurement.temp_bytes <= plain // 2


def test_a_plan_is_stored_and_refused_where_it_does_not_belong(tmp_path):
    loss = LOSSES["forces"]
    plan = planned(0.25)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(jaxsub.UnsupportedError, match="recomputed for an inner gradient"):
        plan.to_policy()
    moved = plan.replace(clones=tuple(dataclasses.replace(clone, before=10**6) for clone in plan.clones))
    with pytest.raises(jaxsub.PlanMismatchError, match="does not fit this function: runs to recompute that are none"):
        jaxsub.sublinear(loss, plan=moved)(*ARGS)


def test_a_step_uses_them_too():
    loss = jaxsub.sublinear(LOSSES["forces"], progress=False, chunks=False)

    def step(params, x, ends):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x, ends))

    memory = jaxsub.measure(LOSSES["forces"], *ARGS)
    run = jaxsub.jit(step, memory=memory.step_bytes - memory.temp_bytes // 2, donate_argnums=0, progress=False)
    report = run.report(*ARGS)
    assert report.sites[0].plan.clones
    assert report.step_bytes <= report.memory_bytes


@pytest.mark.parametrize("fits", [True, False])
def test_a_form_comes_first_once_predictions_of_another_were_too_low(fits):
    """A program that misses its budget is not compiled over and over while another form is predicted to fit."""
    program = trace(forces(interaction), ARGS, {})
    bare, cloned = forms_of(program)
    prediction = Prediction(1, 0.0, 1.0, 0, "analytic")
    asked = []

    def plan_of(form):
        return verify.untouched(program_in(program, form)).replace(prediction=prediction)

    def predicted(shown):
        assert shown is program_in(program, cloned)
        return plan_of(cloned)

    def planned(shown, elsewhere):
        form = bare if shown is program_in(program, bare) else cloned
        asked.append(form)
        if form == bare and elsewhere.is_better(1.5, float("inf")):
            raise jaxsub.InfeasibleBudgetError("more is expected elsewhere", requested_bytes=1, least_bytes=0)
        if form == cloned and not fits:
            raise jaxsub.InfeasibleBudgetError("does not fit", requested_bytes=1, least_bytes=2)
        assert not elsewhere.is_better(1.5, float("inf"))
        return plan_of(form)

    found = best_of_forms(program, planned, predicted, lambda form: False)
    assert bool(found.clones) == fits
    assert asked == ([bare, cloned] if fits else [bare, cloned, bare])
