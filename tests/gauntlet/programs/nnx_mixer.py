"""Flax NNX: an MLP mixer with dropout and batch normalisation, split and merged as in its functional API."""

import jax
import optax
from flax import nnx

from gauntlet import Built

PATCHES, WIDTH, BATCH, LAYERS = 32, 48, 16, 3


class Mixer(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.tokens1, self.tokens2 = nnx.Linear(PATCHES, 64, rngs=rngs), nnx.Linear(64, PATCHES, rngs=rngs)
        self.channels1, self.channels2 = nnx.Linear(WIDTH, 96, rngs=rngs), nnx.Linear(96, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        y = self.norm1(x).swapaxes(1, 2)
        x = x + self.dropout(self.tokens2(nnx.gelu(self.tokens1(y)))).swapaxes(1, 2)
        return x + self.dropout(self.channels2(nnx.gelu(self.channels1(self.norm2(x)))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(16, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Mixer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def build() -> Built:
    graphdef, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    x = jax.random.normal(jax.random.key(1), (BATCH, PATCHES, 16))
    y = jax.random.randint(jax.random.key(2), (BATCH,), 0, 10)

    def loss_fn(params, rest, x, y):
        model = nnx.merge(graphdef, params, rest, copy=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    return Built(loss_fn, (params, rest, x, y), has_aux=True)
