"""Products that a GPU's compiler makes in parts: too few tiles for its cores, so the summed axis is split.

Each part is a whole result in the type that products are summed in; a kernel behind adds the parts up, or whatever
reads the result adds them up itself. An axis that does not divide is padded: both operands are copied then.

How many parts is the least of an estimate that the compiler makes of a product's time and its sum's. Its weights are
the compiler's own, by generation. Source: OpenXLA, `xla/backends/gpu/transforms/splitk_rewriter.cc`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxsub.devices.targets import Target

TILE = 128
CHOICES: tuple[int, ...] = tuple(2**i for i in range(12))
ALIGNED_BYTES = 16
"""Each part of an operand's row is a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What the compiler's estimate multiplies operations, bytes, bytes of parts, and the sum's start with."""

    compute: float
    memory: float
    parts: float
    start: float


WEIGHTS = ((10, Weights(100.0, 0.0848863, 189.711, 1.21563e08)), (9, Weights(100.0, 0.194136, 193.1384, 4.36e07)),
           (0, Weights(100.0, 0.0666955, 467.815, 5.65307e07)))  # fmt: skip
"""By the least compute capability, the newest first."""


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of a product: how many, rows, columns, what is summed; bytes of what it reads and is summed in."""

    batch: int
    rows: int
    columns: int
    summed: int
    left_bytes: int
    right_bytes: int
    sum_bytes: int
    out_bytes: int


def product_of(eqn: Any) -> Product:
    """The sizes of a `dot_general`."""
    (summed, _), (batched, _) = eqn.params["dimension_numbers"]
    left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    batch, inner = (math.prod(left.shape[axis] for axis in axes) for axes in (batched, summed))
    rows, columns = (math.prod(aval.shape) // max(batch * inner, 1) for aval in (left, right))
    left_bytes, right_bytes, out_bytes = (int(aval.dtype.itemsize) for aval in (left, right, out))
    return Product(batch, rows, columns, inner, left_bytes, right_bytes, max(out_bytes, 4), out_bytes)


def n_parts(eqn: Any, gpu: Target) -> int:
    """In how many parts a GPU's compiler makes a product; 1 where it is made at once, or is none.

    Args:
        eqn: An equation.
        gpu: The GPU.
    """
    if eqn.primitive.name != "dot_general" or not gpu.n_cores:
        return 1
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return 1
    product = product_of(eqn)
    weights = next(weights for least, weights in WEIGHTS if gpu.capability[0] >= least)
    estimates = {parts: _estimate(product, parts, gpu.n_cores, weights) for parts in CHOICES}
    return min(CHOICES, key=estimates.__getitem__)


def padded(product: Product, parts: int) -> int:
    """The length of the summed axis when it is split."""
    step = parts * max(1, ALIGNED_BYTES // min(product.left_bytes, product.right_bytes))
    return math.ceil(product.summed / step) * step


def _estimate(p: Product, parts: int, n_cores: int, weights: Weights) -> float:
    """How long the compiler expects a product in parts to take, in units of its own."""
    rows, columns = min(p.rows, TILE), min(p.columns, TILE)
    tiles = p.batch * parts * -(-p.rows // TILE) * -(-p.columns // TILE)
    waves = max(1.0, tiles * rows * columns / (n_cores * TILE**2))
    compute = 2.0 * rows * columns * -(-p.summed // parts) * waves * weights.compute
    read = p.batch * p.summed * (p.rows * p.left_bytes + p.columns * p.right_bytes)
    made = p.batch * p.rows * p.columns
    written = made * parts * (p.sum_bytes if parts > 1 else p.out_bytes)
    estimate = max(compute, (read + written) * weights.memory)
    if parts == 1:
        return estimate
    return estimate + weights.start + (written + made * p.out_bytes) * weights.parts
