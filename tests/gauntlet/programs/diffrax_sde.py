"""Diffrax: a neural SDE with a Brownian tree, fixed steps and a batch of keys."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx

from gauntlet import Built

STEPS = 16


def build() -> Built:
    keys = jax.random.split(jax.random.key(0), 3)
    drift = eqx.nn.MLP(4, 4, 64, 2, activation=jax.nn.silu, final_activation=jnp.tanh, key=keys[0])
    diffusion = eqx.nn.MLP(4, 4, 64, 1, activation=jax.nn.silu, final_activation=jnp.tanh, key=keys[1])
    params, static = eqx.partition((drift, diffusion), eqx.is_inexact_array)

    def solve(fields, y0, key):
        drift, diffusion = fields
        path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(4,), key=key, levy_area=diffrax.SpaceTimeLevyArea)
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, args: drift(y)),
            diffrax.ControlTerm(lambda t, y, args: lx.DiagonalLinearOperator(diffusion(y)), path),
        )
        return diffrax.diffeqsolve(terms, diffrax.Heun(), 0.0, 1.0, 1 / STEPS, y0, max_steps=STEPS + 1).ys[-1]

    def loss(params, y0, keys):
        ends = jax.vmap(solve, in_axes=(None, 0, 0))(eqx.combine(params, static), y0, keys)
        return jnp.mean((ends.mean(0) - 1) ** 2) + jnp.mean((ends.std(0) - 0.5) ** 2)

    y0 = jax.random.normal(keys[2], (64, 4))
    return Built(loss, (params, y0, jax.random.split(jax.random.key(1), 64)), rtol=1e-3)
