"""JAX alone: model-agnostic meta-learning, gradient steps of an inner loss inside the outer one, over vmapped tasks."""

import jax
import jax.numpy as jnp

from gauntlet import Built

TASKS, SHOTS, WIDTH, INNER_STEPS = 8, 16, 64, 3


def predict(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def inner_loss(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def adapted(params, x, y):
    for _ in range(INNER_STEPS):
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, jax.grad(inner_loss)(params, x, y))
    return params


def loss(params, x, y):
    half = SHOTS // 2
    per_task = lambda x, y: inner_loss(adapted(params, x[:half], y[:half]), x[half:], y[half:])  # noqa: E731
    return jnp.mean(jax.vmap(per_task)(x, y))


def build() -> Built:
    sizes = [1, WIDTH, WIDTH, 1]
    keys = jax.random.split(jax.random.key(0), 3)
    params = [
        (jax.random.normal(k, (i, o)) / i**0.5, jnp.zeros(o)) for k, i, o in zip(keys, sizes, sizes[1:], strict=False)
    ]
    x = jax.random.uniform(jax.random.key(1), (TASKS, SHOTS, 1), minval=-3, maxval=3)
    return Built(loss, (params, x, jnp.sin(x + jnp.arange(TASKS)[:, None, None])), rtol=1e-3)
