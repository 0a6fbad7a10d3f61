"""Dropout in slices: each draws its own random bits, so that no slice holds the masks of all."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxsub

LAYERS, BATCH, TOKENS, WIDTH = 4, 16, 256, 64
SCORES = BATCH * TOKENS * TOKENS
"""Elements of one layer's attention: dropout draws a word for each."""


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def layer(x, weights, key):
    """Attention with dropout on its scores, and an MLP with dropout."""
    inner, outer, up, down = weights
    scores = jnp.einsum("btd,bsd->bts", x @ inner, x)
    x = x + dropped(jax.random.fold_in(key, 0), jax.nn.softmax(scores / WIDTH)) @ x @ outer
    return x + dropped(jax.random.fold_in(key, 1), jax.nn.gelu(x @ up)) @ down


def unrolled(layers, x, key):
    for i, weights in enumerate(layers):
        x = layer(x, weights, jax.random.fold_in(key, i))
    return jnp.mean(x**2)


def scanned(layers, x, key):
    xs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers), jax.random.split(key, LAYERS)
    return jnp.mean(jax.lax.scan(lambda x, wk: (layer(x, *wk), None), x, xs)[0] ** 2)


def by_example(layers, x, key):
    """As Equinox's models do it: one example and one key at a time."""
    one = lambda x, key: unrolled(layers, x[None], key)  # noqa: E731
    return jnp.mean(jax.vmap(one)(x, jax.random.split(key, len(x))))


def arguments():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    shapes = (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    layers = [tuple(jax.random.normal(k, shape) / 8 for shape in shapes) for k in keys]
    return layers, jax.random.normal(jax.random.key(1), (BATCH, TOKENS, WIDTH)), jax.random.key(2)


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("loss", [unrolled, scanned, by_example])
def test_slices_hold_no_masks_of_all(loss, target):
    """A slice for each example needs less than the words that its batch draws; so it is predicted.

    The older threefry's bits can be drawn whole alone: with a key for all examples they take more, as printed.
    """
    if target == "h100":
        pytest.importorskip("jax_plugins.xla_cuda12", reason="jaxsub[targets] compiles for a GPU that is not there")
    args = arguments()
    given = dict(chunks={0: BATCH}, target=target, cache=False, progress=False)
    plan = jaxsub.plan(loss, *args, verify=True, **given)
    needs = plan.measurement.temp_bytes
    with jax.threefry_partitionable(False):
        whole = jaxsub.plan(loss, *args, verify=True, **given).measurement.temp_bytes
    print(f"{loss.__name__}, {target}: {whole / 2**20:.1f} MiB drawn whole, {needs / 2**20:.1f} in slices")
    assert needs < 4 * LAYERS * SCORES
    assert needs < 0.75 * whole or loss is by_example
    assert plan.prediction.temp_bytes == pytest.approx(needs, rel=0.15)


@pytest.mark.parametrize("loss", [unrolled, scanned, by_example])
def test_a_budget_below_the_words_is_met_with_the_same_gradient(loss):
    """Below what two of the layers draw, where a slice recomputes inside too."""
    args = arguments()
    fitting = jaxsub.sublinear(loss, budget=6 * SCORES, cache=False, progress=False)
    assert fitting.plan(*args).slices
    got, wanted = (jaxsub.jit(jax.value_and_grad(f))(*args) for f in (fitting, loss))
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)
