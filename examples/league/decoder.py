"""A decoder layer as MaxText writes it, with its `checkpoint_name`s, in a stack with a loss over all words.

bf16 compute, f32 weights; RMSNorm, RoPE, grouped queries, SiLU-gated MLP or a mixture of them, untied head,
`logsumexp` of f32 logits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from policies import JAX, NAMES, NESTED, PLAIN, WHOLE, Size

Weights = dict[str, Any]
BEST, CAPACITY = 2, 1.25
"""Of a mixture: to how many experts a token goes, and for how many times an even share of tokens each has room."""


def shapes(size: Size) -> tuple[Weights, jax.ShapeDtypeStruct]:
    """Shapes of a model's weights and of its tokens."""
    e, d = size.width, size.head_width
    layer = {
        "norm_0": (e,), "query": (e, size.heads, d), "key": (e, size.kv_heads, d), "value": (e, size.kv_heads, d),
        "out": (size.heads, d, e), "norm_1": (e,), "wi_0": (e, size.mlp), "wi_1": (e, size.mlp), "wo": (size.mlp, e),
    }  # fmt: skip
    if size.experts:
        layer |= {name: (size.experts, *layer[name]) for name in ("wi_0", "wi_1", "wo")} | {"gate": (e, size.experts)}
    front = (size.layers,) if size.is_scanned else ()
    one = {name: jax.ShapeDtypeStruct((*front, *shape), "float32") for name, shape in layer.items()}
    weights = {
        "words": jax.ShapeDtypeStruct((size.words, e), "float32"),
        "layers": one if size.is_scanned else [one] * size.layers,
        "norm": jax.ShapeDtypeStruct((e,), "float32"),
        "head": jax.ShapeDtypeStruct((e, size.words), "float32"),
    }
    return weights, jax.ShapeDtypeStruct((size.batch, size.length), "int32")


def loss_of(size: Size, policy: str = PLAIN) -> Callable[[Weights, jax.Array], jax.Array]:
    """The loss of a model of a size, its layers wrapped as a policy says."""
    layer = partial(decoder_layer, size)
    wrapped = _wrapped(layer, policy, size.is_scanned)

    def loss(weights: Weights, tokens: jax.Array) -> jax.Array:
        x = weights["words"].astype(size.dtype)[tokens]
        if policy == NESTED and size.is_scanned:
            x = _nested(wrapped, x, weights["layers"], size.layers)
        elif size.is_scanned:
            x, _ = jax.lax.scan(lambda x, w: (wrapped(x, w), None), x, weights["layers"])
        else:
            for w in weights["layers"]:
                x = wrapped(x, w)
        x = rms_norm(x, weights["norm"])
        logits = (x @ weights["head"].astype(size.dtype)).astype(jnp.float32)[:, :-1]
        hits = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - hits)

    return loss


def decoder_layer(size: Size, x: jax.Array, w: Weights) -> jax.Array:
    """One layer."""
    w = {name: a if name.startswith("norm") else a.astype(size.dtype) for name, a in w.items()}
    x = checkpoint_name(x, "decoder_layer_input")
    y = rms_norm(x, w["norm_0"])
    query = checkpoint_name(rotated(jnp.einsum("bte,ehd->bthd", y, w["query"])), "query_proj")
    key = checkpoint_name(rotated(jnp.einsum("bte,ehd->bthd", y, w["key"])), "key_proj")
    value = checkpoint_name(jnp.einsum("bte,ehd->bthd", y, w["value"]), "value_proj")
    context = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=size.attention)
    context = checkpoint_name(context, "context")
    x = x + checkpoint_name(jnp.einsum("bthd,hde->bte", context, w["out"]), "out_proj")
    y = rms_norm(x, w["norm_1"])
    return x + (mixture(y, w) if size.experts else mlp(y, w))


def mlp(y: jax.Array, w: Weights) -> jax.Array:
    """A gated MLP; of experts, `[experts, batch, place, width]`, each its own."""
    into, out = ("ebcm,emh->ebch", "ebch,ehm->ebcm") if w["wo"].ndim == 3 else ("btm,mh->bth", "bth,hm->btm")
    gate = checkpoint_name(jnp.einsum(into, y, w["wi_0"]), "mlpwi_0")
    up = checkpoint_name(jnp.einsum(into, y, w["wi_1"]), "mlpwi_1")
    return checkpoint_name(jnp.einsum(out, jax.nn.silu(gate) * up, w["wo"]), "mlpwo")


def mixture(y: jax.Array, w: Weights) -> jax.Array:
    """Each token goes to the two experts that its gate rates highest, as far as they have room; by products, as GShard.

    References:
        Lepikhin et al., *GShard: scaling giant models with conditional computation and automatic sharding*, 2020.
    """
    batch, length, _ = y.shape
    n_experts = w["gate"].shape[-1]
    room = round(CAPACITY * BEST * length / n_experts)
    shares, chosen = jax.lax.top_k(jax.nn.softmax((y @ w["gate"]).astype(jnp.float32)), BEST)
    hot = jax.nn.one_hot(chosen, n_experts, dtype=jnp.int32)
    place = jnp.cumsum(hot.reshape(batch, -1, n_experts), axis=1).reshape(hot.shape) * hot - 1  # -1: no place at all
    places = jax.nn.one_hot(place, room, dtype=y.dtype)
    weighted = jnp.einsum("btk,btkec->btec", (shares / shares.sum(-1, keepdims=True)).astype(y.dtype), places)
    found = mlp(jnp.einsum("btm,btec->ebcm", y, places.sum(axis=2)), w)
    return jnp.einsum("ebcm,btec->btm", found, weighted)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in f32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """RoPE."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000.0 ** (jnp.arange(half) / half)
    sin, cos = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _wrapped(layer: Callable, policy: str, is_scanned: bool) -> Callable:
    """A layer as a policy has it; `prevent_cse` is needed only where layers are unrolled."""
    checkpoint = partial(jax.checkpoint, prevent_cse=not is_scanned)
    if policy == PLAIN:
        return layer
    if policy in (WHOLE, NESTED):
        return checkpoint(layer)
    if policy in JAX:
        return checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))
    return checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*NAMES[policy]))


def _nested(layer: Callable, x: jax.Array, stacked: Weights, n_layers: int) -> jax.Array:
    """Blocks of about √L layers in an outer scan, each recomputed too."""
    size = min((d for d in range(1, n_layers + 1) if n_layers % d == 0), key=lambda d: abs(d - n_layers**0.5))
    grouped = jax.tree.map(lambda a: a.reshape(n_layers // size, size, *a.shape[1:]), stacked)

    @partial(jax.checkpoint, prevent_cse=False)
    def block(x: jax.Array, ws: Weights) -> jax.Array:
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

    return jax.lax.scan(lambda x, ws: (block(x, ws), None), x, grouped)[0]
