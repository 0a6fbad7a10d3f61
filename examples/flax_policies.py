"""Three of Flax's example networks under policies and under a budget, and not a line of them edited.

A Linen ResNet-50, a Linen decoder like that of the lm1b example and an NNX decoder like Gemma. Each is trained plainly;
then with its blocks under a policy, put there from outside by `jaxsub.flax.policies`: by hand, as with `nn.remat`;
then with `jaxsub.sublinear` at the memory of the one that takes least. Losses agree; what changes is what the
compiler allocates, and how much is computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxsub
import jaxsub.flax

MIB = 2**20


@dataclass(frozen=True)
class Size:
    """How large the networks are: the ResNet's stages, filters and pixels a side; the decoders' layers and so on."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    filters: int = 16
    pixels: int = 64
    layers: int = 8
    dim: int = 128
    length: int = 128
    words: int = 512
    batch: int = 8
    steps: int = 20
    verify: bool = True


TOY = Size((2,), 4, 32, 2, 32, 16, 64, 8, 2, verify=False)


class BottleneckBlock(nn.Module):
    """Three convolutions with batch normalisation, added to what came in."""

    filters: int
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Map f32[batch, height, width, channels] to four times `filters` channels."""
        conv, norm = (
            partial(nn.Conv, use_bias=False),
            partial(nn.BatchNorm, use_running_average=not train, momentum=0.9),
        )
        y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(y)))
        y = norm(scale_init=nn.initializers.zeros_init())(conv(self.filters * 4, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="norm_proj")(conv(self.filters * 4, (1, 1), self.strides, name="conv_proj")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """The ResNet of Flax's ImageNet example; stages (3, 4, 6, 3) make ResNet-50."""

    stages: tuple[int, ...]
    filters: int
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Map images f32[batch, height, width, 3] to logits f32[batch, classes]."""
        x = nn.Conv(self.filters, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], use_bias=False, name="conv_init")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn_init")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, n_blocks in enumerate(self.stages):
            for j in range(n_blocks):
                x = BottleneckBlock(self.filters * 2**i, (2, 2) if i > 0 and j == 0 else (1, 1))(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class EncoderDecoder1DBlock(nn.Module):
    """Attention over what came before, then a feed-forward layer, each after layer normalisation and with dropout."""

    heads: int
    rate: float = 0.1

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:
        """Map f32[batch, length, dim] to the same shape."""
        y = nn.SelfAttention(self.heads, dropout_rate=self.rate, deterministic=deterministic)(nn.LayerNorm()(x), mask)
        x = x + nn.Dropout(self.rate, deterministic=deterministic)(y)
        y = nn.Dense(x.shape[-1])(nn.relu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.rate, deterministic=deterministic)(y)


class TransformerLM(nn.Module):
    """The decoder of Flax's lm1b example."""

    layers: int
    dim: int
    words: int
    heads: int = 4

    @nn.compact
    def __call__(self, words: jax.Array, deterministic: bool = False) -> jax.Array:
        """Map words i32[batch, length] to logits f32[batch, length, words]."""
        x = nn.Embed(self.words, self.dim)(words)
        x = x + self.param("positions", nn.initializers.normal(0.02), (words.shape[1], self.dim))
        mask = nn.make_causal_mask(words)
        for i in range(self.layers):
            x = EncoderDecoder1DBlock(self.heads, name=f"encoderdecoderblock_{i}")(x, mask, deterministic)
        return nn.Dense(self.words)(nn.LayerNorm()(x))


