"""The functions that tests are crossed with: networks at two sizes, and small functions with one difficulty each.

`NETWORKS` have a toy size, with real arguments, that compiles in a second or two, and a full size, as shapes, for
figures of memory: nothing of it is ever allocated. `TOYS` are small functions, each with something that a planner or
an emitter may stumble over. No loss is constant, and all arguments of a model come from a seed.

    loss, args = zoo.BY_NAME["gpt"].toy()
    loss, args = zoo.BY_NAME["gpt"].full(wrap=jax.checkpoint, every=2)     # by hand, to compare with
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import models
from jax import lax, random
from models import Built, normal


@dataclass(frozen=True, slots=True)
class Model:
    """A loss and its arguments, at a size.

    Attributes:
        name: What tests call it.
        build: Returns `(loss, init)` from sizes.
        toy_size: Sizes for tests.
        full_size: Sizes for figures; empty where there are none.
        has_aux: Whether the loss returns `(loss, auxiliary)`.
    """

    name: str
    build: Callable[..., Built]
    toy_size: Mapping[str, Any] = field(default_factory=dict)
    full_size: Mapping[str, Any] = field(default_factory=dict)
    has_aux: bool = False

    def toy(self, seed: int = 0, **by_hand: Any) -> tuple[Callable, tuple[Any, ...]]:
        """The loss and real arguments, parameters first; `by_hand` may hold `wrap` and `every`."""
        return self.build(**self.toy_size, **by_hand)[0], toy_args(self.name, seed)

    def full(self, **by_hand: Any) -> tuple[Callable, tuple[Any, ...]]:
        """The loss and the shapes of its arguments, at full size."""
        loss, init = self.build(**self.full_size, **by_hand)
        return loss, jax.eval_shape(init, random.key(0))

    def value_and_grad(self, loss: Callable) -> Callable:
        """What is trained with: value and gradient in the parameters."""
        return jax.value_and_grad(loss, has_aux=self.has_aux)

    def __str__(self) -> str:
        return self.name


NETWORKS = (
    Model("chain", models.chain, dict(layers=16, batch=256, width=32), dict(layers=64, batch=4096, width=256)),
    Model("mlp", models.mlp, dict(layers=12, batch=256, width=32), dict(layers=48, batch=1024, width=256)),
    Model(
        "gpt",
        models.gpt,
        dict(layers=4, batch=2, length=32, width=32, heads=4, vocab=64),
        dict(layers=12, batch=4, length=256, width=512, heads=8, vocab=4096),
    ),
    Model(
        "resnet",
        models.resnet,
        dict(depths=(2, 2), batch=8, size=32, width=8, classes=10),
        dict(depths=(3, 4, 6, 3), batch=32, size=224, width=64, classes=1000),
    ),
    Model(
        "unet",
        models.unet,
        dict(levels=3, batch=4, size=16, width=8),
        dict(levels=5, batch=8, size=128, width=32),
    ),
    Model(
        "vit",
        models.vit,
        dict(layers=4, batch=4, size=16, patch=4, width=32, heads=4, classes=10),
        dict(layers=12, batch=32, size=224, patch=16, width=384, heads=6, classes=1000),
    ),
    Model(
        "lstm",
        models.lstm,
        dict(layers=2, steps=8, batch=16, n_in=10, width=32, classes=20),
        dict(layers=4, steps=32, batch=64, n_in=50, width=1024, classes=5000),
    ),
)

GPT_16 = Model("gpt16", models.gpt, NETWORKS[2].toy_size, {**NETWORKS[2].full_size, "layers": 16})
RESNET_198 = Model(
    "resnet198", models.resnet, NETWORKS[3].toy_size, {**NETWORKS[3].full_size, "depths": (3, 24, 36, 3)}
)


def weights_and_input(key: jax.Array, layers: int = 8, batch: int = 128, width: int = 16) -> tuple[Any, jax.Array]:
    """Parameters `[w, ...]` and an input, what most toys take."""
    k = random.split(key, layers + 1)
    return [normal(key, width, width) for key in k[1:]], random.normal(k[0], (batch, width))


def layered(layer: Callable[[jax.Array, jax.Array, int], jax.Array]) -> Callable[[], Built]:
    """A model of eight layers `x = layer(w, x, index)` whose loss is the mean square of the last x."""

    def loss(ws, x):
        for index, w in enumerate(ws):
            x = layer(w, x, index)
        return jnp.mean(x**2)

    return lambda: (loss, weights_and_input)


def long_skips() -> Built:
    """Every layer's output is read again, in reverse order, after the last layer."""

    def loss(ws, x):
        made = [x]
        for w in ws:
            made.append(jnp.tanh(made[-1] @ w))
        total = jnp.zeros_like(x)
        for old in reversed(made):
            total = jnp.sin(total + old)
        return jnp.mean(total**2)

    return loss, weights_and_input


def reused() -> Built:
    """One value is read by every layer, and one weight too."""

    def loss(ws, x):
        first = y = jnp.tanh(x @ ws[0])
        for w in ws[1:]:
            y = jnp.tanh(y @ w) * first + x @ ws[0]
        return jnp.mean(y * first)

    return loss, weights_and_input


