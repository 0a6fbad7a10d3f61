"""The networks that peers are compared on, at the batch and resolution that their papers used.

Checkmate (Jain et al., MLSys 2020): VGG-19, MobileNet and U-Net. MONeT (Shah et al., ICLR 2021): ResNet-50 with a batch
of 184. OGC (Feng and Huang, CVPR 2021): ResNet-152 and DenseNet-201 with a batch of 16. Beside them GPT-2, ViT-B, the
thousand-layer ResNet and the unrolled LSTM of Chen et al. 2016. Every builder takes `wrap` and `every`, which stand
round its blocks, and returns `(loss, init)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

sys.path.append(str(Path(__file__).parents[2] / "tests"))

import models
from models import Built, Every, Wrap, batch_norm, conv, cross_entropy, norm_params, normal, run_blocks


@dataclass(frozen=True, slots=True)
class Network:
    """A network at a size.

    Attributes:
        name: Its name in results.
        build: Returns `(loss, init)` from sizes, `wrap` and `every`.
        n_blocks: How many blocks `wrap` may go round.
        size: Sizes.
        is_convolutional: Whether its costly operations are convolutions.
        is_scannable: Whether its blocks are alike, so that `build` takes a `scan`.
        dtype: Of parameters and activations.
    """

    name: str
    build: Callable[..., Built]
    n_blocks: int
    size: Mapping[str, Any] = field(default_factory=dict)
    is_convolutional: bool = False
    is_scannable: bool = False
    dtype: Any = jnp.float32

    def resized(self, **size: Any) -> Network:
        """The same network with other sizes, such as another batch."""
        return replace(self, size={**self.size, **size})

    def shapes(self, **by_hand: Any) -> tuple[Callable, tuple[Any, ...]]:
        """Its loss, and the shapes of its arguments; nothing is allocated."""
        loss, init = self.build(**self.size, **by_hand)
        cast = jax.tree.map(self._cast, jax.eval_shape(init, random.key(0)))
        return loss, cast

    def _cast(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, self.dtype if is_float else leaf.dtype)


def max_pool(x: jax.Array, window: int, stride: int) -> jax.Array:
    """The largest of each window, per channel."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), "SAME")


def classifier(blocks_of: Callable, head_of: Callable, batch: int, size: int, classes: int) -> Callable:
    """`init` of a network for images: its parameters, images and labels."""

    def init(key: jax.Array) -> tuple[Any, ...]:
        k = random.split(key, 4)
        images = random.normal(k[2], (batch, size, size, 3))
        params = {"blocks": blocks_of(k[0]), "head": head_of(k[1])}
        return params, images, random.randint(k[3], (batch,), 0, classes)

    return init


def vgg19(
    batch: int, size: int = 224, width: int = 64, classes: int = 1000, wrap: Wrap = models.unwrapped, every: Every = 1
) -> Built:
    """VGG-19 (Simonyan and Zisserman 2015): 16 convolutions, five poolings, three dense layers."""
    counts, widths = (2, 2, 4, 4, 4), [width * m for m in (1, 2, 4, 8, 8)]
    outs = [n for n, count in zip(widths, counts, strict=True) for _ in range(count)]
    pools = [i == count - 1 for count in counts for i in range(count)]
    flat, dense = (size // 32) ** 2 * widths[-1], 64 * width

    def blocks_of(key: jax.Array) -> list[Any]:
        keys = random.split(key, len(outs))
        return [normal(k, 3, 3, a, b) for k, a, b in zip(keys, [3, *outs], outs, strict=False)]

    def head_of(key: jax.Array) -> list[Any]:
        sizes = [flat, dense, dense, classes]
        return [normal(k, a, b) for k, a, b in zip(random.split(key, 3), sizes, sizes[1:], strict=False)]

    def block(is_last: bool) -> Callable:
        def run(w: jax.Array, x: jax.Array) -> jax.Array:
            x = jax.nn.relu(conv(w, x))
            return max_pool(x, 2, 2) if is_last else x

        return run

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        blocks = [(block(p), w) for p, w in zip(pools, params["blocks"], strict=True)]
        x = run_blocks(blocks, images, wrap, every).reshape(batch, flat)
        first, second, last = params["head"]
        x = jax.nn.relu(jax.nn.relu(x @ first) @ second)
        return cross_entropy(x @ last, labels)

    return loss, classifier(blocks_of, head_of, batch, size, classes)


def mobilenet(
    batch: int, size: int = 224, width: int = 32, classes: int = 1000, wrap: Wrap = models.unwrapped, every: Every = 1
) -> Built:
    """MobileNet (Howard et al. 2017): 13 blocks of a depthwise and a pointwise convolution."""
    outs = [width * m for m in (2, 4, 4, 8, 8, 16, 16, 16, 16, 16, 16, 32, 32)]
    strides = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1]
    ins = [width, *outs[:-1]]

    def blocks_of(key: jax.Array) -> list[Any]:
        keys = random.split(key, len(outs) + 1)
        blocks = [{
            "deep": normal(k, 3, 3, 1, a),
            "norm1": norm_params(a),
            "point": normal(k, 1, 1, a, b),
            "norm2": norm_params(b),
        } for k, a, b in zip(keys[1:], ins, outs, strict=True)]  # fmt: skip
        return [{"conv": normal(keys[0], 3, 3, 3, width), "norm": norm_params(width)}, *blocks]

    def block(stride: int) -> Callable:
        def run(p: Any, x: jax.Array) -> jax.Array:
            layout = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(
                x, p["deep"], (stride, stride), "SAME", dimension_numbers=layout, feature_group_count=x.shape[-1]
            )
            x = jax.nn.relu(batch_norm(p["norm1"], x))
            return jax.nn.relu(batch_norm(p["norm2"], conv(p["point"], x)))

        return run

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        stem, *rest = params["blocks"]
        x = jax.nn.relu(batch_norm(stem["norm"], conv(stem["conv"], images, 2)))
        x = run_blocks([(block(s), p) for s, p in zip(strides, rest, strict=True)], x, wrap, every)
        return cross_entropy(x.mean((1, 2)) @ params["head"], labels)

    return loss, classifier(blocks_of, lambda key: normal(key, outs[-1], classes), batch, size, classes)


