"""Arrays that a function closes over are constants of what is measured, as they are of what the user runs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsub
from jaxsub.jaxpr.constants import constants_key, known_constants
from jaxsub.jaxpr.trace import trace

W = jax.ShapeDtypeStruct((256, 256), "float32")
TABLE = np.random.default_rng(0).random((256, 256), "float32")


def network(constant, depth=8):
    """A deep loss that multiplies each layer by a constant."""

    def loss(w, x):
        for _ in range(depth):
            x = jnp.tanh(x @ w) * constant
        return x.sum()

    return loss


def from_constants(w, x):
    """A loss that adds a table made of constants."""
    table = jnp.sin(jnp.asarray(TABLE[0])[:, None] * jnp.asarray(TABLE[1]))
    for _ in range(8):
        x = jnp.tanh(x @ w) + table
    return x.sum()


def temporaries(fun, plan):
    """Bytes of the program that a user compiles under a plan."""
    planned = jaxsub.sublinear(fun, plan=plan)
    step = jaxsub.jit(lambda w, x: jax.value_and_grad(planned)(w, x))
    return step.lower(W, W).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("fun", [network(jnp.ones((256, 256))), network(TABLE), network(jnp.asarray(TABLE)),
                                 network(jnp.float32(2)), from_constants])  # fmt: skip
def test_a_measurement_is_that_of_the_program_with_its_constants(fun):
    plan = jaxsub.plan(fun, W, W, budget=0.6, cache=False)
    assert temporaries(fun, plan) == plan.measurement.temp_bytes
    assert plan.measurement.argument_bytes == 2 * 256 * 256 * 4


def test_another_constant_of_that_kind_shares_a_plan_and_one_that_repeats_a_value_has_its_own(tmp_path):
    first, same, other = (jaxsub.plan(network(c), W, W, budget=0.6, cache=tmp_path)
                          for c in (TABLE, TABLE + 1, jnp.ones((256, 256))))  # fmt: skip
    assert first == same
    assert temporaries(network(jnp.ones((256, 256))), other) == other.measurement.temp_bytes
    assert other.measurement.temp_bytes < first.measurement.temp_bytes


def test_traced_constants_are_arguments_and_random_keys_are_constants():
    key, found = jax.random.key(0), []

    def outer(scale):
        def loss(w):
            return (w * jax.random.normal(key, w.shape) * scale).sum()

        found.append(trace(loss, [W], {}))
        return loss(jnp.ones((256, 256)))

    jax.make_jaxpr(outer)(2.0)
    (program,) = found
    assert len(program.consts) == 2
    (kept,) = known_constants(program).values()
    assert kept is key
    assert constants_key(program) == repr(dict.fromkeys(known_constants(program), False))


def test_a_constant_that_is_too_large_to_fold_is_an_argument(monkeypatch):
    monkeypatch.setattr("jaxsub.jaxpr.constants.MOST_FOLDED", 100)
    assert not known_constants(trace(network(jnp.asarray(TABLE), 1), [W, W], {}))


def test_a_rule_may_index_a_constant_by_what_is_traced():
    """A derivative rule gets the arrays that the function made: JAX's own constants are NumPy's, which refuse that."""

    @jax.custom_vjp
    def at_times(x, times):
        return jnp.sin(x * times.sum())

    def backward(residuals, cotangent):
        x, times = residuals
        total = jax.lax.scan(lambda total, i: (total + times[i], None), 0.0, jnp.arange(len(times)))[0]
        return cotangent * total * jnp.cos(x * total), jnp.zeros_like(times)

    at_times.defvjp(lambda x, times: (at_times(x, times), (x, times)), backward)

    def loss(ws, x):
        for w in ws:
            x = at_times(jnp.tanh(x @ w), jnp.array([0.0, 0.5, 1.0]))
        return jnp.mean(x**2)

    args = jnp.ones((8, 16, 16)) / 16, jnp.linspace(0, 1, 512 * 16).reshape(512, 16)
    f = jaxsub.sublinear(loss, budget=0.7, progress=False)
    assert f.plan(*args).planner != "plain"
    chex.assert_trees_all_close(jax.grad(f)(*args), jax.grad(loss)(*args), rtol=1e-5)


def test_a_constant_that_no_rule_reads_is_copied_to_no_device():
    """A table may be large: JAX's own constant stands for it until the gradient runs."""
    program = trace(lambda w, x: jnp.sum(w * x * TABLE[0]), [W, W], {})
    assert program.consts
    assert not any(isinstance(const, jax.Array) for const in program.consts)
