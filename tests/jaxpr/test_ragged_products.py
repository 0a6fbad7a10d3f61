"""Products by groups of rows: what is traced in their place where memory is predicted."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax, random

import jaxsub
from jaxsub.jaxpr.ragged_products import masked_product

ROWS, GROUPS, WIDTH, HIDDEN = 512, 8, 64, 256
SIZES = jnp.array([100, 0, 12, 64, 36, 200, 90, 10])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_masked_product_is_the_product_by_groups(dtype):
    """Values and gradients are those of `ragged_dot`, of empty groups too."""
    x = random.normal(random.key(0), (ROWS, WIDTH), dtype)
    w = random.normal(random.key(1), (GROUPS, WIDTH, HIDDEN), dtype) / 8
    (eqn,) = jax.make_jaxpr(lax.ragged_dot)(x, w, SIZES).eqns
    masked = masked_product(eqn)

    def gradients(product):
        return jax.vjp(lambda x, w: product(x, w, SIZES), x, w)[1](jnp.ones((ROWS, HIDDEN), dtype))

    tolerance = 1e-4 if dtype == jnp.float32 else 0.05
    chex.assert_trees_all_close(masked(x, w, SIZES), lax.ragged_dot(x, w, SIZES), rtol=tolerance, atol=tolerance)
    chex.assert_trees_all_close(gradients(masked), gradients(lax.ragged_dot), rtol=tolerance, atol=tolerance)


def test_other_products_are_traced_as_they_are():
    """Products without groups, or in which the sum is by groups, have nothing in their place."""
    x, w = jnp.ones((ROWS, WIDTH)), jnp.ones((GROUPS, WIDTH, HIDDEN))
    (dot,) = jax.make_jaxpr(jnp.dot)(x, w[0]).eqns

    def of_weights(w):
        return jax.vjp(lambda w: lax.ragged_dot(x, w, SIZES), w)[1](jnp.ones((ROWS, HIDDEN)))

    *_, summed = (eqn for eqn in jax.make_jaxpr(of_weights)(w).eqns if eqn.primitive.name == "ragged_dot_general")
    assert masked_product(dot) is None
    assert masked_product(summed) is None


def experts(ws, x):
    """Layers of experts whose rows are sorted."""
    for up, down in ws:
        x = x + lax.ragged_dot(jax.nn.silu(lax.ragged_dot(x, up, SIZES)), down, SIZES)
    return jnp.mean(x**2)


LAYERS = [(jnp.ones((GROUPS, WIDTH, HIDDEN)), jnp.ones((GROUPS, HIDDEN, WIDTH)))] * 4


@pytest.mark.parametrize("target", [None, "h100"])
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_what_layers_of_experts_need_is_predicted(target, budget):
    """Copies of rows for each group live from the forward to the backward pass, where nothing recomputes them."""
    args = LAYERS, jnp.ones((ROWS, WIDTH))
    plain = jaxsub.measure(experts, *args, target=target).temp_bytes
    n_bytes = 2 * plain if budget == 1.0 else int(budget * plain)
    plan = jaxsub.plan(experts, *args, budget=n_bytes, verify=False, cache=False, chunks=False, target=target)
    measured = jaxsub.measure(jaxsub.sublinear(experts, plan=plan), *args, target=target).temp_bytes
    assert measured == pytest.approx(plan.prediction.temp_bytes, rel=0.3)
