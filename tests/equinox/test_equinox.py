"""`jaxsub.equinox`: compiled steps of modules in a memory, and every policy on modules and functions."""

import copy
import pickle
import warnings

import chex
import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsub
from jaxsub.core.errors import UnsupportedError
from jaxsub.equinox import filter_checkpoint, filter_jit

DIM, DEPTH, BATCH = 16, 8, 256
X = jax.random.normal(jax.random.key(1), (BATCH, DIM))
OPTIMIZER = optax.adam(1e-2)
quiet = {"cache": False, "progress": False}


class Net(eqx.Module):
    """Layers, a function, a rate and a flag."""

    layers: list
    activation: object
    rate: float
    is_doubled: bool

    def __init__(self, wrap=lambda layer: layer):
        keys = jax.random.split(jax.random.key(0), DEPTH)
        self.layers = [wrap(eqx.nn.Linear(DIM, DIM, key=k)) for k in keys]
        self.activation, self.rate, self.is_doubled = jnp.tanh, 0.5, False

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.rate * x * (2 if self.is_doubled else 1)


def loss(model, x):
    """A scalar loss."""
    return (jax.vmap(model)(x) ** 2).mean()


def step_of(loss):
    """A training step; its flag is static, and so is its last result."""

    def step(model, state, x, *, is_scaled=False):
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        updates, state = OPTIMIZER.update(grads, state)
        return eqx.apply_updates(model, updates), state, 2 * value if is_scaled else value, "done"

    return step


def start():
    model = Net()
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def arrays_of(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]


def same(got, wanted):
    chex.assert_trees_all_close(arrays_of(got), arrays_of(wanted), rtol=1e-4, atol=1e-5)


def temp_bytes(lowered):
    compiled = lowered.compile()
    return getattr(compiled, "compiled", compiled).memory_analysis().temp_size_in_bytes


def test_a_step_in_a_memory():
    """The compiled step fits and equals the plain one; static leaves are part of the trace."""
    planned = jaxsub.sublinear(loss, progress=False)
    step = filter_jit(step_of(planned), memory=0.8, donate="all", **quiet)
    model, state = start()
    report = step.report(model, state, X)
    assert report.step_bytes <= report.memory_bytes < report.plain_bytes
    plan = step.plan(model, state, X)
    given = filter_jit(step_of(planned), memory=0.8, plan=plan, donate="all", **quiet)
    assert not given.plan(model, state, X).diff(plan)
    memory = step.lower(model, state, X).compile().memory_analysis()
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    assert sum(sizes) - memory.alias_size_in_bytes <= report.memory_bytes
    sizes = {name: sum(x.nbytes for x in arrays_of(tree)) for name, tree in (("model", model), ("state", state))}
    assert {held.name: held.n_bytes for held in report.arguments} == {**sizes, "x": X.nbytes}
    wanted = eqx.filter_jit(step_of(loss))(*start(), X, is_scaled=True)
    got = step(*start(), X, is_scaled=True)
    same(got, wanted)
    assert got[-1] == "done"
    doubled = eqx.tree_at(lambda m: m.is_doubled, model, True)
    np.testing.assert_allclose(step(doubled, state, X)[2], 4 * loss(start()[0], X), rtol=1e-4)


def test_a_step_that_is_compiled_ahead_of_time_takes_its_own_arguments():
    """As of `eqx.filter_jit`: modules go in and come out."""
    step = filter_jit(step_of(jaxsub.sublinear(loss, progress=False)), memory=0.8, **quiet)
    lowered = step.lower(*start(), X)
    assert "func" in lowered.as_text()
    compiled = lowered.compile()
    got = compiled(*start(), X)
    same(got, eqx.filter_jit(step_of(loss))(*start(), X))
    assert got[-1] == "done"
    assert compiled.cost_analysis() == compiled.compiled.cost_analysis()


def test_shapes_will_do_for_a_report():
    """Nothing need be allocated to ask what a step takes."""
    step = filter_jit(step_of(jaxsub.sublinear(loss, progress=False)), memory="1GiB", **quiet)
    shapes = eqx.filter_eval_shape(lambda: (*start(), X))
    assert step.report(*shapes).step_bytes == step.report(*start(), X).step_bytes


