"""Rules of `custom_vjp` that depend on which inputs have tangents: one pattern does not spoil the next."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxsub
from jaxsub.jaxpr.derivative_rules import NOT_TRACED, function_of, traced_vjp
from jaxsub.jaxpr.trace import trace

WIDTH, ROWS = 64, 512
KEYS = jax.random.split(jax.random.key(0), 8)
WEIGHTS = [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in KEYS[:6]]
X = jax.random.normal(KEYS[7], (ROWS, WIDTH))


def product(refuses):
    """A product with a rule for its weights alone, as Equinox makes them, or one that saves more for its rows too."""

    @jax.custom_vjp
    def run(w, x):
        return jnp.tanh(x @ w)

    def forward(w, x):
        if refuses:
            assert not x.perturbed, "no gradient of x"
        y = jnp.tanh(x.value @ w.value)
        return y, (y, x.value, w.value) if x.perturbed else (y, x.value)

    def backward(saved, cotangent):
        y, x, *rest = saved
        moved = cotangent * (1 - y * y)
        return x.T @ moved, moved @ rest[0].T if rest else jnp.zeros_like(x)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def unrolled(product):
    def loss(ws, x):
        h = x
        for w in ws:
            h = jnp.sin(product(w, x) + h)
            h = jnp.tanh(jnp.exp(jnp.sin(h @ w)))
        return jnp.mean(h**2)

    return loss


def scanned(product):
    def loss(ws, x):
        def step(h, w):
            h = jnp.sin(product(w, x) + h)
            return jnp.tanh(jnp.exp(jnp.sin(h @ w))), None

        return jnp.mean(jax.lax.scan(step, x, jnp.stack(ws))[0] ** 2)

    return loss


@pytest.mark.parametrize("refuses", [True, False])
@pytest.mark.parametrize("form", [unrolled, scanned])
def test_rules_that_refuse_tangents_are_planned(form, refuses):
    """Whether rows can be sliced is asked of all operands: what the rule says to that is not its last word."""
    loss = form(product(refuses))
    budget = jaxsub.measure(loss, WEIGHTS, X).temp_bytes // 2
    planned = jaxsub.sublinear(loss, budget=budget, cache=False, progress=False)
    assert jaxsub.measure(planned, WEIGHTS, X).temp_bytes <= budget
    chex.assert_trees_all_close(
        jax.jit(jax.value_and_grad(planned))(WEIGHTS, X), jax.value_and_grad(loss)(WEIGHTS, X), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("refuses", [True, False])
def test_each_pattern_keeps_its_residuals(refuses):
    """The gradient of the weights is taken, then that of all operands, which the rule may refuse, then the first."""
    run = product(refuses)
    eqn = next(e for e in trace(lambda w, x: run(w, x), (WEIGHTS[0], X), {}).eqns if "custom" in e.primitive.name)
    function, _ = function_of(eqn)

    def gradient():
        return jax.grad(lambda w: jnp.sum(function(w, X)[0]))(WEIGHTS[0])

    first = gradient()
    if refuses:
        with pytest.raises(NOT_TRACED):
            traced_vjp(eqn)
    else:
        traced_vjp(eqn)
    chex.assert_trees_all_equal(gradient(), first)


def test_rules_inside_a_linear_solve():
    """Its bodies are parts of a named tuple."""

    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, cotangent: (2 * cotangent,))

    def loss(x):
        solve = functools.partial(jax.lax.custom_linear_solve, twice, solve=lambda _, b: b / 2, symmetric=True)
        return jnp.sum(jnp.sin(solve(x)))

    planned = jaxsub.sublinear(loss, cache=False, progress=False)
    chex.assert_trees_all_close(jax.grad(planned)(X), jax.grad(loss)(X), rtol=1e-5)


def test_a_rule_that_refused_is_not_asked_again():
    """Each time JAX would forget the residuals of rules inside it, which Equinox's loops have."""
    asked = []

    @jax.custom_vjp
    def run(w):
        return jnp.sin(w)

    def forward(w):
        asked.append(w)
        raise ValueError("no gradient")

    run.defvjp(forward, lambda saved, cotangent: (cotangent,))
    eqn = next(e for e in trace(lambda w: run(w).sum(), (X,), {}).eqns if "custom" in e.primitive.name)
    asked.clear()
    for _ in range(2):
        with pytest.raises(NOT_TRACED, match="no gradient"):
            traced_vjp(eqn)
    assert not asked  # the equation was described by what its rule computes, where that can be traced
