"""A network of 51 convolutions learns handwritten digits, twice: plainly, and in a fifth of the memory.

Training keeps every layer's activations until the backward pass comes back for them; that is most of the memory of a
deep network. `jaxsub.sublinear(loss, budget=0.2)` returns the same loss with a gradient that keeps a fifth: it
decides which values to save, recomputes the rest when it is needed, and has the compiler confirm the figure.
Nothing else changes: same model, same optimizer, same data, same gradients. So the two loss curves below agree to f32
rounding, which training amplifies: for comparison the plain run is repeated with each batch in reverse order, which
changes nothing but rounding. The plan is made first and kept in a file; each run then has a process of its own, so
that neither's peak memory hides in the other's.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from tqdm import tqdm

import jaxsub

N_TEST = 360
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """How large the run is: residual blocks of two convolutions, channels, pixels a side, images a batch, steps."""

    blocks: int = 25
    width: int = 16
    pixels: int = 16
    batch: int = 256
    steps: int = 14
    budget: float = 0.2


TOY = Size(blocks=10, width=4, pixels=8, batch=64, steps=5, budget=0.4)


@dataclass(frozen=True)
class Result:
    """What one run reports."""

    losses: list[float]
    rounded_losses: list[float]
    accuracy: float
    compiled_bytes: int
    peak_bytes: int
    step_seconds: float


class Block(nnx.Module):
    """Two times batch normalisation, relu, convolution, added to what came in."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1 = nnx.BatchNorm(width, momentum=0.8, rngs=rngs)
        self.conv1 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(width, momentum=0.8, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map f32[batch, pixels, pixels, width] to the same shape."""
        y = self.conv1(nnx.relu(self.norm1(x)))
        return x + self.conv2(nnx.relu(self.norm2(y)))


class ResNet(nnx.Module):
    """A convolution, residual blocks, and a linear read-out of 4 x 4 patches."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, size.width, (3, 3), use_bias=False, rngs=rngs)
        self.blocks = nnx.List([Block(size.width, rngs) for _ in range(size.blocks)])
        self.norm = nnx.BatchNorm(size.width, momentum=0.8, rngs=rngs)
        self.head = nnx.Linear(16 * size.width, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Map images f32[batch, pixels, pixels, 1] to logits f32[batch, 10]."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        x = nnx.avg_pool(nnx.relu(self.norm(x)), (x.shape[1] // 4,) * 2, (x.shape[1] // 4,) * 2)
        return self.head(x.reshape(x.shape[0], -1))


def digits(pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """The 1797 digits of scikit-learn, shuffled: images f32[n, pixels, pixels, 1] in [-1, 1], and labels i32[n]."""
    flat, labels = load_digits(return_X_y=True)
    images = (flat.reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    scale = pixels // 8
    return images.repeat(scale, 1).repeat(scale, 2)[order], labels.astype(np.int32)[order]


def peak_bytes() -> int:
    """The most memory this run has had: of the device where it counts, else of the process."""
    if stats := jax.local_devices()[0].memory_stats():
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def start(size: Size) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """A fresh network, always the same: its structure, its parameters, and its running averages."""
    return nnx.split(ResNet(size, nnx.Rngs(0)), nnx.Param, ...)


def fit(step: Callable, carry: tuple, size: Size, label: str, order: int = 1) -> tuple[tuple, list[float], float]:
    """Take all steps; return what they carry, the loss at each, and the median seconds of one."""
    images, labels = digits(size.pixels)
    rng, losses, seconds = np.random.default_rng(1), [], []
    for _ in tqdm(range(size.steps), desc=label, mininterval=1.0):
        batch = rng.integers(N_TEST, len(images), size.batch)[::order]
        began = time.perf_counter()
        carry, loss = step(carry, images[batch], labels[batch])
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
    return carry, losses, statistics.median(seconds[1:])


def loss_of(graphdef: nnx.GraphDef) -> Callable:
    """The loss as a function of parameters, running averages and a batch; it returns the new averages too."""

    def loss(params, rest, images, labels):
        model = nnx.merge(graphdef, params, rest, copy=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean(), nnx.state(model, nnx.Not(nnx.Param))

    return loss


def make_plan(size: Size, path: Path) -> None:
    """Plan for the budget, print the plan and keep it: nothing is trained yet, nothing is even allocated."""
    shapes = nnx.eval_shape(lambda: ResNet(size, nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(shapes, nnx.Param, ...)
    images, labels = digits(size.pixels)
    plan = jaxsub.plan(loss_of(graphdef), params, rest, images[: size.batch], labels[: size.batch], budget=size.budget)
    print(plan, flush=True)
    plan.save(path)


def train(size: Size, plan: jaxsub.Plan, is_plain: bool) -> Result:
    """Train once; the two runs differ in one line."""
    graphdef, params, rest = start(size)
    optimizer = optax.adam(optax.cosine_decay_schedule(5e-3, size.steps))
    images, labels = digits(size.pixels)

    loss = loss_of(graphdef)
    if not is_plain:
        loss = jaxsub.sublinear(loss, plan=plan)  # the one line; sublinear(loss, budget=0.2) would plan here

    def step(carry, images, labels):
        params, rest, state = carry
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, images, labels)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), rest, state), value

    step = jaxsub.jit(step, donate_argnums=0)
    label = "plain" if is_plain else f"in {size.budget:.0%}"
    (params, rest, _), losses, seconds = fit(step, (params, rest, optimizer.init(params)), size, label)
    peak = peak_bytes()

    model = nnx.merge(graphdef, params, rest)
    model.eval()
    accuracy = float((model(images[:N_TEST]).argmax(-1) == labels[:N_TEST]).mean())
    rounded = []
    if is_plain:
        _, params, rest = start(size)
        _, rounded, _ = fit(step, (params, rest, optimizer.init(params)), size, "plain, reversed batches", order=-1)
    measured = plan.plain_measurement if is_plain else plan.measurement
    return Result(losses, rounded, accuracy, measured.temp_bytes, peak, seconds)


def in_a_process_of_its_own(part: str, is_toy: bool, folder: Path) -> None:
    """Run this file again for one part; it leaves what it finds in the folder."""
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder)] + ["--toy"] * is_toy
    subprocess.run(command, check=True)


def run_part(part: str, size: Size, folder: Path) -> None:
    """Plan, or train and leave the result in a file."""
    if part == "plan":
        make_plan(size, folder / "plan.json")
        return
    result = train(size, jaxsub.Plan.load(folder / "plan.json"), is_plain=part == "plain")
    (folder / f"{part}.json").write_text(json.dumps(asdict(result)))


def report(plain: Result, small: Result, size: Size) -> None:
    """Print both runs side by side."""
    print(f"\n{'':24} {'plain':>12} {f'in {size.budget:.0%}':>12} {'difference':>12} {'by rounding':>12}")
    every = max(1, size.steps // 8)
    for i in sorted({*range(0, size.steps, every), size.steps - 1}):
        a, b, c = plain.losses[i], small.losses[i], plain.rounded_losses[i]
        print(f"{f'loss at step {i}':24} {a:12.6f} {b:12.6f} {abs(a - b):12.1e} {abs(a - c):12.1e}")
    print(f"{'test accuracy':24} {plain.accuracy:12.1%} {small.accuracy:12.1%}")
    for name, a, b, digits_shown in (
        ("compiled memory, MiB", plain.compiled_bytes / MIB, small.compiled_bytes / MIB, 1),
        ("real peak memory, MiB", plain.peak_bytes / MIB, small.peak_bytes / MIB, 0),
        ("seconds a step", plain.step_seconds, small.step_seconds, 3),
    ):
        print(f"{name:24} {a:12.{digits_shown}f} {b:12.{digits_shown}f} {b / a:11.2f}x")


def main() -> None:
    """Run both parts and compare them, or one part of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a small network and five steps: seconds, not minutes")
    parser.add_argument("--part", choices=("plan", "plain", "budget"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = TOY if options.toy else Size()
    if options.part:
        run_part(options.part, size, options.folder)
        return
    print(__doc__, flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("plan", "plain", "budget"):
            in_a_process_of_its_own(part, options.toy, Path(folder))
        plain, small = (
            Result(**json.loads((Path(folder) / f"{part}.json").read_text())) for part in ("plain", "budget")
        )
    report(plain, small, size)
    print(f"\nall of it took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
