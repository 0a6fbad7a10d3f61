"""JAX alone: dropout with a key that is split and passed on through layers, and a metric made after the loss."""

import jax
import jax.numpy as jnp

from gauntlet import Built

WIDTH, BATCH, LAYERS = 64, 128, 6


def dropout(key, rate, x):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def loss(params, key, x, y):
    for w in params:
        key, subkey = jax.random.split(key)
        x = x + dropout(subkey, 0.1, jnp.tanh(x @ w))
    error = x - y
    value = jnp.mean(error**2)
    return value, {"largest": jnp.abs(error).max(), "at": jnp.argmax(jnp.abs(error).sum(1)), "key": key}


def build() -> Built:
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in jax.random.split(jax.random.key(0), LAYERS)]
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    return Built(loss, (params, jax.random.key(2), x, jnp.roll(x, 1, 0)), has_aux=True)
