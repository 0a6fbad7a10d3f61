"""The zoo itself: its losses have gradients worth comparing, and its hand-made policies compute the same."""

import chex
import jax
import jax.numpy as jnp
import pytest
import zoo


@pytest.mark.parametrize("model", zoo.MODELS, ids=str)
def test_every_gradient_is_finite_and_not_zero(model):
    """A test that compares two gradients of a model can fail: no parameter's gradient vanishes."""
    loss, args = model.toy()
    _, grads = jax.jit(model.value_and_grad(loss))(*args)
    chex.assert_tree_all_finite(grads)
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.abs(g).max() > 1e-6, jax.tree_util.keystr(path)


@pytest.mark.parametrize("model", zoo.NETWORKS, ids=str)
def test_rematerialising_by_hand_changes_no_gradient(model):
    """The per-block versions to compare with are the same functions."""
    loss, args = model.toy()
    by_hand, _ = model.toy(wrap=jax.checkpoint, every=2)
    chex.assert_trees_all_close(jax.jit(jax.grad(by_hand))(*args), jax.jit(jax.grad(loss))(*args), rtol=1e-4, atol=1e-5)


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
