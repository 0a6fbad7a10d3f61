"""Which backward passes are linear in their cotangents."""

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax import lax

from jaxsub.jaxpr.linearity import ATTENTION, is_linear

X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)


def blockwise(x, ct):
    """What the backward pass of attention by blocks does: sums and stacks in a scan."""

    def step(total, row):
        weights = jnp.exp(row[:, None] * x)
        return total + weights @ ct, (weights.T @ ct, row)

    total, (stacked, _) = lax.scan(step, jnp.zeros_like(ct), x)
    return total, stacked


LINEAR = {
    "a product": lambda x, ct: ct * jnp.cos(x),
    "a quotient": lambda x, ct: -ct / (1 + x**2),
    "products of matrices": lambda x, ct: (ct @ x.T, x.T @ ct),
    "zeros where it is negative": lambda x, ct: jnp.where(x > 0, ct, 0.0),
    "rows added up": lambda x, ct: jnp.zeros((9, 4)).at[jnp.array([1, 1, 2, 3])].add(ct),
    "another type": lambda x, ct: (ct.astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "a call, a region and a rule": lambda x, ct: jax.checkpoint(jax.jit(lambda c: c * jax.nn.silu(x)))(ct),
    "a scan": blockwise,
    "zeros": lambda x, ct: (jnp.zeros_like(x), 2 * ct),
}
OTHER = {
    "clipped": lambda x, ct: jnp.clip(ct, -1, 1),
    "normalised": lambda x, ct: ct / jnp.linalg.norm(ct),
    "rounded": lambda x, ct: jnp.round(ct * 100) / 100,
    "whole numbers": lambda x, ct: ct.astype(jnp.int8).astype(jnp.float32),
    "with something added": lambda x, ct: ct + 0.1 * x,
    "squared": lambda x, ct: ct * ct,
    "where it is positive": lambda x, ct: jnp.where(ct > 0, ct, 0.0),
    "a rectified one": lambda x, ct: jax.nn.relu(ct),
    "a scan that adds to it": lambda x, ct: lax.scan(lambda c, row: (c + row, None), ct, x)[0],
    "its own": lambda x, ct: x,
    "the index of the largest": lambda x, ct: x[jnp.argmax(ct[0])],
}


@pytest.mark.parametrize("name", [*LINEAR, *OTHER])
def test_what_is_linear_in_its_cotangent(name):
    """What scales with the cotangent is told from what does not, by its equations."""
    rule = (LINEAR | OTHER)[name]
    found = is_linear(jax.make_jaxpr(rule)(X, X + 2), (False, True))
    assert found is (name in LINEAR)


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_called_linear_scales(name):
    """Twice the cotangent gives twice the result."""
    chex.assert_trees_all_close(
        LINEAR[name](X, 2 * X), jax.tree.map(lambda y: 2 * y, LINEAR[name](X, X)), rtol=1e-4, atol=1e-5
    )


def test_the_backward_pass_of_cudnn_attention_is_linear():
    """A kernel that no equations describe: in the cotangent of its result, its last operand, and in no other."""
    kernel = jax.extend.core.Primitive(ATTENTION)
    kernel.def_abstract_eval(lambda *avals: avals[0])
    for rule, is_so in ((lambda x, ct: kernel.bind(x, x, ct), True), (lambda x, ct: kernel.bind(ct, x, ct), False)):
        assert is_linear(jax.make_jaxpr(rule)(X, X), (False, True)) is is_so
