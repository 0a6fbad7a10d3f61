"""What tests of loops compare: values and gradients, and weighted FLOPs."""

import functools

import chex
import jax

from jaxsub.jaxpr.flops import jaxpr_flops


@functools.cache
def compiled_gradient(f):
    """Value and gradients of a function, compiled once for all that is compared with it."""
    return jax.jit(jax.value_and_grad(f, (0, 1)))


def assert_same(f, g, *args):
    """Values and gradients agree."""
    expected = compiled_gradient(f)(*args)
    found = compiled_gradient(g)(*args)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)


def gradient_flops(f, args):
    """Weighted FLOPs of the gradient."""
    return jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(f, (0, 1)))(*args)).weighted
