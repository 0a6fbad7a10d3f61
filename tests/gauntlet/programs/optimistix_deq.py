"""Optimistix: deep equilibrium layers; each is a fixed point whose derivative is implicit, the default adjoint."""

import jax
import jax.numpy as jnp
import optimistix as optx

from gauntlet import Built

WIDTH, BATCH, LAYERS = 32, 64, 3


def build() -> Built:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [(jax.random.normal(k, (WIDTH, WIDTH)) / (4 * WIDTH**0.5), jnp.eye(WIDTH), jnp.zeros(WIDTH)) for k in keys]
    solver = optx.FixedPointIteration(rtol=1e-6, atol=1e-6)

    def equilibrium(x, w, u, b):
        f = lambda z, args: jnp.tanh(z @ args[0] + args[1])  # noqa: E731
        return optx.fixed_point(f, solver, jnp.zeros_like(x), args=(w, x @ u + b), max_steps=64).value

    def loss(params, x, y):
        for w, u, b in params:
            x = jax.nn.gelu(jax.vmap(equilibrium, in_axes=(0, None, None, None))(x, w, u, b)) + x
        return jnp.mean((x - y) ** 2)

    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    return Built(loss, (params, x, jnp.roll(x, 1, 0)), rtol=1e-3)
