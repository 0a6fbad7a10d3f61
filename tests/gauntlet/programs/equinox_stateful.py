"""Equinox: batch normalisation over a vmapped axis, spectral norm and dropout, as in its example `stateful`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from gauntlet import Built


class Model(eqx.Module):
    norm1: eqx.nn.BatchNorm
    spectral_linear: eqx.nn.SpectralNorm[eqx.nn.Linear]
    norm2: eqx.nn.BatchNorm
    layers: list[eqx.nn.Linear]
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        key1, key2, key3, *keys = jax.random.split(key, 8)
        self.norm1 = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        self.spectral_linear = eqx.nn.SpectralNorm(eqx.nn.Linear(3, 128, key=key1), weight_name="weight", key=key2)
        self.norm2 = eqx.nn.BatchNorm(128, axis_name="batch", mode="batch")
        self.layers = [eqx.nn.Linear(128, 128, key=k) for k in keys]
        self.dropout = eqx.nn.Dropout(0.2)
        self.head = eqx.nn.Linear(128, 10, key=key3)

    def __call__(self, x, state, key):
        x, state = self.norm1(x, state)
        x, state = self.spectral_linear(x, state)
        x = jax.nn.relu(x)
        x, state = self.norm2(x, state)
        for layer, k in zip(self.layers, jax.random.split(key, len(self.layers)), strict=True):
            x = x + self.dropout(jax.nn.gelu(layer(x)), key=k)
        return self.head(x), state


def compute_loss(model, state, xs, ys, key):
    batch_model = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    pred_ys, state = batch_model(xs, state, jax.random.split(key, len(xs)))
    return optax.softmax_cross_entropy_with_integer_labels(pred_ys, ys).mean(), state


def build() -> Built:
    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    xs = jax.random.normal(jax.random.key(1), (256, 3))
    ys = jnp.arange(256) % 10
    args = (model, state, xs, ys, jax.random.key(2))

    def make_step(loss):
        optim = optax.adam(1e-3, eps=1e-3)
        arrays, static = eqx.partition(model, eqx.is_inexact_array)

        def step(arrays, state, opt_state, xs, ys, key):
            whole = eqx.combine(arrays, static)
            (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(whole, state, xs, ys, key)
            updates, opt_state = optim.update(grads, opt_state)
            return eqx.apply_updates(arrays, updates), state, opt_state, value

        return step, (arrays, state, optim.init(arrays), *args[2:])

    return Built(compute_loss, args, has_aux=True, value_and_grad=eqx.filter_value_and_grad, make_step=make_step)
