"""Never behind by hand: decoders at the memory of `jax.checkpoint` round each layer, with and without a policy.

Decoders of 4 to 24 layers, in a scan and unrolled, bf16 and f32 compute, 1,000 to 128,256 words, tied and untied heads,
label smoothing, z-loss, masked tokens. For each the memory that by hand needs is given to `jaxsub` as its budget: a
refusal, or over half a percent more FLOPs, is a bug, and bold in the table. On a CPU; nothing is executed.

    python examples/benchmarks/by_hand.py                     # all decoders; long, resumed where it was stopped
    python examples/benchmarks/by_hand.py --only 12-scan      # some of them
    python examples/benchmarks/by_hand.py --quick             # one small one
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from records import Cell, Measured, mib, run_cells  # noqa: E402

import jaxsub  # noqa: E402
from jaxsub.jaxpr.flops import jaxpr_flops  # noqa: E402

TOLERANCE = 0.005
POLICIES: dict[str, Any] = {
    "full": None,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder: layers of `width`, a head over `words`, and what its loss adds."""

    layers: int
    is_scanned: bool
    words: int = 4096
    width: int = 256
    tokens: int = 256
    dtype: str = "bfloat16"
    is_tied: bool = False
    smoothing: float = 0.0
    z_loss: float = 0.0
    is_masked: bool = False

    @property
    def key(self) -> str:
        """Its name in results."""
        added = [self.dtype, f"{self.words} words", *(["tied"] if self.is_tied else [])]
        added += [f"smoothing {self.smoothing}"] if self.smoothing else []
        added += [f"z-loss {self.z_loss}"] if self.z_loss else []
        return f"{self.layers}-{'scan' if self.is_scanned else 'unrolled'}, {', '.join(added)}" + (
            ", mask" if self.is_masked else ""
        )


def decoders() -> Iterator[Decoder]:
    """What is measured: each way to run layers with each addition to the loss, and sizes of words and depths."""
    for is_scanned in (True, False):
        base = Decoder(12, is_scanned)
        yield base
        yield from (replace(base, layers=n) for n in (4, 24))
        yield from (replace(base, words=n) for n in (1_000, 32_000, 128_256))
        yield replace(base, dtype="float32")
        yield replace(base, is_tied=True)
        yield replace(base, smoothing=0.1)
        yield replace(base, z_loss=1e-4)
        yield replace(base, is_masked=True)
        yield replace(base, is_tied=True, smoothing=0.1, z_loss=1e-4, is_masked=True, words=32_000)


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
    q, k, v = jnp.split(norm(x, w["norm_0"]) @ w["qkv"].astype(d.dtype), 3, axis=-1)
    heads = [a.reshape(*a.shape[:2], 8, -1) for a in (q, k, v)]
    x = x + jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ w["out"].astype(d.dtype)
    gate, up = jnp.split(norm(x, w["norm_1"]) @ w["wi"].astype(d.dtype), 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ w["wo"].astype(d.dtype)


def norm(x: jax.Array, scale: Any) -> jax.Array:
    """RMSNorm in f32."""
    y = x.astype("float32")
    return (y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def flops(fun: Callable, args: tuple[Any, ...]) -> float:
    """FLOPs of the traced gradient, loops with their lengths."""
    jaxpr = jax.make_jaxpr(jax.value_and_grad(fun))(*args).jaxpr
    return jaxpr_flops(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]).total


def compared(d: Decoder, policy: str) -> dict[str, Any]:
    """By hand, and `jaxsub` with its memory."""
    args, fun = shapes(d), loss_of(d)
    wrap = partial(jax.checkpoint, policy=POLICIES[policy], prevent_cse=not d.is_scanned)
    written = loss_of(d, wrap)
    budget, wanted = jaxsub.measure(written, *args).temp_bytes, flops(written, args)
    found = {"by_hand_bytes": budget, "by_hand_flops": wanted}
    try:
        plan = jaxsub.plan(fun, *args, budget=budget, progress=False)
    except jaxsub.InfeasibleBudgetError as refusal:
        return {**found, "least_bytes": refusal.least_bytes}
    planned = flops(jaxsub.sublinear(fun, plan=plan), args)
    return {**found, "bytes": plan.measurement.temp_bytes, "flops": planned, "planner": plan.planner}


def cells(is_quick: bool) -> Iterator[Cell]:
    """Every decoder with every policy."""
    found = [Decoder(4, False, words=512, width=32, tokens=32)] if is_quick else list(decoders())
    for d in found:
        for policy in list(POLICIES)[: 1 if is_quick else None]:
            yield Cell(f"{d.key}/{policy}", partial(compared, d, policy))


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
