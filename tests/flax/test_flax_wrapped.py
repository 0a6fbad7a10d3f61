"""Wrapped losses and steps of Flax: copies, and the methods that tell of them."""

import copy
import pickle

import cloudpickle
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxsub
from jaxsub.flax import linen as jaxsub_linen
from jaxsub.flax import nnx as jaxsub_nnx

X = jnp.ones((4, 8))
LINEN = nn.Sequential([nn.Dense(8), jnp.tanh, nn.Dense(8), jnp.tanh, nn.Dense(8)])
VARIABLES = LINEN.init(jax.random.key(0), X)
quiet = {"cache": False, "progress": False}


class Net(nnx.Module):
    """Two layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def nnx_loss(model, x):
    return (model(x) ** 2).mean()


def linen_loss(variables, x):
    return (LINEN.apply(variables, x) ** 2).mean()


@jaxsub_nnx.sublinear(**quiet)
def decorated(model, x):
    """A loss at the top of a module."""
    return nnx_loss(model, x)


MADE = {
    "nnx": (jaxsub_nnx.sublinear(nnx_loss, **quiet), lambda: (Net(), X), nnx_loss),
    "linen": (jaxsub_linen.sublinear(linen_loss, **quiet), lambda: (VARIABLES, X), linen_loss),
    "nnx.jit": (jaxsub_nnx.jit(nnx_loss), lambda: (Net(), X), nnx_loss),
    "nnx.jit in a memory": (jaxsub_nnx.jit(nnx_loss, memory="1GiB", **quiet), lambda: (Net(), X), nnx_loss),
}


@pytest.mark.parametrize("kind", MADE)
def test_copies_work(kind):
    """Copies of all kinds give what the plain function gives, made before and after use."""
    made, args, fun = MADE[kind]
    for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: pickle.loads(cloudpickle.dumps(m))):
        other = make(made)
        assert other is not made
        np.testing.assert_allclose(other(*args()), fun(*args()), rtol=1e-5)
        np.testing.assert_allclose(make(other)(*args()), fun(*args()), rtol=1e-5)
    assert pickle.loads(pickle.dumps(decorated)) is decorated


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_what_is_told_of_a_loss(kind):
    """A loss of Flax tells its plan, what it needs, what budgets buy and where memory goes."""
    made, args, _ = MADE[kind]
    assert made.plan(*args()).n_nodes
    assert isinstance(made.measure(*args()), jaxsub.Measurement)
    assert made.frontier(*args()).points
    assert made.explain(*args()).residuals
