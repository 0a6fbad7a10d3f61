"""The optimizer's update inside the backward scan or after it: whole AdamW steps of language models.

For each model and target a row: temporaries of the step that updates when all gradients are there, and of the one that
updates layer by layer (`jaxsub.jit(fuse_updates=True)`), both under one plan of `jaxsub`, layers recomputed and the
loss head in slices; the outputs' share in donated memory; the largest batch in 80 GB.

    python examples/league/updates.py --only llama3.2-1b    # for an H100 that is not there
    JAX_PLATFORMS=cpu python examples/league/updates.py --only llama3-8b     # weights split over eight
    python examples/league/updates.py --quick               # a toy on the CPU, under two minutes
    python examples/league/updates.py --draw                # the table again, from the results alone

Nothing is executed. cuDNN's attention needs `pip install "jaxsub[targets-cudnn]"`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxsub

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from decoder import Weights, decoder_layer, rms_norm  # noqa: E402
from league import arguments  # noqa: E402
from policies import SIZES, Size  # noqa: E402
from records import Cell, Measured, fill, keep_table, load, options, over_budget, picked, tell  # noqa: E402

from jaxsub.devices.targets import get_target  # noqa: E402
from jaxsub.search import bracket  # noqa: E402
from jaxsub.step.report import StepReport  # noqa: E402

GIB = 2**30
MEMORY = 80 * GIB
"""What an H100 has."""

TARGETS = {"llama3.2-1b": "h100", "llama3-8b": "h100:8", "toy": "cpu"}
OPTIMIZER = optax.adamw(1e-4, weight_decay=0.1)
HEAD_ROWS = 2048
"""Tokens of a slice of the loss head."""

AFTER, INSIDE = "after", "inside"


def loss_of(size: Size, n_slices: int = 1) -> Callable[[Weights, jax.Array], jax.Array]:
    """The loss over all words of a decoder whose layers are recomputed, its head in several slices or whole."""
    layer = jax.checkpoint(partial(decoder_layer, size), prevent_cse=False)

    def loss(weights: Weights, tokens: jax.Array) -> jax.Array:
        x = weights["words"].astype(jnp.bfloat16)[tokens[:, :-1]]
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights["layers"])
        if n_slices > 1:
            return sliced_head(weights, x, tokens[:, 1:], n_slices)
        return head(weights["norm"], weights["head"], x.reshape(-1, size.width), tokens[:, 1:].reshape(-1))

    return loss


def head(norm: jax.Array, words: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss of all tokens."""
    logits = (rms_norm(x, norm) @ words.astype(jnp.bfloat16)).astype(jnp.float32)
    hits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - hits)


def sliced_head(weights: Weights, x: jax.Array, labels: jax.Array, n_slices: int) -> jax.Array:
    """The mean loss, by hand a slice of each row's tokens at a time."""
    slices = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(a.shape[0], n_slices, -1, *a.shape[2:]), 1, 0), (x, labels))

    @partial(jax.checkpoint, prevent_cse=False)
    def one(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + head(weights["norm"], weights["head"], *part), None

    return jax.lax.scan(one, jnp.zeros(()), slices)[0] / n_slices


def step_of(size: Size, n_devices: int) -> Callable[..., Any]:
    """One AdamW step; programs that are split over devices are not sliced by `jaxsub` yet, so that is done by hand."""
    n_slices = max(2, size.batch * size.length // HEAD_ROWS // n_devices)
    loss = loss_of(size, n_slices if n_devices > 1 else 1)
    if n_devices == 1:
        loss = jaxsub.sublinear(loss, planner="plain", chunks={"head": n_slices}, verify=False, progress=False)

    def step(weights: Weights, state: Any, tokens: jax.Array) -> tuple[Weights, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(weights, tokens)
        updates, state = OPTIMIZER.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    return step


def state_of(weights: Weights) -> Any:
    """The optimizer's state, placed as the weights are."""
    placed = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(weights)}
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed.get(leaf.shape)),
        jax.eval_shape(OPTIMIZER.init, weights),
    )


