"""JAX alone: layers that solve `z = tanh(Wz + x)` by Newton's steps, differentiated by `lax.custom_root`."""

import jax
import jax.numpy as jnp

from gauntlet import Built

WIDTH, BATCH, LAYERS = 24, 64, 3


def newton(f, start):
    def step(state):
        i, z = state
        return i + 1, z - jnp.linalg.solve(jax.jacobian(f)(z), f(z))

    return jax.lax.while_loop(lambda state: (state[0] < 8) & (jnp.abs(f(state[1])).max() > 1e-6), step, (0, start))[1]


def tangent_solve(g, y):
    return jnp.linalg.solve(jax.jacobian(g)(y), y)


def implicit(w, x):
    return jax.lax.custom_root(lambda z: z - jnp.tanh(w @ z + x), jnp.zeros_like(x), newton, tangent_solve)


def loss(params, x, y):
    for w, u in params:
        x = x + jax.vmap(implicit, in_axes=(None, 0))(w, x @ u)
    return jnp.mean((x - y) ** 2)


def build() -> Built:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [tuple(0.4 * jax.random.normal(k, (2, WIDTH, WIDTH)) / WIDTH**0.5) for k in keys]
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    return Built(loss, (params, x, jnp.roll(x, 1, 0)), rtol=1e-3)
