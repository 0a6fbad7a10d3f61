"""A decoder written with Equinox under a budget: the loss is wrapped, and nothing else changes.

The model is an argument of the loss, as Equinox has it: functions, rates and flags among its leaves are left alone,
`eqx.filter_value_and_grad` works as before, `jaxsub.equinox.filter_jit` is `eqx.filter_jit` on every device. Beside it
the usual way by hand: every block under `jaxsub.equinox.filter_checkpoint`, with a policy by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsub
from jaxsub.equinox import filter_checkpoint, filter_jit

MIB = 2**20


class Block(eqx.Module):
    """Attention over what came before, then a feed-forward layer, each after layer normalisation and with dropout."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    feed: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, dim: int, key: jax.Array):
        keys = jax.random.split(key, 2)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(dim), eqx.nn.LayerNorm(dim)
        self.attention = eqx.nn.MultiheadAttention(4, dim, key=keys[0])
        self.feed = eqx.nn.MLP(dim, dim, 4 * dim, 1, activation=jax.nn.gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        """Map f32[length, dim] to the same shape."""
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + self.dropout(jax.vmap(self.feed)(jax.vmap(self.norm2)(x)), key=key)


class Decoder(eqx.Module):
    """Words in, logits of the next words out."""

    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear
    policy: Any = eqx.field(static=True, default=None)

    def __init__(self, depth: int, dim: int, words: int, key: jax.Array, policy: Any = None):
        keys = jax.random.split(key, depth + 2)
        self.embed = eqx.nn.Embedding(words, dim, key=keys[0])
        self.blocks = [Block(dim, k) for k in keys[2:]]
        self.head = eqx.nn.Linear(dim, words, key=keys[1])
        self.policy = policy

    def __call__(self, words: jax.Array, key: jax.Array) -> jax.Array:
        """Map i32[length] to logits f32[length, words]."""
        x = jax.vmap(self.embed)(words)
        for i, block in enumerate(self.blocks):
            call = block if self.policy is None else filter_checkpoint(block, policy=self.policy)
            x = call(x, jax.random.fold_in(key, i))
        return jax.vmap(self.head)(x)


def loss(model: Decoder, words: jax.Array, key: jax.Array) -> jax.Array:
    """Mean cross-entropy of each word given those before; words i32[batch, length]."""
    logits = jax.vmap(model)(words, jax.random.split(key, len(words)))
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], words[:, 1:]).mean()


def train(loss: Callable[..., Any], model: Decoder, words: np.ndarray, steps: int) -> list[float]:
    """Train with Adam; return the losses."""
    optimizer = optax.adam(1e-3)
    state, losses = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), []

    @filter_jit
    def step(model: Decoder, state: Any, key: jax.Array) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model, words, key)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    for i in range(steps):
        model, state, value = step(model, state, jax.random.key(i))
        losses.append(float(value))
    return losses


def temp_bytes(loss: Callable[..., Any], model: Decoder, words: np.ndarray) -> int:
    """What the compiler allocates for the gradient beside arguments and outputs."""
    lowered = filter_jit(eqx.filter_value_and_grad(loss)).lower(model, words, jax.random.key(0))
    return lowered.compile().compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Train plainly, with every block under a policy, and under budgets; compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a small decoder and a few steps")
    is_toy = parser.parse_args().toy
    depth, dim, length, n_words, batch, steps = (2, 16, 16, 32, 4, 2) if is_toy else (8, 128, 128, 512, 8, 20)
    print(__doc__, flush=True)
    words = np.random.default_rng(0).integers(0, n_words, (batch, length)).astype(np.int32)
    model = Decoder(depth, dim, n_words, jax.random.key(0))
    by_hand = Decoder(depth, dim, n_words, jax.random.key(0), policy="save_costly")
    verify = not is_toy  # planning by prediction alone takes seconds
    jax.config.update("jax_disable_most_optimizations", is_toy)  # it is compiled for longer than it runs
    small = jaxsub.sublinear(loss, budget=temp_bytes(loss, by_hand, words), verify=verify)
    least = jaxsub.sublinear(loss, verify=verify)
    runs = {
        "plain": (loss, model),
        "each block save_costly": (loss, by_hand),
        "sublinear, as much": (small, model),
        "sublinear, least": (least, model),
    }
    if is_toy:
        del runs["sublinear, least"]
    print(f"{'':>24} {'MiB':>8} {'last loss':>10}")
    wanted: list[float] = []
    for name, (fun, network) in runs.items():
        losses = train(fun, network, words, steps)
        wanted = wanted or losses
        print(f"{name:>24} {temp_bytes(fun, network, words) / MIB:8.2f} {losses[-1]:10.6f}", flush=True)
        assert np.allclose(losses, wanted, rtol=1e-3), f"{name} changed the losses"


if __name__ == "__main__":
    main()
