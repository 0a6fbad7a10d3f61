"""What a function does beside its result happens as often as before: callbacks, prints, checks, references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from six_layers import W, predicted, same

import jaxsub


def counted(run):
    """How often, and with what, `run(note)` calls `note`."""
    calls = []
    run(calls.append)
    jax.effects_barrier()
    return calls


def effectful(call, ordered):
    def make(note):
        def f(w):
            x = w
            for i in range(5):
                x = jnp.tanh(x @ w)
                call(lambda v, i=i: note(i), lax.stop_gradient(jnp.sum(x)), ordered)
            return jnp.sum(x)

        return f

    return make


EFFECTS = {
    "debug.callback": effectful(lambda f, v, ordered: jax.debug.callback(f, v, ordered=ordered), False),
    "debug.callback, ordered": effectful(lambda f, v, ordered: jax.debug.callback(f, v, ordered=ordered), True),
    "io_callback": effectful(lambda f, v, ordered: io_callback(f, None, v, ordered=ordered), False),
    "io_callback, ordered": effectful(lambda f, v, ordered: io_callback(f, None, v, ordered=ordered), True),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_happen_as_often(name):
    """Each of five callbacks, alike but for what it closes over, runs once in the forward pass, in order if ordered."""
    make = EFFECTS[name]
    for wrap in (lambda f: f, jax.jit):
        calls = counted(lambda note, wrap=wrap: wrap(predicted(make(note)))(W))
        assert (calls if "ordered" in name else sorted(calls)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_are_never_doubled(name):
    """Under grad too each callback runs once, whatever is recomputed around it, in order if ordered."""
    gradients = []
    calls = counted(lambda note: gradients.append(jax.jit(jax.grad(predicted(EFFECTS[name](note))))(W)))
    assert (calls if "ordered" in name else sorted(calls)) == [0, 1, 2, 3, 4]
    same(gradients[0], jax.grad(EFFECTS[name](lambda i: None))(W))


def printing_in_a_loop(note):
    def f(w):
        def step(x, _):
            jax.debug.callback(note, lax.stop_gradient(jnp.sum(x)))
            return jnp.tanh(x @ w), None

        return jnp.sum(lax.scan(step, w, None, length=16)[0])

    return f


def test_effects_that_happen_more_often_are_told_of():
    """What reports inside a loop that is recomputed does so again: the warning says which, and how often it then is."""
    told = []

    def run(note):
        planned = predicted(printing_in_a_loop(note), mirror=lambda node: int(node.primitive == "scan"))
        with pytest.warns(UserWarning, match="Side effects inside what the plan recomputes happen again") as caught:
            planned.plan(W)
        told.extend(str(w.message) for w in caught)
        jax.block_until_ready(jax.jit(jax.grad(planned))(W))

    often = len(counted(run))
    assert often > 16
    assert f"(step): {often} times with each gradient, 16 without plan" in told[0]
    assert "test_effects.py:" in told[0]
    assert "io_callback" in told[0]


def test_a_loop_that_reports_is_planned_like_any_other():
    """A report left in a loop's body costs no memory; loss and step tell how often it happens then."""

    def loss(note):
        def step(x, w):
            if note is not None:
                jax.debug.callback(note, lax.stop_gradient(x[0, 0]))
            return jnp.tanh(x @ w), None

        return lambda w, x: jnp.mean(lax.scan(step, x, w)[0] ** 2)

    w, x, calls = jnp.tile(jnp.eye(16), (24, 1, 1)), jnp.ones((128, 16)), []
    plain = loss(None)
    budget = jaxsub.measure(plain, w, x).temp_bytes // 2
    planned = jaxsub.sublinear(loss(calls.append), budget=budget, cache=False, progress=False)
    with pytest.warns(UserWarning, match="Side effects inside what the plan recomputes happen again"):
        assert planned.plan(w, x).measurement.temp_bytes <= budget
    same(jax.jit(jax.value_and_grad(planned))(w, x), jax.value_and_grad(plain)(w, x))
    jax.effects_barrier()
    assert len(calls) > 24
    free = jaxsub.sublinear(loss(calls.append), cache=False, progress=False)
    step = jaxsub.jit(lambda w, x: w - jax.grad(free)(w, x), memory=0.75, cache=False, progress=False)
    with pytest.warns(UserWarning, match="Side effects inside what the plan recomputes happen again"):
        step.report(w, x)


