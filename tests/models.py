"""Networks in pure JAX, built at any size, with a hook to rematerialise them by hand.

Every builder returns `(loss, init)`: `init(key)` makes the loss's arguments, parameters first, so that
`jax.eval_shape(init, key)` gives them without allocating anything. `wrap` is applied to each run of `every` blocks:
`wrap=jax.checkpoint` is what a careful user writes today, and what a plan has to beat. With `every=(8, 1)` each block
is wrapped, and each run of eight again round them. Blocks are unrolled; with `scan=jax.lax.scan`, or what is called
like it, those that are alike are scanned instead, their weights stacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

Array = jax.Array
Block = tuple[Callable[[Any, Any], Any], Any]
Built = tuple[Callable[..., Array], Callable[[Array], tuple[Any, ...]]]
Wrap = Callable[[Callable], Callable]
Every = int | tuple[int, ...]
Scan = Callable[..., Any]


def unwrapped(fun: Callable) -> Callable:
    """The wrapper that does nothing."""
    return fun


def run_blocks(blocks: Sequence[Block], x: Any, wrap: Wrap, every: Every) -> Any:
    """Apply blocks in order, each run of `every` of them as one wrapped function of (parameters, activations)."""
    size, *inner = every if isinstance(every, tuple) else (every,)
    for start in range(0, len(blocks), size):
        functions, params = zip(*blocks[start : start + size], strict=True)

        def run(params, x, functions=functions):
            parts = list(zip(functions, params, strict=True))
            if inner:
                return run_blocks(parts, x, wrap, tuple(inner))
            for function, p in parts:
                x = function(p, x)
            return x

        x = wrap(run)(params, x)
    return x


def stacked(blocks: Sequence[Any]) -> Any:
    """The parameters of blocks that are alike as one tree, its arrays stacked for a scan."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)


def normal(key: Array, *shape: int) -> Array:
    """A weight of which the last axis is the output; outputs have the variance of the inputs."""
    return random.normal(key, shape) / math.sqrt(math.prod(shape[:-1]))


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean of -log p(label)."""
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], axis=-1))


def layer_norm(p: dict[str, Array], x: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def norm_params(width: int) -> dict[str, Array]:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def chain(layers: int, batch: int, width: int, wrap: Wrap = unwrapped, every: Every = 1) -> Built:
    """The paper's chain: x = tanh(x @ w), each layer with a weight of its own."""

    def init(key):
        keys = random.split(key, layers + 1)
        return [normal(k, width, width) for k in keys[1:]], random.normal(keys[0], (batch, width))

    def loss(ws, x):
        return jnp.sum(run_blocks([(lambda w, x: jnp.tanh(x @ w), w) for w in ws], x, wrap, every) ** 2)

    return loss, init


def mlp(layers: int, batch: int, width: int, wrap: Wrap = unwrapped, every: Every = 1) -> Built:
    """Residual layers x = x + gelu(x @ w)."""

    def init(key):
        keys = random.split(key, layers + 1)
        return [normal(k, width, width) / 2 for k in keys[1:]], random.normal(keys[0], (batch, width))

    def loss(ws, x):
        return jnp.mean(run_blocks([(lambda w, x: x + jax.nn.gelu(x @ w), w) for w in ws], x, wrap, every) ** 2)

    return loss, init


def transformer_params(key: Array, width: int) -> dict[str, Any]:
    k = random.split(key, 4)
    return {
        "norm1": norm_params(width),
        "qkv": normal(k[0], width, 3 * width),
        "proj": normal(k[1], width, width),
        "norm2": norm_params(width),
        "up": normal(k[2], width, 4 * width),
        "down": normal(k[3], 4 * width, width),
    }