def test_without_a_memory_it_is_equinox_own():
    """It returns what `eqx.filter_jit` does, and the CPU's compiler leaves the plan alone."""
    planned = jaxsub.sublinear(loss, budget=0.5, chunks=False, **quiet)
    gradient = filter_jit(eqx.filter_value_and_grad(planned))
    model = Net()
    assert type(gradient) is type(eqx.filter_jit(loss))
    assert temp_bytes(gradient.lower(model, X)) <= planned.plan(model, X).measurement.temp_bytes
    same(gradient(model, X), eqx.filter_value_and_grad(loss)(model, X))


def deleted(jit, donate, **options):
    """Which of the arrays of the function itself and its arguments are gone after a call."""

    class Scale(eqx.Module):
        by: jax.Array

        def __call__(self, first, *rest, **named):
            return jax.tree.map(lambda x: x * self.by, (self.by, first, *rest, named))

    fun, arrays = Scale(jnp.ones((8, 8))), [jnp.ones((8, 8)) + i for i in range(4)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers")
        jit(fun, donate=donate, **options)(*arrays[:3], last=arrays[3])
    return [x.is_deleted() for x in (fun.by, *arrays)]


@pytest.mark.parametrize("donate", ["all", "all-except-first", "warn", "warn-except-first", "none"])
def test_donation_is_that_of_equinox(donate):
    """Whose arrays are donated, the function's own and those of rest arguments too, is what Equinox makes of it."""
    wanted = deleted(eqx.filter_jit, donate)
    assert deleted(filter_jit, donate, memory="1GiB", **quiet) == wanted
    assert wanted == [donate != "none", donate in ("all", "warn"), *[donate != "none"] * 3]


@pytest.mark.parametrize("fun", [lambda *xs: xs[0] + xs[1], lambda *, b, a: b - a])
def test_a_first_argument_without_a_name(fun):
    """The first of many positional arguments is kept, and keyword-only ones are never the first."""

    def call(jit, **options):
        a, b = jnp.ones(4), jnp.zeros(4)
        given = ((a, b), {}) if fun.__code__.co_flags & 4 else ((), {"a": a, "b": b})
        return jit(fun, donate="all-except-first", **options)(*given[0], **given[1]), a.is_deleted(), b.is_deleted()

    got, wanted = call(filter_jit, memory="1GiB", **quiet), call(eqx.filter_jit)
    np.testing.assert_array_equal(got[0], wanted[0])
    assert got[1:] == wanted[1:]


@pytest.mark.parametrize("donate", ["all", "warn"])
def test_warnings_of_donation_are_those_asked_for(donate):
    """Of arrays that cannot be reused JAX warns under "warn", and not under "all"."""
    step = filter_jit(lambda x: x.sum(), memory="1GiB", donate=donate, **quiet)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(jnp.ones((8, 8)))
    assert any("donated buffers" in str(w.message) for w in said) == (donate == "warn")


def test_state_and_methods():
    """Statistics of BatchNorm in a `State`, and a method that is decorated in its class."""

    class Model(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self):
            self.norm = eqx.nn.BatchNorm(DIM, "batch", mode="batch")

        def plain(self, state, x):
            return jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

        @filter_jit(memory="1GiB", **quiet)
        def step(self, state, x):
            return self.plain(state, x)

    model, state = eqx.nn.make_with_state(Model)()
    same(model.step(state, X), eqx.filter_jit(model.plain)(state, X))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"donate": "first"}, ValueError, "'all-except-first'.*got 'first'"),
        ({"static_argnums": 0, "in_shardings": None}, UnsupportedError, "in_shardings and no static_argnums.*donate="),
        ({"memory": "1GiB", "donate_argnums": 0}, UnsupportedError, "no donate_argnums"),
        ({"target": "h100"}, TypeError, "target=.*memory="),
        ({"memory": "1 glass"}, jaxsub.BudgetError, "glass"),
        ({"memory": 0.5, "donate_arg": 0}, TypeError, "no 'donate_arg'"),
    ],
)
def test_wrong_options_are_refused(options, error, words):
    """What is wrong is said before anything is called, with what to say instead."""
    with pytest.raises(error, match=words):
        filter_jit(loss, **options)


