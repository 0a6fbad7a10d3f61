"""Never behind by hand: decoders at the memory of `jax.checkpoint` round each layer, with and without a policy.

Decoders of 4 to 24 layers, in a scan and unrolled, bf16 and f32 compute, 1,000 to 128,256 words, tied and untied heads,
label smoothing, z-loss, masked tokens: a dozen, in which every two of these choices meet. For each the memory that by
hand needs is given to `jaxsub` as its budget: a refusal, or over half a percent more FLOPs, is a bug, and bold in the
table. Then the same of three programs of the gauntlet (`tests/gauntlet`), which nothing here was written on. On a CPU;
nothing is executed.

    python examples/benchmarks/by_hand.py                     # all decoders; long, resumed where it was stopped
    python examples/benchmarks/by_hand.py --only 12-scan      # those whose names begin so
    python examples/benchmarks/by_hand.py --only flax_bf16_transformer nnx_mixer penzai_transformer
    python examples/benchmarks/by_hand.py --quick             # one small one
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters.partial_eval import dce_jaxpr

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from records import Cell, Measured, mib, run_cells  # noqa: E402

import jaxsub  # noqa: E402
from jaxsub.jaxpr.flops import jaxpr_flops  # noqa: E402

TOLERANCE = 0.005
POLICIES: dict[str, Any] = {
    "full": None,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("qkv", "out"),
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder: layers of `width`, a head over `words`, and what its loss adds."""

    layers: int
    words: int = 4096
    is_scanned: bool = False
    dtype: str = "float32"
    is_tied: bool = False
    smoothing: float = 0.0
    z_loss: float = 0.0
    is_masked: bool = False
    width: int = 256
    tokens: int = 256

    @property
    def key(self) -> str:
        """Its name in results."""
        added = {"tied": self.is_tied, "smoothing": self.smoothing, "z-loss": self.z_loss, "mask": self.is_masked}
        how = f"{self.layers}-{'scan' if self.is_scanned else 'unrolled'}"
        return ", ".join(
            [how, self.dtype, f"{self.words} words", *(name for name, is_there in added.items() if is_there)]
        )


SCAN, BF16, TIED, MASK = {"is_scanned": True}, {"dtype": "bfloat16"}, {"is_tied": True}, {"is_masked": True}
SMOOTHING, Z_LOSS = {"smoothing": 0.1}, {"z_loss": 1e-4}
DECODERS = (
    Decoder(4, 1_000, **SCAN, **BF16, **TIED),
    Decoder(4, 4_096, **TIED, **MASK),
    Decoder(4, 32_000, **BF16, **SMOOTHING, **Z_LOSS),
    Decoder(4, 128_256, **Z_LOSS, **MASK),
    Decoder(12, 1_000, **SCAN, **BF16, **SMOOTHING, **MASK),
    Decoder(12, 4_096, **SCAN, **BF16, **TIED, **Z_LOSS),
    Decoder(12, 32_000, **MASK),
    Decoder(12, 128_256, **SCAN, **BF16, **TIED, **Z_LOSS),
    Decoder(24, 1_000, **TIED, **Z_LOSS, **MASK),
    Decoder(24, 4_096, **SCAN, **BF16, **SMOOTHING, **Z_LOSS),
    Decoder(24, 32_000, **SCAN, **TIED, **Z_LOSS),
    Decoder(24, 128_256, **SCAN, **TIED, **SMOOTHING),
)
"""Every two choices, of depth, words, scan or not, dtype and what the loss adds, meet in one of them."""


def shapes(d: Decoder) -> tuple[Any, ...]:
    """Shapes of weights, tokens and mask."""
    layer = {"norm_0": (d.width,), "qkv": (d.width, 3 * d.width), "out": (d.width, d.width), "norm_1": (d.width,),
             "wi": (d.width, 8 * d.width), "wo": (4 * d.width, d.width)}  # fmt: skip
    front = (d.layers,) if d.is_scanned else ()
    one = {name: jax.ShapeDtypeStruct((*front, *shape), "float32") for name, shape in layer.items()}
    words = jax.ShapeDtypeStruct((d.words, d.width), "float32")
    weights = {"words": words, "layers": one if d.is_scanned else [one] * d.layers}
    weights |= {} if d.is_tied else {"head": words}
    return weights, jax.ShapeDtypeStruct((4, d.tokens), "int32"), jax.ShapeDtypeStruct((4, d.tokens), "float32")


def loss_of(d: Decoder, wrap: Callable = lambda layer: layer) -> Callable:
    """The loss of a decoder, its layers wrapped."""
    run = wrap(partial(layer, d))

    def loss(weights: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        x = weights["words"].astype(d.dtype)[tokens]
        if d.is_scanned:
            x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, weights["layers"])
        else:
            for w in weights["layers"]:
                x = run(x, w)
        head = weights["words" if d.is_tied else "head"].astype(d.dtype)
        logits = jnp.einsum("bte,ve->btv", norm(x, 1.0), head).astype("float32")
        whole = jax.nn.logsumexp(logits, axis=-1)
        losses = whole - jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        if d.smoothing:
            losses = (1 - d.smoothing) * losses + d.smoothing * (whole - jnp.mean(logits, axis=-1))
        if d.z_loss:
            losses = losses + d.z_loss * whole**2
        return jnp.sum(losses * mask) / jnp.sum(mask) if d.is_masked else jnp.mean(losses)

    return loss