@pytest.mark.parametrize("ordered", [False, True], ids=["", "ordered"])
def test_prints(capfd, ordered):
    """A print shows each line once in the forward pass, in order where that is asked for."""

    def f(w):
        for i in range(5):
            w = jnp.tanh(w @ W)
            jax.debug.print("{} {x:.3f}", i, x=w[0, 0], ordered=ordered)
        return jnp.sum(w)

    jax.block_until_ready(jax.jit(predicted(f))(W))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in (lines if ordered else sorted(lines))] == list("01234")


def test_pure_callbacks_keep_apart():
    """Callbacks of one code that close over different numbers are not taken for one another."""

    def host(c):
        op = jax.custom_jvp(lambda x: jax.pure_callback(lambda v: c * np.sin(v), jax.typeof(x), x))
        op.defjvp(lambda primals, tangents: (op(*primals), c * jnp.cos(primals[0]) * tangents[0]))
        return op

    def f(w):
        x = w
        for c in np.float32([1, 2, 3, 4]):
            x = host(c)(x @ w)
        return jnp.sum(x)

    same(jax.jit(jax.value_and_grad(predicted(f)))(W), jax.jit(jax.value_and_grad(f))(W))


def test_checkify():
    """Checks inside the function are made, in the gradient too, and failed ones are reported."""

    def f(w):
        x = w
        for i in range(5):
            x = jnp.tanh(x @ w)
            checkify.check(jnp.sum(x) < 100 if i < 4 else w[0, 0] < 5, "too large: {}", jnp.sum(x))
        return jnp.sum(x)

    error, gradient = jax.jit(checkify.checkify(jax.grad(predicted(f))))(W)
    assert error.get() is None
    same(gradient, jax.grad(lambda w: checkify.checkify(f)(w)[1])(W))
    assert "too large" in jax.jit(checkify.checkify(predicted(f)))(W + 5)[0].get()


def test_checkify_under_a_budget():
    """A plan for a function with checks is compiled with its checks as results, and its budget kept."""

    def f(w, x):
        for _ in range(16):
            x = jnp.tanh(x @ w)
        checkify.check(jnp.all(x < 2), "too large")
        return jnp.sum(x)

    x = jnp.ones((2048, 4))
    small = jaxsub.sublinear(f, budget=0.6, cache=False, progress=False)
    error, gradient = jax.jit(checkify.checkify(jax.grad(small)))(W, x)
    assert error.get() is None
    same(gradient, checkify.checkify(jax.grad(f))(W, x)[1])
    plan = small.plan(W, x)
    assert plan.measurement.temp_bytes <= 0.6 * plan.plain_measurement.temp_bytes


def test_references_as_arguments():
    """A reference that comes in is written as often as before."""

    def f(w, ref):
        x = w
        for _ in range(4):
            x = jnp.tanh(x @ w)
            ref[...] += lax.stop_gradient(jnp.sum(x))
        return jnp.sum(x)

    one, two = jax.new_ref(0.0), jax.new_ref(0.0)
    same(jax.grad(predicted(f))(W, one), jax.grad(f)(W, two))
    same(one[...], two[...])
    batch = jnp.stack([W, -W])
    one, two = jax.new_ref(jnp.zeros(2)), jax.new_ref(jnp.zeros(2))
    same(jax.vmap(jax.grad(predicted(f)))(batch, one), jax.vmap(jax.grad(f))(batch, two))
    same(one[...], two[...])