def test_copies_work():
    """Copies of all kinds give what the plain function gives."""
    made = filter_jit(loss, memory="1GiB", **quiet)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), pickle.loads(cloudpickle.dumps(made))):
        assert other is not made
        np.testing.assert_allclose(other(Net(), X), loss(Net(), X), rtol=1e-5)


POLICIES = ["save_nothing", "save_all", "save_costly", "save_within(4KiB)", "sqrt", "recursive(1)", None,
            jax.checkpoint_policies.dots_saveable]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: getattr(p, "__name__", str(p)))
def test_layers_under_every_policy(policy):
    """A model of wrapped layers is a model: its gradients are those of the plain one, at the plain one's leaves."""
    wrapped = Net(wrap=filter_checkpoint(policy=policy))
    same(eqx.filter_value_and_grad(loss)(wrapped, X), eqx.filter_value_and_grad(loss)(Net(), X))
    assert len(arrays_of(wrapped)) == 2 * DEPTH


def test_a_wrapped_model_takes_less():
    """Recomputing the layers takes less than not, and saving what is costly lies between."""

    def kept(policy):
        def block(layer, x):
            return jnp.sin(jnp.exp(-(jax.vmap(layer)(x) ** 2)))

        def loss(model, x):
            for layer in model.layers:
                x = filter_checkpoint(block, policy=policy)(layer, x)
            return (x**2).mean()

        return temp_bytes(filter_jit(eqx.filter_grad(loss)).lower(Net(), X))

    assert kept("save_nothing") < kept("save_costly") < kept("save_all")


def test_what_is_no_array_is_static_in_a_region():
    """A flag is branched on, a name is handed through, NumPy arrays are arrays; methods can be decorated."""

    class Layer(eqx.Module):
        w: jax.Array

        @filter_checkpoint(policy="save_costly")
        def __call__(self, x, is_squared, *, name):
            y = jnp.tanh(x * self.w)
            return (y**2 if is_squared else y), name

    layer, x = Layer(jnp.ones(3)), np.linspace(0.0, 1.0, 3, dtype="float32")
    got, name = layer(x, True, name="squared")
    assert name == "squared"
    np.testing.assert_allclose(got, np.tanh(x) ** 2, rtol=1e-5)
    grads = eqx.filter_grad(lambda layer: layer(x, False, name="")[0].sum())(layer)
    np.testing.assert_allclose(grads.w, x / np.cosh(x) ** 2, rtol=1e-5)


def test_no_such_policy():
    """An unknown policy is refused where it is named."""
    with pytest.raises(jaxsub.JaxsubError, match="no policy 'save_some'"):
        filter_checkpoint(loss, policy="save_some")


class Named(eqx.Module):
    """A module whose class has a field with a default that its own `__init__` does not set."""

    w: jax.Array
    name: str = "named"

    def __init__(self):
        self.w = jnp.ones(4)

    def __call__(self, x):
        return jnp.tanh(x * self.w)


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_vmap, eqx.filter_jit, filter_checkpoint])
def test_modules_without_a_name_are_regions_too(wrap):
    """Wrappers of Equinox, and modules of which a field is not set."""
    x = jnp.linspace(0.0, 1.0, 4).reshape(1, 4)
    made = wrap(Named())
    grads = [eqx.filter_grad(lambda f: f(x).sum())(f) for f in (made, filter_checkpoint(made, policy="save_costly"))]
    chex.assert_trees_all_close(*map(jax.tree.leaves, grads))


def test_a_loss_may_return_the_model_beside_it():
    """Activations and names among auxiliary results pass as they are, under `eqx.filter_jit` and without."""

    def with_model(model, x):
        return loss(model, x), (eqx.tree_at(lambda m: m.rate, model, 2.0), "done")

    planned = jaxsub.sublinear(with_model, budget=0.6, **quiet)
    model = Net()
    for jitted in (lambda f: f, eqx.filter_jit):
        found, wanted = (jitted(eqx.filter_value_and_grad(f, has_aux=True))(model, X) for f in (planned, with_model))
        (value, (made, word)), grads = found
        assert (word, made.activation, made.rate) == ("done", jnp.tanh, 2.0)
        chex.assert_trees_all_close(value, wanted[0][0], rtol=1e-6)
        chex.assert_trees_all_close(grads, wanted[1], rtol=1e-4, atol=1e-6)
