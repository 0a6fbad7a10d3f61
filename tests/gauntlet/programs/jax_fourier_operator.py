"""JAX alone: a Fourier neural operator, layers that mix modes of a real FFT with complex weights."""

import jax
import jax.numpy as jnp

from gauntlet import Built

POINTS, WIDTH, MODES, BATCH, LAYERS = 128, 24, 16, 8, 4


def spectral(weights, x):
    modes = jnp.fft.rfft(x, axis=1)
    mixed = jnp.einsum("bmi,mio->bmo", modes[:, :MODES], jax.lax.complex(weights[0], weights[1]))
    return jnp.fft.irfft(jnp.zeros_like(modes).at[:, :MODES].set(mixed), n=POINTS, axis=1)


def loss(params, x, y):
    h = x @ params["lift"]
    for weights, bypass in params["layers"]:
        h = jax.nn.gelu(spectral(weights, h) + h @ bypass)
    return jnp.mean((h @ params["project"] - y) ** 2)


def build() -> Built:
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    layers = [
        (
            jax.random.normal(k, (2, MODES, WIDTH, WIDTH)) / WIDTH,
            jax.random.normal(jax.random.fold_in(k, 1), (WIDTH, WIDTH)) / WIDTH**0.5,
        )
        for k in keys[:LAYERS]
    ]
    params = {
        "lift": jax.random.normal(keys[-2], (2, WIDTH)),
        "layers": layers,
        "project": jax.random.normal(keys[-1], (WIDTH, 1)) / WIDTH**0.5,
    }
    grid = jnp.broadcast_to(jnp.linspace(0, 1, POINTS), (BATCH, POINTS))
    start = jnp.sin(2 * jnp.pi * grid * (1 + jnp.arange(BATCH)[:, None]))
    return Built(loss, (params, jnp.stack([start, grid], -1), jnp.roll(start, 8, 1)[..., None]))
