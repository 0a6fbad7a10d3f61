"""JAX alone: linear recurrent units, a diagonal complex recurrence solved by `lax.associative_scan`."""

import jax
import jax.numpy as jnp

from gauntlet import Built

LENGTH, WIDTH, STATE, LAYERS = 64, 48, 48, 2


def binary_operator(left, right):
    a_left, b_left = left
    a_right, b_right = right
    return a_left * a_right, a_right * b_left + b_right


def unit(params, inputs):
    nu, theta, b_re, b_im, c_re, c_im, d = params
    lam = jnp.exp(-jnp.exp(nu) + 1j * jnp.exp(theta))
    driven = inputs @ ((b_re + 1j * b_im) * jnp.sqrt(1 - jnp.abs(lam) ** 2)[:, None]).T
    _, states = jax.lax.associative_scan(binary_operator, (jnp.tile(lam, (LENGTH, 1)), driven))
    return (states @ (c_re + 1j * c_im).T).real + d * inputs


def loss(params, inputs, targets):
    h = inputs
    for layer in params:
        h = h + jax.nn.gelu(jax.vmap(unit, in_axes=(None, 0))(layer, h))
    return jnp.mean((h - targets) ** 2)


def build() -> Built:
    def layer(key):
        k = jax.random.split(key, 6)
        b, c = (jax.random.normal(k[i], (2, STATE, WIDTH)) / (2 * WIDTH) ** 0.5 for i in (0, 1))
        nu = jnp.log(-0.5 * jnp.log(jax.random.uniform(k[2], (STATE,), minval=0.5, maxval=0.9)))
        theta = jnp.log(6.28 * jax.random.uniform(k[3], (STATE,), minval=0.01))
        return nu, theta, *b, *c.swapaxes(1, 2), jax.random.normal(k[4], (WIDTH,))

    inputs = jax.random.normal(jax.random.key(1), (8, LENGTH, WIDTH))
    return Built(loss, ([layer(k) for k in jax.random.split(jax.random.key(0), LAYERS)], inputs, inputs[:, ::-1]))