def transformer_block(heads: int, is_causal: bool) -> Callable[[Any, Array], Array]:
    """A pre-LN block: x + attention(norm(x)), then x + mlp(norm(x)); attention materialises its scores."""

    def block(p, x):
        batch, length, width = x.shape
        qkv = (layer_norm(p["norm1"], x) @ p["qkv"]).reshape(batch, length, 3, heads, width // heads)
        q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
        if is_causal:
            scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
        mixed = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(batch, length, width)
        x = x + mixed @ p["proj"]
        return x + jax.nn.gelu(layer_norm(p["norm2"], x) @ p["up"]) @ p["down"]

    return block


def transformer_blocks(block: Callable, params: Any, x: Array, wrap: Wrap, every: Every, scan: Scan | None) -> Array:
    """Blocks that are alike, in a row or scanned."""
    if scan is None:
        return run_blocks([(block, p) for p in params], x, wrap, every)
    return scan(lambda x, p: (wrap(block)(p, x), None), x, params)[0]


def gpt(
    layers: int,
    batch: int,
    length: int,
    width: int,
    heads: int,
    vocab: int,
    wrap: Wrap = unwrapped,
    every: Every = 1,
    scan: Scan | None = None,
) -> Built:
    """A decoder of pre-LN blocks with tied embeddings; the loss predicts each next token."""

    def init(key):
        k = random.split(key, layers + 3)
        params = {
            "embed": random.normal(k[0], (vocab, width)) * 0.1,
            "position": random.normal(k[1], (length, width)) * 0.1,
            "blocks": [transformer_params(key, width) for key in k[3:]],
            "norm": norm_params(width),
        }
        params |= {"blocks": stacked(params["blocks"])} if scan else {}
        return params, random.randint(k[2], (batch, length + 1), 0, vocab)

    def loss(params, tokens):
        block = transformer_block(heads, is_causal=True)
        x = params["embed"][tokens[:, :-1]] + params["position"]
        x = transformer_blocks(block, params["blocks"], x, wrap, every, scan)
        return cross_entropy(layer_norm(params["norm"], x) @ params["embed"].T, tokens[:, 1:])

    return loss, init


def vit(
    layers: int,
    batch: int,
    size: int,
    patch: int,
    width: int,
    heads: int,
    classes: int,
    wrap: Wrap = unwrapped,
    every: Every = 1,
    scan: Scan | None = None,
) -> Built:
    """A vision transformer on `size` x `size` images, mean-pooled."""
    n_patches = (size // patch) ** 2

    def init(key):
        k = random.split(key, layers + 5)
        params = {
            "patch": normal(k[0], patch, patch, 3, width),
            "position": random.normal(k[1], (n_patches, width)) * 0.1,
            "blocks": [transformer_params(key, width) for key in k[5:]],
            "norm": norm_params(width),
            "head": normal(k[2], width, classes),
        }
        params |= {"blocks": stacked(params["blocks"])} if scan else {}
        return params, random.normal(k[3], (batch, size, size, 3)), random.randint(k[4], (batch,), 0, classes)

    def loss(params, images, labels):
        block = transformer_block(heads, is_causal=False)
        x = conv(params["patch"], images, patch).reshape(images.shape[0], n_patches, width) + params["position"]
        x = transformer_blocks(block, params["blocks"], x, wrap, every, scan)
        return cross_entropy(layer_norm(params["norm"], x).mean(1) @ params["head"], labels)

    return loss, init


def conv(w: Array, x: Array, stride: int = 1) -> Array:
    """A convolution of f32[batch, height, width, channels], padded to keep its size."""
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(p: dict[str, Array], x: Array) -> Array:
    """Batch normalisation in training: by the statistics of the batch."""
    mean = x.mean((0, 1, 2))
    variance = jnp.maximum(jnp.mean(x**2, (0, 1, 2)) - mean**2, 0)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def bottleneck(stride: int) -> Callable[[Any, Array], Array]:
    """A pre-activation bottleneck (He et al. 2016, *Identity mappings*): three times bn, relu, convolution."""

    def block(p, x):
        y = jax.nn.relu(batch_norm(p["norm1"], x))
        x = conv(p["shortcut"], y, stride) if "shortcut" in p else x
        y = jax.nn.relu(batch_norm(p["norm2"], conv(p["conv1"], y)))
        y = jax.nn.relu(batch_norm(p["norm3"], conv(p["conv2"], y, stride)))
        return x + conv(p["conv3"], y)

    return block


def bottleneck_params(key: Array, n_in: int, width: int, stride: int) -> dict[str, Any]:
    k = random.split(key, 4)
    params = {
        "norm1": norm_params(n_in),
        "conv1": normal(k[0], 1, 1, n_in, width),
        "norm2": norm_params(width),
        "conv2": normal(k[1], 3, 3, width, width),
        "norm3": norm_params(width),
        "conv3": normal(k[2], 1, 1, width, 4 * width),
    }
    if stride != 1 or n_in != 4 * width:
        params["shortcut"] = normal(k[3], 1, 1, n_in, 4 * width)
    return params


def resnet(
    depths: tuple[int, ...], batch: int, size: int, width: int, classes: int, wrap: Wrap = unwrapped, every: Every = 1
) -> Built:
    """A residual network of bottlenecks with batch normalisation; depths (3, 4, 6, 3) and width 64 is ResNet-50."""
    strides = [2 if b == 0 and stage else 1 for stage, depth in enumerate(depths) for b in range(depth)]
    widths = [width << stage for stage, depth in enumerate(depths) for _ in range(depth)]

    def init(key):
        k = random.split(key, len(strides) + 4)
        n_ins = [width] + [4 * w for w in widths]
        params = {
            "stem": normal(k[0], 7, 7, 3, width),
            "blocks": [bottleneck_params(*args) for args in zip(k[4:], n_ins[:-1], widths, strides, strict=True)],
            "norm": norm_params(n_ins[-1]),
            "head": normal(k[1], n_ins[-1], classes),
        }
        return params, random.normal(k[2], (batch, size, size, 3)), random.randint(k[3], (batch,), 0, classes)

    def loss(params, images, labels):
        x = conv(params["stem"], images, 2)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        blocks = [(bottleneck(s), p) for s, p in zip(strides, params["blocks"], strict=True)]
        x = jax.nn.relu(batch_norm(params["norm"], run_blocks(blocks, x, wrap, every)))
        return cross_entropy(x.mean((1, 2)) @ params["head"], labels)

    return loss, init


def unet(levels: int, batch: int, size: int, width: int, wrap: Wrap = unwrapped, every: Every = 1) -> Built:
    """A U-Net: every level's features skip over all that is below it; the loss is the error of denoising."""
    downs = [width << level for level in range(levels)]

    def double(key, n_in, n_out):
        k = random.split(key)
        return {
            "conv1": normal(k[0], 3, 3, n_in, n_out),
            "norm1": norm_params(n_out),
            "conv2": normal(k[1], 3, 3, n_out, n_out),
            "norm2": norm_params(n_out),
        }

    def init(key):
        k = random.split(key, 2 * levels + 2)
        params = {
            "down": [double(k[i], n_in, n) for i, (n_in, n) in enumerate(zip([3, *downs], downs, strict=False))],
            "up": [double(k[levels + i], 3 * n, n) for i, n in enumerate(downs[:-1])],
            "out": normal(k[-1], 1, 1, width, 3),
        }
        return params, random.normal(k[-2], (batch, size, size, 3))

    def double_block(p, x):
        x = jax.nn.relu(batch_norm(p["norm1"], conv(p["conv1"], x)))
        return jax.nn.relu(batch_norm(p["norm2"], conv(p["conv2"], x)))

    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")

    def first(p, carry):
        return double_block(p, carry[0]), ()

    def down(p, carry):
        x, skips = carry
        return double_block(p, pool(x)), (*skips, x)

    def up(p, carry):
        x, (*skips, skip) = carry
        return double_block(p, jnp.concatenate([skip, x.repeat(2, 1).repeat(2, 2)], -1)), tuple(skips)

    def loss(params, images):
        kinds = [first, *(down,) * (levels - 1), *(up,) * (levels - 1)]
        blocks = list(zip(kinds, [*params["down"], *params["up"][::-1]], strict=True))
        x, _ = run_blocks(blocks, (images, ()), wrap, every)
        return jnp.mean((conv(params["out"], x) - jnp.tanh(images)) ** 2)

    return loss, init


def lstm(
    layers: int,
    steps: int,
    batch: int,
    n_in: int,
    width: int,
    classes: int,
    wrap: Wrap = unwrapped,
    every: Every = 1,
    scan: Scan | None = None,
    has_two: bool = False,
) -> Built:
    """The paper's LSTM (§5.3), unrolled over time or scanned: all steps share their weights; a loss at each step.

    With `has_two` a cell has a matrix for its input and one for its state, else one for both.
    """

    def init(key):
        k = random.split(key, layers + 3)
        n_ins = [n_in] + [width] * (layers - 1)
        params = {
            "cells": [{"w": normal(key, n + width, 4 * width), "b": jnp.zeros(4 * width)}
                      for key, n in zip(k[3:], n_ins, strict=True)],
            "head": normal(k[0], width, classes),
        }  # fmt: skip
        if has_two:
            for p, key, n in zip(params["cells"], k[3:], n_ins, strict=True):
                p.update(w=normal(key, n, 4 * width), u=normal(random.fold_in(key, 1), width, 4 * width))
        return params, random.normal(k[1], (steps, batch, n_in)), random.randint(k[2], (steps, batch), 0, classes)

    def cell(p, state, x):
        h, c = state
        mixed = x @ p["w"] + h @ p["u"] if has_two else jnp.concatenate([x, h], -1) @ p["w"]
        i, f, g, o = jnp.split(mixed + p["b"], 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def step(args, carry):
        (params, x, labels), (states, total) = args, carry
        new = []
        for p, state in zip(params["cells"], states, strict=True):
            new.append(cell(p, state, x))
            x = new[-1][0]
        return tuple(new), total + cross_entropy(x @ params["head"], labels) / steps

    def loss(params, inputs, labels):
        zero = jnp.zeros((batch, width))
        carry = (((zero, zero),) * layers, jnp.zeros(()))
        if scan is not None:
            return scan(lambda carry, at: (step((params, *at), carry), None), carry, (inputs, labels))[0][1]
        blocks = [(step, (params, inputs[t], labels[t])) for t in range(steps)]
        return run_blocks(blocks, carry, wrap, every)[1]

    return loss, init
