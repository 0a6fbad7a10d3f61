"""Loops at the sizes people run them at, and beside the same programs unrolled; compiled, never run."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from test_scans import tanh_step

import jaxsub
from jaxsub.jaxpr.flops import jaxpr_flops


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def gelu_step(x, w):
    return x + jax.nn.gelu(x @ w), None


def chain(step, is_loop):
    def f(ws, x):
        if is_loop:
            return jnp.mean(lax.scan(step, x, ws)[0] ** 2)
        for i in range(ws.shape[0]):
            x, _ = step(x, ws[i])
        return jnp.mean(x**2)

    return f


def lstm(w, xs):
    """One layer over time."""

    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zeros = jnp.zeros((xs.shape[1], w.shape[1] // 4))
    return jnp.mean(lax.scan(step, (zeros, zeros), xs)[0][0] ** 2)


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def block(x, p):
    batch, time, width = x.shape
    q, k, v = (y.reshape(batch, time, 4, width // 4) for y in jnp.split(norm(x) @ p["qkv"], 3, -1))
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(batch, time, width) @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], None


def gpt(params, tokens):
    """Layers as a loop over stacked weights."""
    x = lax.scan(block, params["embedding"][tokens], params["blocks"])[0]
    logits = jax.nn.log_softmax((norm(x) @ params["embedding"].T)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def recurrent_layers(ws, xs):
    """A loop over time in a loop over layers."""

    def layer(xs, w):
        def step(h, x):
            h = jnp.tanh(jnp.concatenate([x, h], -1) @ w)
            return h, h

        return lax.scan(step, jnp.zeros_like(xs[0]), xs)[1], None

    return jnp.mean(lax.scan(layer, xs, ws)[0] ** 2)


BLOCKS = {
    "qkv": shape(96, 64, 192), "out": shape(96, 64, 64), "up": shape(96, 64, 256), "down": shape(96, 256, 64)
}  # fmt: skip
CASES = {
    "lstm of 4000 steps": (lstm, (shape(128, 256), shape(4000, 32, 64)), 0.02, 1.35),
    "gpt of 96 layers": (
        gpt,
        ({"embedding": shape(256, 64), "blocks": BLOCKS}, shape(4, 64, dtype="int32")),
        0.05,
        1.3,
    ),
    "layers x time": (recurrent_layers, (shape(12, 128, 64), shape(200, 64, 64)), 0.3, 1.6),
}


def flops(f, args, argnums=0):
    return jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(f, argnums))(*args)).weighted


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_long_loops_fit_in_little(name):
    """A small share of the plain memory is kept to, at little more than one forward pass."""
    f, args, share, most = CASES[name]
    plain = jaxsub.measure(f, *args).temp_bytes
    g = jaxsub.sublinear(f, budget=share, progress=False)
    assert jaxsub.measure(g, *args).temp_bytes <= share * plain
    assert flops(g, args) <= most * flops(f, args)


def unrolled_lstm(w, xs):
    """The same layer, step after step."""
    h = c = jnp.zeros((xs.shape[1], w.shape[1] // 4))
    for x in xs:
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return jnp.mean(h**2)


def pair(step, length):
    return chain(step, is_loop=False), chain(step, is_loop=True), (shape(length, 32, 32), shape(256, 32))


PAIRS = {
    "tanh": (*pair(tanh_step, 32), (0.9, 0.6, 0.35, 0.25, 0.2)),
    "gelu": (*pair(gelu_step, 32), (0.9, 0.6, 0.35, 0.25, 0.2)),
    "lstm": (unrolled_lstm, lstm, (shape(64, 128), shape(16, 128, 32)), (0.8, 0.5, 0.3, 0.2, 0.15)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "share"), [(name, share) for name in PAIRS for share in PAIRS[name][-1]])
def test_a_loop_is_planned_about_as_well_as_the_same_program_unrolled(name, share):
    """With a quarter more memory than the unrolled program's plan needs, the loop's plan executes hardly more."""
    unrolled, loop, args, _ = PAIRS[name]
    g = jaxsub.sublinear(unrolled, budget=share, argnums=(0, 1), progress=False)
    needed = jaxsub.measure(g, *args, argnums=(0, 1)).temp_bytes
    h = jaxsub.sublinear(loop, budget=int(1.25 * needed), argnums=(0, 1), progress=False)
    assert jaxsub.measure(h, *args, argnums=(0, 1)).temp_bytes <= 1.25 * needed
    assert flops(h, args, (0, 1)) <= 1.1 * flops(g, args, (0, 1))