def report(size: Size, target: str, where: str) -> StepReport:
    """The step, compiled."""
    n_devices = get_target(target).n_devices
    weights, tokens = arguments(replace(size, length=size.length + 1), target)
    step = jaxsub.jit(
        step_of(size, n_devices), memory=1000 * GIB, target=target, donate_argnums=(0, 1), progress=False,
        fuse_updates=where == INSIDE,
    )  # fmt: skip
    return step.report(weights, state_of(weights), tokens)


def figures(size: Size, target: str, where: str) -> dict[str, Any]:
    """What the step takes of one device, in bytes."""
    found = report(size, target, where)
    measured = found.measurement
    return {
        "batch": size.batch,
        "gradient_bytes": sum(scan.gradient_bytes for scan in found.fused),
        **{f"{kind}_bytes": getattr(measured, f"{kind}_bytes") for kind in ("temp", "argument", "output", "alias")},
    }


def largest(size: Size, target: str, where: str) -> dict[str, Any]:
    """The largest batch in the memory; each that is tried is a compile."""
    tried: dict[int, int] = {}

    def n_bytes(batch: int) -> int:
        tried[batch] = report(replace(size, batch=batch), target, where).step_bytes
        return tried[batch]

    batch = bracket.largest(n_bytes, MEMORY, max(1, size.batch // 2))
    return {"batch": batch, "step_bytes": tried.get(batch, 0), "budget_bytes": MEMORY}


def cells(name: str) -> Iterator[Cell]:
    """A model's step, both ways, and the largest batch of each on one device."""
    target, size = TARGETS[name], SIZES[name]
    n_devices = get_target(target).n_devices
    size = size if n_devices == 1 else replace(size, batch=n_devices)
    for where in (AFTER, INSIDE):
        yield Cell(f"{name}/{target}/{where}", partial(figures, size, target, where))
    for where in (AFTER, INSIDE) if target == "h100" else ():
        yield Cell(f"{name}/{target}/largest batch, {where}", partial(largest, size, target, where))


def table(measured: Measured) -> None:
    """Print a row a model."""
    print("| AdamW step | batch | updates after the gradient: temporary GiB | inside the backward scan | of outputs in "
          "donated memory | largest batch in 80 GiB: after | inside |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for key, inside in measured.items():
        name, where = key.rsplit("/", 1)
        if where != INSIDE:
            continue
        after = measured[f"{name}/{AFTER}"]
        batches = [measured.get(f"{name}/largest batch, {w}", {}).get("batch", "") for w in (AFTER, INSIDE)]
        temps = [f"{cell['temp_bytes'] / GIB:.3g}" for cell in (after, inside)]
        share = f"{inside['alias_bytes'] / inside['output_bytes']:.1%}"
        print(f"| {name} | {inside['batch']} | {' | '.join(temps)} | {share} | {batches[0]} | {batches[1]} |")


def broken(measured: Measured) -> list[str]:
    """Steps that gain nothing, or batches that do not fit."""
    found = []
    for key, cell in measured.items():
        if key.endswith("/" + INSIDE):
            after = measured[key.removesuffix(INSIDE) + AFTER]
            if cell["temp_bytes"] >= after["temp_bytes"] or cell["alias_bytes"] < after["alias_bytes"]:
                found.append(f"{key}: the update inside the backward scan spares nothing")
        found += over_budget(key, cell.get("step_bytes", 0), cell.get("budget_bytes", 0))
    return found


def main() -> None:
    """Read the command line; measure, print."""
    chosen = options(argparse.ArgumentParser(description=__doc__), HERE.parent / "results" / "league")
    path = chosen.out / "updates.json"
    if not chosen.draw:
        names = ["toy"] if chosen.quick else [name for name in TARGETS if name != "toy"]
        asked = [cell for name in names for cell in cells(name)]
        fill(path, picked(asked, chosen.only), chosen.minutes, chosen.anew)
    measured = load(path)
    if not measured:
        raise SystemExit(f"{path} holds no results: run this without --draw first")
    keep_table(table, measured, path.with_suffix(".md"))
    print(f"results: {path}, table: {path.with_suffix('.md')}")
    tell(broken(measured), is_check=chosen.quick)


if __name__ == "__main__":
    main()
