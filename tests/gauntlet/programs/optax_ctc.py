"""Optax: the CTC loss over gated recurrent layers under `lax.scan`, two layers of speech-like frames."""

import jax
import jax.numpy as jnp
import optax

from gauntlet import Built

LENGTH, BATCH, WIDTH, CLASSES = 32, 8, 64, 16


def gated(params, frames):
    w, u = params

    def step(h, x):
        z, r, n = jnp.split(x @ w, 3, -1)
        zh, rh, nh = jnp.split(h @ u, 3, -1)
        z = jax.nn.sigmoid(z + zh)
        h = z * h + (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + rh) * nh)
        return h, h

    return jax.lax.scan(step, jnp.zeros(frames.shape[1:]), frames)[1]


def loss(params, frames, labels):
    for layer in params["layers"]:
        frames = gated(layer, frames)
    logits = (frames @ params["head"]).swapaxes(0, 1)
    return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape)).mean()


def build() -> Built:
    keys = jax.random.split(jax.random.key(0), 7)
    draw = lambda k, out: jax.random.normal(k, (WIDTH, out)) / WIDTH**0.5  # noqa: E731
    layers = [(draw(keys[2 * i], 3 * WIDTH), draw(keys[2 * i + 1], 3 * WIDTH)) for i in range(2)]
    labels = jax.random.randint(keys[4], (BATCH, 6), 1, CLASSES)
    params = {"layers": layers, "head": draw(keys[5], CLASSES)}
    return Built(loss, (params, jax.random.normal(keys[6], (LENGTH, BATCH, WIDTH)), labels), rtol=1e-3)
