"""Derivative rules of a function's own that close over values, constant or traced."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxsub

WS, X, Y = [jnp.eye(32) * 0.9] * 4, jnp.linspace(-1, 1, 2048 * 32).reshape(2048, 32), jnp.arange(2048) % 7


def by_vjp(mask, rule_mask):
    """A masked tanh with a backward pass of its own."""

    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x * mask)

    f.defvjp(
        lambda x: (jnp.tanh(x * rule_mask), x), lambda x, ct: (ct * rule_mask * (1 - jnp.tanh(x * rule_mask) ** 2),)
    )
    return f


def by_jvp(mask, rule_mask):
    """The same with tangents of its own."""

    @jax.custom_jvp
    def f(x):
        return jnp.tanh(x * mask)

    f.defjvp(lambda p, t: (f(*p), t[0] * rule_mask * (1 - jnp.tanh(p[0] * rule_mask) ** 2)))
    return f


def layers(f, ws, x):
    """A loss with the function behind each product."""
    for w in ws:
        x = f(x @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("rule", [by_vjp, by_jvp])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_rule_over_what_is_traced_is_refused_with_what_to_do(rule, is_jitted):
    """A mask made of the batch inside the loss: JAX itself cannot differentiate that under `jax.checkpoint`."""

    def loss(ws, x, y):
        mask = (y > 2).astype(x.dtype)[:, None]
        return layers(rule(mask, mask), ws, x)

    gradient = jax.grad(jaxsub.sublinear(loss, budget=0.5, cache=False, progress=False))
    with pytest.raises(jaxsub.UnsupportedError, match=r"test_derivative_rules.py:\d+.*Make the value an argument"):
        (jaxsub.jit(gradient) if is_jitted else gradient)(WS, X, Y)


def test_what_a_function_around_traced_may_be_closed_over():
    """A step makes the mask, and a function in its loss closes over that: no gradient is taken by it."""

    def step(rule_mask):
        def run(ws, x, y):
            f = by_vjp((y > 2).astype(x.dtype)[:, None], rule_mask)
            loss = lambda ws, x: layers(f, ws, x)  # noqa: E731
            planned = jaxsub.sublinear(loss, budget=0.9, cache=False, progress=False)
            return jax.grad(planned)(ws, x), jax.grad(loss)(ws, x)

        return run

    got, wanted = jaxsub.jit(step((Y > 2).astype(X.dtype)[:, None]))(WS, X, Y)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("error", [AttributeError, KeyError, NotImplementedError, ValueError])
def test_a_rule_that_nobody_needs_may_fail(error):
    """What is not differentiated needs no derivative: a function whose rule is not made yet is no obstacle."""

    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x)

    def backward(saved, ct):
        raise error("not made yet")

    f.defvjp(lambda x: (f(x), None), backward)

    def loss(ws, x):
        return layers(jnp.sin, ws, x) + jnp.mean(jax.lax.stop_gradient(f(x)))

    plan = jaxsub.plan(loss, WS, X, budget=0.5, cache=False, progress=False)
    gradient = jaxsub.jit(jax.grad(jaxsub.sublinear(loss, plan=plan, progress=False)))
    chex.assert_trees_all_close(gradient(WS, X), jax.grad(loss)(WS, X), rtol=1e-5)
