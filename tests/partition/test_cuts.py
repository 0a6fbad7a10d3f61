"""Where programs are cut into stages."""

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
