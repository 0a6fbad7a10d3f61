"""Losses of a few layers, functions of their weights and a batch."""

from operator import itemgetter

import jax
import jax.numpy as jnp
from jax import lax


def unrolled(layer):
    """Layers one after the other, each with its part of the stacked weights."""

    def loss(params, x):
        for i in range(len(jax.tree.leaves(params)[0])):
            x = layer(x, jax.tree.map(itemgetter(i), params))
        return (x**2).mean()

    return loss


def scanned(layer):
    """The same in a loop."""
    return lambda params, x: (lax.scan(lambda x, p: (layer(x, p), None), x, params)[0] ** 2).mean()


def tanh_layers(ws, x):
    """Layers whose batch is independent to the mean at the end: the whole function may run in slices."""
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def mixing_layers(ws, x):
    """Layers that mix all axes but the batch, which is short: few slices, each of them wide."""
    for w in ws:
        x = jnp.tanh(jnp.einsum("bnd,nm->bmd", jnp.cumsum(x, 2) / 4096, w))
    return (x**2).mean()
