"""Where programs are cut into stages."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxsub
from jaxsub.core.figures import recomputed_share
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.cuts import find_cuts

DEPTH = 12
PARAMS = {"scale": jnp.zeros(1), "layers": [jnp.eye(128)] * DEPTH}
X = jnp.ones((512, 128))


def scaled(made, is_first):
    """Layers, and a scale for their result that is computed before or behind them."""

    def loss(params, x):
        scale = made(params) if is_first else None
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return ((scale if is_first else made(params)) * x**2).mean()

    return loss


MADE = {
    "a temperature": lambda params: jnp.exp(params["scale"]),
    "a product of weights": lambda params: (params["layers"][0] * params["layers"][1])[:1] * 2,
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_value_that_is_computed_first_and_read_last_forbids_no_cut(made):
    first, last = (find_cuts(trace(scaled(made, is_first), (PARAMS, X), {}).graph) for is_first in (True, False))
    assert len(first) >= len(last) - 2 >= DEPTH - 1


def test_it_costs_no_budget():
    first, last = (scaled(MADE["a temperature"], is_first) for is_first in (True, False))
    budget = jaxsub.measure(last, PARAMS, X).temp_bytes // 2
    plans = [jaxsub.plan(f, PARAMS, X, budget=budget, chunks=False, cache=False, progress=False) for f in (first, last)]
    assert recomputed_share(plans[0]) <= recomputed_share(plans[1]) + 0.05


def matern(params, x):
    """A kernel matrix of points, made of the matrix of their distances."""
    z = x / jnp.exp(params["scales"])
    sums = jnp.sum(z**2, 1)
    r = jnp.sqrt(5 * jnp.maximum(sums[:, None] + sums - 2 * z @ z.T, 1e-12))
    return jnp.exp(params["amplitude"]) * (1 + r + r**2 / 3) * jnp.exp(-r)


def test_what_a_cholesky_factor_is_made_of_is_recomputed_without_it():
    """The marginal likelihood of a Gaussian process, with its kernel in a region: the factor is made once."""
    params = {"scales": jnp.zeros(8), "amplitude": jnp.zeros(()), "noise": jnp.array(-2.0)}
    x = jax.random.normal(jax.random.key(0), (300, 8))

    def loss(params, x, kernel=matern):
        y = jnp.sin(x.sum(1))
        factor = jnp.linalg.cholesky(kernel(params, x) + jnp.exp(params["noise"]) * jnp.eye(300))
        return y @ jax.scipy.linalg.cho_solve((factor, True), y) / 2 + jnp.log(jnp.diag(factor)).sum()

    by_hand = jaxsub.measure(lambda p, x: loss(p, x, jax.checkpoint(matern)), params, x).temp_bytes
    assert by_hand < 0.9 * jaxsub.measure(loss, params, x).temp_bytes
    plan = jaxsub.plan(loss, params, x, budget=by_hand)
    assert plan.measurement.temp_bytes <= by_hand
    assert recomputed_share(plan) < 0.2  # the factor alone is half of the forward pass
    planned = jax.grad(jaxsub.sublinear(loss, plan=plan))(params, x)
    chex.assert_trees_all_close(planned, jax.grad(loss)(params, x), rtol=1e-3)
