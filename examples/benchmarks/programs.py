"""Programs on which planning is timed that no rule of ours was written on, beside the zoo's networks.

Each builder returns `(loss, init)` and takes `is_quick` for a toy size. They differ in what makes planning slow: many
alike layers, layers that share weights, loops, loops around small bodies, concatenations that many layers read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

sys.path.append(str(Path(__file__).parents[2] / "tests"))

import models
import zoo
from models import Built, conv, cross_entropy, layer_norm, norm_params, normal, stacked, transformer_block

Builder = Callable[[bool], Built]


def decoder(is_quick: bool, scan: Any = None) -> Built:
    """A decoder of 12 layers, its loss over a vocabulary."""
    layers, width, vocab = (3, 32, 64) if is_quick else (12, 256, 4096)
    return models.gpt(layers, 4, 16 if is_quick else 256, width, 4, vocab, scan=scan)


def dilated(is_quick: bool) -> Built:
    """Gated convolutions over time, dilated 1, 2, 4, ... twice over (WaveNet)."""
    width, length, layers = (8, 64, 4) if is_quick else (64, 2048, 16)

    def init(key: Any) -> Any:
        k = random.split(key, layers + 2)
        blocks = [{"in": normal(k[i], 2, width, 2 * width), "out": normal(k[i], width, 2 * width)}
                  for i in range(layers)]  # fmt: skip
        return {"blocks": blocks, "head": normal(k[-2], width, 1)}, random.normal(k[-1], (4, length, width))

    def loss(params: Any, x: Any) -> Any:
        total = jnp.zeros_like(x)
        for i, p in enumerate(params["blocks"]):
            dilation = 2 ** (i % 8)
            y = lax.conv_general_dilated(x, p["in"], (1,), [(dilation, 0)], rhs_dilation=(dilation,),
                                         dimension_numbers=("NWC", "WIO", "NWC"))  # fmt: skip
            a, b = jnp.split(y, 2, -1)
            a, b = jnp.split((jnp.tanh(a) * jax.nn.sigmoid(b)) @ p["out"], 2, -1)
            x, total = x + a, total + b
        return jnp.mean((jax.nn.relu(total) @ params["head"]) ** 2)

    return loss, init


def shared(is_quick: bool) -> Built:
    """Sixteen transformer blocks with the same weights (ALBERT)."""
    width, length, layers = (32, 16, 3) if is_quick else (256, 256, 16)

    def init(key: Any) -> Any:
        k = random.split(key, 2)
        return models.transformer_params(k[0], width), random.normal(k[1], (4, length, width))

    def loss(params: Any, x: Any) -> Any:
        block = transformer_block(4, is_causal=False)
        for _ in range(layers):
            x = block(params, x)
        return jnp.mean(x**2)

    return loss, init


def runge_kutta(is_quick: bool) -> Built:
    """A neural differential equation: fourth-order Runge-Kutta steps in a loop."""
    width, batch, steps = (16, 32, 8) if is_quick else (128, 512, 64)

    def init(key: Any) -> Any:
        k = random.split(key, 3)
        return {"a": normal(k[0], width, 2 * width), "b": normal(k[1], 2 * width, width)}, random.normal(
            k[2], (batch, width)
        )

    def loss(params: Any, x: Any) -> Any:
        def f(x: Any) -> Any:
            return jnp.tanh(x @ params["a"]) @ params["b"]

        def step(x: Any, _: Any) -> Any:
            h = 1.0 / steps
            k1 = f(x)
            k2 = f(x + h / 2 * k1)
            k3 = f(x + h / 2 * k2)
            k4 = f(x + h * k3)
            return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        return jnp.mean(lax.scan(step, x, length=steps)[0] ** 2)

    return loss, init


def experts(is_quick: bool) -> Built:
    """Layers in a loop whose MLPs are a mixture of experts: all computed, two of eight weighed."""
    width, length, layers, n = (16, 16, 3, 4) if is_quick else (128, 512, 8, 8)

    def init(key: Any) -> Any:
        def layer(key: Any) -> Any:
            k = random.split(key, 4)
            return {
                "norm": norm_params(width),
                "gate": normal(k[0], width, n),
                "up": jnp.stack([normal(k, width, 2 * width) for k in random.split(k[1], n)]),
                "down": jnp.stack([normal(k, 2 * width, width) for k in random.split(k[2], n)]),
            }

        return stacked([layer(k) for k in random.split(key, layers)]), random.normal(key, (length, width))

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            y = layer_norm(p["norm"], x)
            gates, chosen = lax.top_k(jax.nn.softmax(y @ p["gate"]), 2)
            weights = jnp.sum(jax.nn.one_hot(chosen, n) * gates[..., None], 1)
            made = jnp.einsum("neh,ehd->ned", jax.nn.gelu(jnp.einsum("nd,edh->neh", y, p["up"])), p["down"])
            return x + jnp.einsum("ned,ne->nd", made, weights), None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    return loss, init


def mixer(is_quick: bool) -> Built:
    """Products over tokens, then over channels (MLP-Mixer)."""
    width, tokens, layers = (16, 16, 3) if is_quick else (256, 196, 8)

    def init(key: Any) -> Any:
        def layer(key: Any) -> Any:
            k = random.split(key, 4)
            return {
                "norm1": norm_params(width), "norm2": norm_params(width),
                "t1": normal(k[0], tokens, 2 * tokens), "t2": normal(k[1], 2 * tokens, tokens),
                "c1": normal(k[2], width, 4 * width), "c2": normal(k[3], 4 * width, width),
            }  # fmt: skip

        k = random.split(key, layers + 3)
        params = {"layers": [layer(k) for k in k[3:]], "head": normal(k[0], width, 10)}
        return params, random.normal(k[1], (8, tokens, width)), random.randint(k[2], (8,), 0, 10)

    def loss(params: Any, x: Any, labels: Any) -> Any:
        for p in params["layers"]:
            y = layer_norm(p["norm1"], x).swapaxes(1, 2)
            x = x + (jax.nn.gelu(y @ p["t1"]) @ p["t2"]).swapaxes(1, 2)
            x = x + jax.nn.gelu(layer_norm(p["norm2"], x) @ p["c1"]) @ p["c2"]
        return cross_entropy(x.mean(1) @ params["head"], labels)

    return loss, init


def concatenating(is_quick: bool) -> Built:
    """Convolutions that each read all that came before, concatenated (DenseNet)."""
    growth, size, layers = (4, 8, 4) if is_quick else (12, 32, 24)

    def init(key: Any) -> Any:
        k = random.split(key, layers + 3)
        layer = [{"norm": norm_params(growth * (i + 2)), "w": normal(k[i], 3, 3, growth * (i + 2), growth)}
                 for i in range(layers)]  # fmt: skip
        params = {"first": normal(k[-1], 3, 3, 3, 2 * growth), "layers": layer}
        params["head"] = normal(k[-2], growth * (layers + 2), 10)
        return params, random.normal(k[-3], (16, size, size, 3)), random.randint(k[-3], (16,), 0, 10)

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = conv(params["first"], images)
        for p in params["layers"]:
            made = conv(p["w"], jax.nn.relu(models.batch_norm(p["norm"], x)))
            x = jnp.concatenate([x, made], -1)
        return cross_entropy(x.mean((1, 2)) @ params["head"], labels)

    return loss, init


def small_unet(is_quick: bool) -> Built:
    """A small U-Net."""
    return models.unet(2 if is_quick else 4, 4, 16 if is_quick else 64, 4 if is_quick else 16)


ZOO: dict[str, dict[str, Any]] = {
    "chain": {"layers": 32, "batch": 4096, "width": 256},
    "mlp": {"layers": 24, "batch": 1024, "width": 256},
    "gpt": {"layers": 4, "batch": 4, "length": 256, "width": 384, "heads": 6, "vocab": 4096},
    "resnet": {"depths": (3, 4, 6, 3), "batch": 8, "size": 64, "width": 16, "classes": 100},
    "unet": {"levels": 4, "batch": 8, "size": 64, "width": 16},
    "vit": {"layers": 6, "batch": 16, "size": 112, "patch": 8, "width": 192, "heads": 3, "classes": 100},
    "lstm": {"layers": 2, "steps": 16, "batch": 64, "n_in": 50, "width": 256, "classes": 1000},
}
"""The zoo's networks at sizes whose activations hold the memory and whose compile takes seconds."""


def of_the_zoo(name: str, is_quick: bool) -> Built:
    """A network of the zoo."""
    model = zoo.BY_NAME[name]
    built: Built = model.build(**(model.toy_size if is_quick else ZOO[name]))
    return built


PROGRAMS: dict[str, Builder] = {
    "decoder": decoder,
    "decoder_scan": partial(decoder, scan=lax.scan),
    "dilated": dilated,
    "shared": shared,
    "runge_kutta": runge_kutta,
    "small_unet": small_unet,
    "experts": experts,
    "mixer": mixer,
    "concatenating": concatenating,
    **{name: partial(of_the_zoo, name) for name in ZOO},
}