def densenet(
    depths: tuple[int, ...],
    batch: int,
    size: int = 224,
    growth: int = 32,
    classes: int = 1000,
    wrap: Wrap = models.unwrapped,
    every: Every = 1,
) -> Built:
    """DenseNet (Huang et al. 2017): every layer reads all before it; (6, 12, 48, 32) is DenseNet-201."""
    plan: list[tuple[str, int]] = []
    width = 2 * growth
    for group, depth in enumerate(depths):
        if group:
            plan.append(("transition", width))
            width //= 2
        for _ in range(depth):
            plan.append(("layer", width))
            width += growth
    last = width

    def params_of(kind: str, n: int, key: jax.Array) -> dict[str, Any]:
        if kind == "transition":
            return {"norm": norm_params(n), "conv": normal(key, 1, 1, n, n // 2)}
        return {
            "norm1": norm_params(n),
            "conv1": normal(key, 1, 1, n, 4 * growth),
            "norm2": norm_params(4 * growth),
            "conv2": normal(key, 3, 3, 4 * growth, growth),
        }

    def blocks_of(key: jax.Array) -> list[Any]:
        keys = random.split(key, len(plan) + 1)
        blocks = [params_of(kind, n, k) for (kind, n), k in zip(plan, keys[1:], strict=True)]
        return [{"conv": normal(keys[0], 7, 7, 3, 2 * growth)}, *blocks]

    def layer(p: Any, x: jax.Array) -> jax.Array:
        y = conv(p["conv1"], jax.nn.relu(batch_norm(p["norm1"], x)))
        return jnp.concatenate([x, conv(p["conv2"], jax.nn.relu(batch_norm(p["norm2"], y)))], -1)

    def transition(p: Any, x: jax.Array) -> jax.Array:
        x = conv(p["conv"], jax.nn.relu(batch_norm(p["norm"], x)))
        return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") / 4

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        stem, *rest = params["blocks"]
        x = max_pool(conv(stem["conv"], images, 2), 3, 2)
        blocks = [(layer if kind == "layer" else transition, p) for (kind, _), p in zip(plan, rest, strict=True)]
        x = run_blocks(blocks, x, wrap, every)
        return cross_entropy(jax.nn.relu(x).mean((1, 2)) @ params["head"], labels)

    return loss, classifier(blocks_of, lambda key: normal(key, last, classes), batch, size, classes)


def _gpt2(name: str, layers: int, width: int, heads: int) -> Network:
    size = dict(layers=layers, batch=8, length=1024, width=width, heads=heads, vocab=50257)
    return Network(name, models.gpt, layers, size, is_scannable=True)


def _resnet(name: str, depths: tuple[int, ...], batch: int) -> Network:
    size = dict(depths=depths, batch=batch, size=224, width=64, classes=1000)
    return Network(name, models.resnet, sum(depths), size, is_convolutional=True)


VIT_B = dict(layers=12, batch=64, size=224, patch=16, width=768, heads=12, classes=1000)
LSTM = dict(layers=4, steps=32, batch=64, n_in=50, width=1024, classes=5000)
NETWORKS = (
    Network("mobilenet", mobilenet, 13, dict(batch=128), is_convolutional=True),
    Network("vgg-19", vgg19, 16, dict(batch=64), is_convolutional=True),
    Network("unet", models.unet, 9, dict(levels=5, batch=8, size=416, width=64), is_convolutional=True),
    Network("vit-b", models.vit, 12, VIT_B, is_scannable=True),
    _gpt2("gpt2-small", 12, 768, 12),
    _resnet("resnet-50", (3, 4, 6, 3), 184),
    Network("lstm", models.lstm, 32, LSTM, is_scannable=True),
    Network("densenet-201", densenet, 101, dict(depths=(6, 12, 48, 32), batch=16), is_convolutional=True),
    _gpt2("gpt2-medium", 24, 1024, 16),
    _resnet("resnet-152", (3, 8, 36, 3), 16),
    _resnet("resnet-1001", (63, 83, 124, 63), 16),
)
QUICK = (
    Network("gpt2-tiny", models.gpt, 4, dict(layers=4, batch=4, length=64, width=64, heads=4, vocab=128),
            is_scannable=True),
)  # fmt: skip
