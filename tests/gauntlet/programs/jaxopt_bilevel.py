"""JAXopt: ridge regression solved on learnt features, its solution differentiated implicitly."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import jaxopt

from gauntlet import Built

ROWS, INPUTS, WIDTH = 256, 16, 24


def features(params, x):
    for w in params["features"]:
        x = jnp.tanh(x @ w)
    return x


def ridge(weights, l2, data):
    x, y = data
    return jnp.mean((x @ weights - y) ** 2) + l2 * jnp.sum(weights**2)


def build() -> Built:
    keys = jax.random.split(jax.random.key(0), 6)
    sizes = [INPUTS, 64, 64, 64, WIDTH]
    layers = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, pairwise(sizes), strict=False)]
    params = {"features": layers, "log_l2": jnp.float32(-1.0)}
    x = jax.random.normal(keys[4], (2 * ROWS, INPUTS))
    y = jnp.sin(x.sum(1))
    solver = jaxopt.GradientDescent(ridge, maxiter=50, tol=1e-6, implicit_diff=True)

    def outer(params, train, test):
        fitted = solver.run(jnp.zeros(WIDTH), jnp.exp(params["log_l2"]), (features(params, train[0]), train[1])).params
        return jnp.mean((features(params, test[0]) @ fitted - test[1]) ** 2)

    return Built(outer, (params, (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])), rtol=1e-3)