def layer(d: Decoder, x: jax.Array, w: Any) -> jax.Array:
    """Attention and a gated MLP."""
    qkv = checkpoint_name(norm(x, w["norm_0"]) @ w["qkv"].astype(d.dtype), "qkv")
    heads = [a.reshape(*a.shape[:2], 8, -1) for a in jnp.split(qkv, 3, axis=-1)]
    context = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
    x = x + checkpoint_name(context @ w["out"].astype(d.dtype), "out")
    gate, up = jnp.split(checkpoint_name(norm(x, w["norm_1"]) @ w["wi"].astype(d.dtype), "wi"), 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ w["wo"].astype(d.dtype)


def norm(x: jax.Array, scale: Any) -> jax.Array:
    """RMSNorm in f32."""
    y = x.astype("float32")
    return (y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def flops(fun: Callable, args: tuple[Any, ...], has_aux: bool = False) -> float:
    """FLOPs of the traced gradient, loops with their lengths."""
    jaxpr = jax.make_jaxpr(jax.value_and_grad(fun, has_aux=has_aux))(*args).jaxpr
    return jaxpr_flops(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]).total


def by_hand(fun: Callable, args: tuple[Any, ...], has_aux: bool = False) -> dict[str, Any]:
    """What a function needs as it is written."""
    return {"by_hand_bytes": jaxsub.measure(fun, *args).temp_bytes, "by_hand_flops": flops(fun, args, has_aux)}


def planned(fun: Callable, args: tuple[Any, ...], budget: int, has_aux: bool = False) -> dict[str, Any]:
    """What `jaxsub` makes of it in so many bytes."""
    try:
        plan = jaxsub.plan(fun, *args, budget=budget, progress=False)
    except jaxsub.InfeasibleBudgetError as refusal:
        return {"least_bytes": refusal.least_bytes}
    found = flops(jaxsub.sublinear(fun, plan=plan), args, has_aux)
    planner = plan.planner + (f", in slices: {len(plan.slices)}" if plan.slices else "")
    return {"bytes": plan.measurement.temp_bytes, "flops": found, "planner": planner}


def decoder(d: Decoder, policy: str) -> dict[str, Any]:
    """A decoder by hand, and by `jaxsub` in its memory."""
    wrap = partial(jax.checkpoint, policy=POLICIES[policy], prevent_cse=not d.is_scanned)
    found = by_hand(loss_of(d, wrap), shapes(d))
    return {**found, **planned(loss_of(d), shapes(d), found["by_hand_bytes"])}


def linen_blocks(program: Any, policy: Any) -> Any:
    """Linen's own `remat` round each block."""
    return patch.object(program, "Block", program.nn.remat(program.Block, policy=policy))


def nnx_blocks(program: Any, policy: Any) -> Any:
    """NNX's own `remat` round each block."""
    return patch.object(program.Mixer, "__call__", program.nnx.remat(program.Mixer.__call__, policy=policy))


def penzai_blocks(program: Any, policy: Any) -> Any:
    """`jax.checkpoint` round each block, whose arguments are trees."""
    block = program.llamalike_common.model_parts.TransformerBlock
    return patch.object(block, "__call__", jax.checkpoint(block.__call__, policy=policy))


HELD_OUT = {"flax_bf16_transformer": linen_blocks, "nnx_mixer": nnx_blocks, "penzai_transformer": penzai_blocks}


def held_out(name: str, policy: str) -> dict[str, Any]:
    """A program of the gauntlet by hand, and by `jaxsub` in its memory."""
    program = importlib.import_module(f"gauntlet.programs.{name}")
    built = program.build()
    with HELD_OUT[name](program, POLICIES[policy]):
        written = program.build()
        found = by_hand(written.loss, written.args, written.has_aux)
    return {**found, **planned(built.loss, built.args, found["by_hand_bytes"], built.has_aux)}


def cells(is_quick: bool) -> Iterator[Cell]:
    """Every decoder with every policy, every program of others with those that need no names."""
    if is_quick:
        yield Cell("quick/full", partial(decoder, Decoder(4, words=512, width=32, tokens=32), "full"))
        return
    for d in DECODERS:
        for policy in POLICIES:
            yield Cell(f"{d.key}/{policy}", partial(decoder, d, policy))
    for name in HELD_OUT:
        for policy in list(POLICIES)[:3]:
            yield Cell(f"{name}/{policy}", partial(held_out, name, policy))


def is_behind(cell: dict[str, Any]) -> bool:
    """Whether `jaxsub` refused, or executes more."""
    return "flops" not in cell or cell["flops"] > (1 + TOLERANCE) * cell["by_hand_flops"]


def table(measured: Measured) -> None:
    """Print a row a cell."""
    print("| decoder / policy | by hand | jaxsub | its FLOPs over by hand's | plan |\n|---|---|---|---|---|")
    for key, cell in measured.items():
        if "flops" in cell:
            share = f"{cell['flops'] / cell['by_hand_flops']:.3f}"
            share = f"**{share}**" if is_behind(cell) else share
            print(f"| {key} | {mib(cell['by_hand_bytes'])} | {mib(cell['bytes'])} | {share} | {cell['planner']} |")
        else:
            print(f"| {key} | {mib(cell['by_hand_bytes'])} | **refused: {mib(cell['least_bytes'])}** | | |")


def behind(measured: Measured) -> list[str]:
    """Where by hand is ahead."""
    return [f"{key}: by hand is ahead" for key, cell in measured.items() if is_behind(cell)]


if __name__ == "__main__":
    run_cells(__doc__, HERE.parent / "results" / "by_hand", cells, table, behind)
