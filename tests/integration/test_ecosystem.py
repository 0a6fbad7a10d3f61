"""In company: plans in files, Optax loops, Orbax checkpoints, Equinox modules, names in profiles."""

import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import jaxsub
from jaxsub import policies

DEPTH, DIM = 8, 16
X = jax.random.normal(jax.random.key(1), (32, DIM))


def loss(params, x):
    """A chain of tanh layers."""
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def params(key=0):
    return [jax.random.normal(k, (DIM, DIM)) / 4 for k in jax.random.split(jax.random.key(key), DEPTH)]


def planned(**options):
    return jaxsub.sublinear(loss, verify=False, progress=False, **options)


def test_a_plan_is_saved_and_used_elsewhere(tmp_path):
    """What was planned once is read from a file, equal in every field, and used without planning."""
    plan = jaxsub.plan(loss, params(), X, verify=False)
    plan.save(tmp_path / "plan.json")
    assert jaxsub.Plan.load(tmp_path / "plan.json") == plan
    again = jaxsub.sublinear(loss, plan=tmp_path / "plan.json")
    assert again.plan(params(), X) == plan
    assert plan.n_regions > 0
    chex.assert_trees_all_close(jax.grad(again)(params(), X), jax.grad(loss)(params(), X), rtol=1e-5)


def tanh_then_sin(params, x):
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return (jnp.sin(x @ params[-1]) ** 2).mean()


def one_more(params, x):
    return loss(params, x) + 1.0


def one_less(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


@pytest.mark.parametrize(
    ("other", "x", "words"),
    [
        (tanh_then_sin, X, ["number 15", "`sin`", "float32[32,16]", "test_ecosystem.py"]),
        (loss, X[:8], ["number 0", "`dot_general`", "float32[8,16]"]),
        (one_more, X, ["number 19", "`add`"]),
        (one_less, X, ["agree", "1 more"]),
    ],
)
def test_a_plan_of_another_function_is_refused(other, x, words):
    """The error carries both fingerprints and names the first equation that differs, with its line."""
    plan = jaxsub.plan(loss, params(), X, verify=False)
    with pytest.raises(jaxsub.PlanMismatchError) as error:
        jax.grad(jaxsub.sublinear(other, plan=plan))(params(), x)
    for word in [plan.fingerprint, error.value.function_fingerprint, *words]:
        assert word in str(error.value)
    assert error.value.plan_fingerprint == plan.fingerprint != error.value.function_fingerprint


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    """Another version, or another thing, is not taken for a plan."""
    path = tmp_path / "plan.json"
    path.write_text('{"jaxsub_plan": 99}')
    with pytest.raises(ValueError, match="version"):
        jaxsub.sublinear(loss, plan=path)


def test_gradient_accumulation_with_optax():
    """optax.MultiSteps: the same parameters after six steps of three micro-batches each."""

    def train(loss):
        optimizer = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=3)
        state, weights = optimizer.init(params()), params()

        @jax.jit
        def step(weights, state, x):
            grads = jax.grad(loss)(weights, x)
            updates, state = optimizer.update(grads, state, weights)
            return optax.apply_updates(weights, updates), state

        for i in range(6):
            weights, state = step(weights, state, X + i)
        return weights

    chex.assert_trees_all_close(train(planned()), train(loss), rtol=1e-4, atol=1e-5)


def test_a_train_state_is_restored_under_another_plan(tmp_path):
    """Saved by Orbax under one plan, continued under another: the losses of a run that was never interrupted."""
    optimizer = optax.adam(1e-2)

    def run(loss, state, n_steps):
        @jax.jit
        def step(weights, opt_state):
            value, grads = jax.value_and_grad(loss)(weights, X)
            updates, opt_state = optimizer.update(grads, opt_state)
            return optax.apply_updates(weights, updates), opt_state, value

        losses = []
        for _ in range(n_steps):
            *state, value = step(*state)
            losses.append(float(value))
        return state, losses

    start = [params(), optimizer.init(params())]
    _, wanted = run(loss, start, 6)
    state, first = run(planned(), start, 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    _, rest = run(planned(planner="recursive(1)"), restored, 3)
    chex.assert_trees_all_close(first + rest, wanted, rtol=1e-5)


def test_regions_have_names_in_profiles():
    """A profiler shows the region of an operation."""
    fun = planned(planner="chen")
    step = jaxsub.jit(jax.value_and_grad(fun)).lower(params(), X)
    n_regions = len(fun.plan(params(), X).segments)
    text = step.compile().as_text()
    assert n_regions > 1
    assert all(f"jaxsub/segment_{i}/" in text for i in range(2))


def test_loops_and_slices_have_names_in_profiles():
    """A loop that runs as planned, and a run in slices, are named in what a profiler shows."""

    def scanned(ws, x):
        with jax.named_scope("layers"):
            return jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None), x, ws)[0].mean()

    ws, x = jnp.stack([jnp.eye(16)] * 8), jnp.ones((512, 16))
    for chunks, name in ((False, r"layers\)*/jaxsub_scan/"), ({0: 4}, r"jit\(jaxsub_slices\)")):
        fun = jaxsub.sublinear(scanned, chunks=chunks, progress=False)
        assert re.search(name, jaxsub.jit(jax.grad(fun)).lower(ws, x).compile().as_text())


