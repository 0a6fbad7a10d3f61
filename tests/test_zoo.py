"""The zoo itself: its losses have gradients worth comparing, and its hand-made policies compute the same."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # a third of the time; what is computed stays


@functools.cache
def plain_gradient(name):
    """The gradient of a toy, made once for all tests."""
    model = zoo.BY_NAME[name]
    loss, args = model.toy()
    return jax.jit(model.value_and_grad(loss), compiler_options=FAST_COMPILE)(*args)[1]


@pytest.mark.parametrize("model", zoo.MODELS, ids=str)
def test_every_gradient_is_finite_and_not_zero(model):
    """A test that compares two gradients of a model can fail: no parameter's gradient vanishes."""
    for path, g in jax.tree_util.tree_leaves_with_path(jax.device_get(plain_gradient(model.name))):
        assert np.isfinite(g).all(), jax.tree_util.keystr(path)
        assert np.abs(g).max() > 1e-6, jax.tree_util.keystr(path)


@pytest.mark.parametrize("model", zoo.NETWORKS, ids=str)
def test_rematerialising_by_hand_changes_no_gradient(model):
    """The per-block versions to compare with are the same functions."""
    by_hand, args = model.toy(wrap=jax.checkpoint, every=2)
    _, grads = jax.jit(model.value_and_grad(by_hand), compiler_options=FAST_COMPILE)(*args)
    chex.assert_trees_all_close(grads, plain_gradient(model.name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", zoo.NETWORKS, ids=str)
def test_full_size_allocates_nothing(model):
    """Arguments of full size are shapes, and the loss can be traced on them."""
    loss, args = model.full()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    chex.assert_shape(jax.eval_shape(loss, *args), ())


def test_a_seed_decides_the_arguments():
    """The same seed gives the same arguments, another seed others."""
    model = zoo.BY_NAME["mlp"]
    chex.assert_trees_all_equal(model.toy(seed=1)[1], model.toy(seed=1)[1])
    assert not jnp.array_equal(model.toy(seed=1)[1][1], model.toy(seed=2)[1][1])