def branches() -> Built:
    """Two towers side by side that meet at the end: few cuts have few bytes crossing."""

    def loss(ws, x):
        left, right = jnp.sin(x), jnp.cos(x)
        for a, b in zip(ws[::2], ws[1::2], strict=True):
            left, right = jnp.tanh(left @ a), jax.nn.silu(right @ b)
        return jnp.mean((left - right) ** 2) + 0.1 * jnp.mean(left * right)

    return loss, weights_and_input


def integers() -> Built:
    """Integer inputs choose rows, and an integer value is computed and used late."""

    def init(key):
        ws, _ = weights_and_input(key)
        return {"table": normal(key, 32, 16), "ws": ws}, random.randint(key, (128,), 0, 32), jnp.int32(3)

    def loss(params, rows, shift):
        x, parity = params["table"][rows], (rows + shift) % 2
        for w in params["ws"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.where(parity[:, None] == 1, x, 2 * x) ** 2)

    return loss, init


def constants() -> Built:
    """Arrays closed over, Python scalars, and a constant that is made inside."""
    scale, offset = jnp.linspace(0.5, 1.5, 16), jnp.float32(0.1)

    def loss(ws, x):
        for w in ws:
            x = 1.5 * jnp.tanh(x @ w) * scale + offset
        return jnp.mean((x - jnp.arange(16.0)) ** 2)

    return loss, weights_and_input


@jax.custom_jvp
def smooth_abs(x: jax.Array) -> jax.Array:
    """|x|, with a smooth derivative, tanh(10 x): inlining it gives sign(x)."""
    return jnp.abs(x)


smooth_abs.defjvps(lambda t, ans, x: jnp.tanh(10 * x) * t)


@jax.custom_vjp
def scaled_gradient(x: jax.Array) -> jax.Array:
    """sin(x) with half its gradient: inlining it gives the whole."""
    return jnp.sin(x)


scaled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (0.5 * g * jnp.cos(x),))


def dropout() -> Built:
    """A typed key that is split in every layer."""

    def init(key):
        return *weights_and_input(key), key

    def loss(ws, x, key):
        for w in ws:
            key, sub = random.split(key)
            x = jnp.where(random.bernoulli(sub, 0.9, x.shape), jnp.tanh(x @ w) / 0.9, 0)
        return jnp.mean(x**2)

    return loss, init


def scan() -> Built:
    """A scan over stacked weights between two dense layers."""

    def init(key):
        ws, x = weights_and_input(key, layers=14)
        return {"first": ws[0], "stack": jnp.stack(ws[1:13]), "last": ws[13]}, x

    def loss(params, x):
        x = jnp.tanh(x @ params["first"])
        x, norms = lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.sum(x**2)), x, params["stack"])
        return jnp.mean((x @ params["last"]) ** 2) + 1e-3 * jnp.mean(norms)

    return loss, init


def conditional() -> Built:
    """A branch chosen by data in every layer."""

    def layer(w, x, _):
        return lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), lambda x: jnp.sin(x @ w), x)

    return layered(layer)()


def tied() -> Built:
    """One matrix embeds the tokens and reads the logits out."""

    def init(key):
        ws, _ = weights_and_input(key)
        return {"table": normal(key, 32, 16), "ws": ws}, random.randint(key, (8, 17), 0, 32)

    def loss(params, tokens):
        x = params["table"][tokens[:, :-1]]
        for w in params["ws"]:
            x = x + jnp.tanh(x @ w)
        return models.cross_entropy(x @ params["table"].T, tokens[:, 1:])

    return loss, init


def auxiliary() -> Built:
    """The loss comes with a tree of other outputs, some made early, one an input."""

    def loss(ws, x):
        first = y = jnp.tanh(x @ ws[0])
        for w in ws[1:]:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2), {"first": jnp.mean(first), "signs": (y > 0, None), "input": x}

    return loss, weights_and_input


TOYS = (
    Model("long_skips", long_skips),
    Model("reused", reused),
    Model("branches", branches),
    Model("integers", integers),
    Model("constants", constants),
    Model("nested_jit", layered(lambda w, x, i: jax.jit(lambda w, x: jax.jit(jnp.tanh)(x @ w))(w, x))),
    Model("relu", layered(lambda w, x, i: jax.nn.relu(x @ w + 0.1))),
    Model("custom_jvp", layered(lambda w, x, i: smooth_abs(x @ w) - 0.5)),
    Model("custom_vjp", layered(lambda w, x, i: scaled_gradient(x @ w))),
    Model("repeated_weight", layered(lambda w, x, i: jnp.tanh(x @ w + x @ w.T))),
    Model("dropout", dropout),
    Model("scan", scan),
    Model("cond", conditional),
    Model("tied", tied),
    Model("auxiliary", auxiliary, has_aux=True),
)

MODELS = NETWORKS + TOYS
BY_NAME = {model.name: model for model in (*MODELS, GPT_16, RESNET_198)}


@functools.cache
def toy_init(name: str) -> Callable:
    """What makes a model's arguments at toy size, compiled: eagerly each of fifty shapes would be compiled alone."""
    model = BY_NAME[name]
    return jax.jit(model.build(**model.toy_size)[1], compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def toy_args(name: str, seed: int) -> tuple[Any, ...]:
    """The arguments of a model at toy size, made once."""
    return toy_init(name)(random.key(seed))
