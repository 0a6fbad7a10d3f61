"""Distrax: a flow of masked couplings with splines, as in its example `flow`."""

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from gauntlet import Built

EVENT, BINS, LAYERS, BATCH = (8,), 4, 4, 64


def conditioner():
    return hk.Sequential(
        [
            hk.Flatten(preserve_dims=-len(EVENT)),
            hk.nets.MLP([48, 48], activate_final=True),
            hk.Linear(int(np.prod(EVENT)) * (3 * BINS + 1), w_init=hk.initializers.RandomNormal(0.1)),
            hk.Reshape((*EVENT, 3 * BINS + 1), preserve_dims=-1),
        ]
    )


def flow_model():
    mask = jnp.reshape(jnp.arange(0, np.prod(EVENT)) % 2, EVENT).astype(bool)
    layers = []
    for _ in range(LAYERS):
        spline = lambda params: distrax.RationalQuadraticSpline(params, range_min=0.0, range_max=1.0)  # noqa: E731
        layers.append(distrax.MaskedCoupling(mask, bijector=spline, conditioner=conditioner()))
        mask = jnp.logical_not(mask)
    flow = distrax.Inverse(distrax.Chain(layers))
    base = distrax.Independent(distrax.Uniform(jnp.zeros(EVENT), jnp.ones(EVENT)), len(EVENT))
    return distrax.Transformed(base, flow)


def build() -> Built:
    log_prob = hk.without_apply_rng(hk.transform(lambda data: flow_model().log_prob(data)))
    data = jax.random.uniform(jax.random.key(0), (BATCH, *EVENT))

    def loss_fn(params, batch):
        return -jnp.mean(log_prob.apply(params, batch))

    return Built(loss_fn, (log_prob.init(jax.random.PRNGKey(1), data), data), rtol=1e-3)