class GemmaBlock(nnx.Module):
    """Attention with one key and value head for all queries and rotated positions, then a gated feed-forward layer."""

    def __init__(self, dim: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.norm1, self.norm2 = nnx.RMSNorm(dim, rngs=rngs), nnx.RMSNorm(dim, rngs=rngs)
        self.q = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.kv = nnx.Linear(dim, 2 * dim // heads, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map f32[batch, length, dim] to the same shape."""
        y = self.norm1(x)
        k, v = jnp.split(self.kv(y)[:, :, None], 2, axis=-1)
        q = rotated(self.q(y).reshape(*x.shape[:2], self.heads, -1))
        y = jax.nn.dot_product_attention(q, rotated(k), v, is_causal=True)
        x = x + self.out(y.reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(nnx.gelu(self.gate(y)) * self.up(y))


def rotated(x: jax.Array) -> jax.Array:
    """Rotate pairs of f32[batch, length, heads, d] by angles that grow with the position."""
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Gemma(nnx.Module):
    """A decoder like Flax's Gemma example."""

    def __init__(self, layers: int, dim: int, words: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(words, dim, rngs=rngs)
        self.blocks = nnx.List([GemmaBlock(dim, 4, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(dim, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        """Map words i32[batch, length] to logits f32[batch, length, words]."""
        x = self.embed(words) * jnp.sqrt(self.embed.features)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


@dataclass(frozen=True)
class Task:
    """A network with data of the right shape: its loss is `(params, state, batch, key) -> (loss, state)`."""

    name: str
    block: str
    blocks: tuple[str, ...]
    params: Any
    state: Any
    batch: Any
    loss: Callable[..., Any]


def next_word_loss(logits: jax.Array, words: jax.Array) -> jax.Array:
    """Mean cross-entropy of each word given those before."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], words[:, 1:]).mean()


def resnet(size: Size) -> Task:
    """The ResNet, on random images."""
    rng, model = np.random.default_rng(0), ResNet(size.stages, size.filters)
    images = rng.normal(size=(size.batch, size.pixels, size.pixels, 3)).astype(np.float32)
    labels = rng.integers(0, 10, size.batch).astype(np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), images)

    def loss(params: Any, stats: Any, batch: Any, key: jax.Array) -> Any:
        logits, changed = model.apply({"params": params, "batch_stats": stats}, batch[0], mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean(), changed["batch_stats"]

    names = tuple(f"BottleneckBlock_{i}" for i in range(sum(size.stages)))
    return Task("Linen ResNet", "BottleneckBlock", names, variables["params"], variables["batch_stats"],
                (images, labels), loss)  # fmt: skip


def words_of(size: Size) -> np.ndarray:
    """Random words."""
    return np.random.default_rng(0).integers(0, size.words, (size.batch, size.length)).astype(np.int32)


def lm1b(size: Size) -> Task:
    """The lm1b decoder, on random words."""
    words, model = words_of(size), TransformerLM(size.layers, size.dim, size.words)
    params = jax.jit(partial(model.init, deterministic=True))(jax.random.key(0), words)["params"]

    def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        return next_word_loss(model.apply({"params": params}, batch, rngs={"dropout": key}), batch), state

    names = tuple(f"encoderdecoderblock_{i}" for i in range(size.layers))
    return Task("Linen decoder", "EncoderDecoder1DBlock", names, params, (), words, loss)


def gemma(size: Size) -> Task:
    """The Gemma-like decoder, on random words."""
    words = words_of(size)
    graphdef, params = nnx.split(Gemma(size.layers, size.dim, size.words, nnx.Rngs(0)))

    def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        return next_word_loss(nnx.merge(graphdef, params)(batch), batch), state

    names = tuple(f"blocks/{i}" for i in range(size.layers))
    return Task("NNX decoder", "GemmaBlock", names, params, (), words, loss)


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    temp_bytes: int
    flops: float
    losses: tuple[float, ...]


def run(task: Task, loss: Callable[..., Any], steps: int, policy: str | None = None) -> Result:
    """Train for some steps, the blocks under a policy if there is one."""
    key = jax.random.key(1)
    optimizer = optax.sgd(0.05, momentum=0.9)

    def step(params: Any, state: Any, opt_state: Any, key: jax.Array) -> Any:
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, task.batch, key)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), state, opt_state, value

    carry = task.params, task.state, optimizer.init(task.params)
    with jaxsub.flax.policies({task.block: policy}) if policy else nullcontext():
        compiled = jaxsub.jit(step).lower(*carry, key).compile()
    losses = []
    for i in range(steps):
        *carry, value = compiled(*carry, jax.random.fold_in(key, i))
        losses.append(float(value))
    flops = (compiled.cost_analysis() or {}).get("flops", float("nan"))
    return Result(compiled.memory_analysis().temp_size_in_bytes, flops, tuple(losses))


def compare(task: Task, size: Size) -> dict[str, Result]:
    """Train plainly, under each policy by hand, and under a budget of what the least of those takes."""
    results = {"plain": run(task, task.loss, size.steps)}
    for policy in ("save_costly", "save_nothing")[: len(size.stages)]:  # the toy has one stage: one policy will do
        results[f"each block {policy}"] = run(task, task.loss, size.steps, policy)
    budget = min(r.temp_bytes for r in results.values())
    if budget > 0.95 * results["plain"].temp_bytes:
        budget = int(0.7 * budget)  # no policy by hand saves anything
    try:
        loss = jaxsub.sublinear(task.loss, budget=budget, verify=size.verify)
        results[f"sublinear {budget / MIB:.2f} MiB"] = run(task, loss, size.steps)
    except jaxsub.InfeasibleBudgetError as error:
        print(f"{task.name}: {error}")
    return results


def main() -> None:
    """Compare the three networks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="tiny networks and two steps")
    size = TOY if parser.parse_args().toy else Size()
    jax.config.update("jax_disable_most_optimizations", size is TOY)  # it is compiled for longer than it runs
    print(__doc__, flush=True)
    for make in (resnet, lm1b, gemma):
        task = make(size)
        results = compare(task, size)
        plain = results["plain"]
        print(f"\n{task.name:<28} {'MiB':>9} {'memory':>8} {'FLOPs':>7} {'last loss':>10} {'largest difference':>19}")
        for name, r in results.items():
            far = max(abs(a - b) for a, b in zip(r.losses, plain.losses, strict=True))
            print(f"{name:<28} {r.temp_bytes / MIB:9.2f} {r.temp_bytes / plain.temp_bytes:8.3f} "
                  f"{r.flops / plain.flops:7.3f} {r.losses[-1]:10.5f} {far:19.1e}", flush=True)  # fmt: skip
            assert np.allclose(r.losses, plain.losses, rtol=2e-3), "a policy changed the losses"


if __name__ == "__main__":
    main()