def test_a_profile_names_regions(tmp_path):
    """A trace by jax.profiler carries the names of regions, for a viewer to show."""
    step = jaxsub.jit(jax.value_and_grad(planned(planner="chen")))
    jax.block_until_ready(step(params(), X))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(step(params(), X))
    (file,) = tmp_path.rglob("*.xplane.pb")
    trace = file.read_bytes()
    assert all(f"jaxsub/segment_{i}/".encode() in trace for i in range(2))
    assert b"jaxsub/segment_99/" not in trace


class Mlp(eqx.Module):
    """A network with a function, a float and a flag among its leaves, as Equinox modules have them."""

    layers: list
    dropout: eqx.nn.Dropout
    activation: object

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(DIM, DIM, key=k) for k in jax.random.split(key, 4)]
        self.dropout = eqx.nn.Dropout(0.5)
        self.activation = jax.nn.gelu

    def __call__(self, x, key):
        for i, layer in enumerate(self.layers):
            x = self.dropout(self.activation(layer(x)), key=jax.random.fold_in(key, i))
        return x


def module_loss(model, x, key):
    keys = jax.random.split(key, len(x))
    return (jax.vmap(model)(x, keys) ** 2).mean()


@pytest.mark.parametrize("inference", [False, True])
def test_equinox_modules_are_arguments(inference):
    """eqx.filter_value_and_grad of a planned loss: gradients of a module, its flags and functions left alone."""
    model = eqx.nn.inference_mode(Mlp(jax.random.key(0)), inference)
    args = (model, X, jax.random.key(2))
    fun = jaxsub.sublinear(module_loss, verify=False)
    got, wanted = (eqx.filter_jit(eqx.filter_value_and_grad(f))(*args) for f in (fun, module_loss))
    chex.assert_trees_all_close(jax.tree.leaves(got), jax.tree.leaves(wanted), rtol=1e-5, atol=1e-6)
    assert fun.plan(*args) == fun.plan(*args)


def test_equinox_modules_are_measured_and_explained():
    """Every call that takes a function's arguments takes a module: its functions and flags are left alone."""
    args = (Mlp(jax.random.key(0)), X, jax.random.key(2))
    arrays, rest = eqx.partition(args[0], eqx.is_array)
    plain = jaxsub.measure(lambda arrays, *rows: module_loss(eqx.combine(arrays, rest), *rows), arrays, *args[1:])
    assert jaxsub.measure(module_loss, *args).temp_bytes == plain.temp_bytes
    assert jaxsub.residuals(module_loss, *args)
    assert jaxsub.frontier(module_loss, *args, points=2).points
    assert jaxsub.explain(module_loss, *args).total_bytes > 0


def test_another_flag_is_another_trace():
    """A module in inference mode is not run by the trace of one in training."""
    fun, model = jaxsub.sublinear(module_loss, verify=False), Mlp(jax.random.key(0))
    for mode in (False, True, False):
        args = (eqx.nn.inference_mode(model, mode), X, jax.random.key(2))
        chex.assert_trees_all_close(fun(*args), module_loss(*args), rtol=1e-5)


@pytest.mark.parametrize("policy", ["save_costly", "save_within(4KiB)", "sqrt"])
def test_equinox_modules_under_policies(policy):
    """jaxsub.policies.checkpoint takes modules too."""
    model, key = Mlp(jax.random.key(0)), jax.random.key(2)

    def wrapped(model, x, key):
        return policies.checkpoint(module_loss, policy=policy)(model, x, key)

    got, wanted = (eqx.filter_grad(f)(model, X, key) for f in (wrapped, module_loss))
    chex.assert_trees_all_close(jax.tree.leaves(got), jax.tree.leaves(wanted), rtol=1e-5, atol=1e-6)
