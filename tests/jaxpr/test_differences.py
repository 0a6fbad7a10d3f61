"""Where a program differs from the one that a plan was made for, in words."""

import jax.numpy as jnp
import pytest

from jaxsub.jaxpr.differences import equation_digests, first_difference
from jaxsub.jaxpr.trace import trace


def chain(*functions):
    """The program of functions applied one after the other."""

    def loss(x):
        for f in functions:
            x = f(x)
        return x

    return trace(loss, (jnp.ones(3),), {})


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (chain(jnp.sin, jnp.cos), "The first equation that differs is number 1, here `tanh` -> "),
        (chain(jnp.sin), "The first equation that differs is number 1, here `tanh` -> "),
        (chain(jnp.sin, jnp.tanh, jnp.cos), "The first 2 equations agree; the plan's function had 1 more. "),
        (chain(jnp.sin, jnp.tanh), "Their equations agree; what differs is their arguments, "),
    ],
)  # fmt: skip
def test_the_first_equation_that_differs_is_named(there, said):
    """By its number, its primitive and what it makes; where all agree, what else may differ is said."""
    assert first_difference(chain(jnp.sin, jnp.tanh), equation_digests(there)).startswith(said)


def test_a_plan_without_digests_says_nothing():
    """Plans by hand have none."""
    assert not first_difference(chain(jnp.sin), "")
