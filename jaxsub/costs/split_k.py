"""Predict split-K: a GPU's compiler splits the contracted axis of a product that has too few tiles for its cores.

Each part is a whole result in the accumulation type; a kernel after the product adds the parts up, or the consumers of
the result do. An axis that does not divide is padded, which copies both operands.

The compiler takes the number of parts with the least estimated time of the product and the sum. Its weights, by GPU
generation, are repeated here. Source: OpenXLA, `xla/backends/gpu/transforms/splitk_rewriter.cc`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxsub.costs.scheduler import Kernel
from jaxsub.devices.targets import Target
from jaxsub.jaxpr.trace import aval_bytes

PARTS = "parts"
"""With the product, the key of the buffer of a product's parts."""

TILE = 128
CHOICES: tuple[int, ...] = tuple(2**i for i in range(12))
ALIGNED_BYTES = 16
"""Each part of an operand's row is a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Factors of the compiler's estimate: for operations, bytes, bytes of parts, and the launch of the sum."""

    compute: float
    memory: float
    parts: float
    start: float


WEIGHTS = ((10, Weights(100.0, 0.0848863, 189.711, 1.21563e08)), (9, Weights(100.0, 0.194136, 193.1384, 4.36e07)),
           (0, Weights(100.0, 0.0666955, 467.815, 5.65307e07)))  # fmt: skip
"""By the least compute capability, the newest first."""


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of a product: batch, rows, columns, contracted length; bytes per element of operands and sums."""

    batch: int
    rows: int
    columns: int
    summed: int
    left_bytes: int
    right_bytes: int
    sum_bytes: int
    out_bytes: int


def is_part(buffer: Any) -> bool:
    """Tell whether a buffer holds the parts of a split-K product."""
    return isinstance(buffer, tuple) and buffer[1] == PARTS


def product_of(eqn: Any) -> Product:
    """Read the sizes of a `dot_general`."""
    (summed, _), (batched, _) = eqn.params["dimension_numbers"]
    left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    batch, inner = (math.prod(left.shape[axis] for axis in axes) for axes in (batched, summed))
    rows, columns = (math.prod(aval.shape) // max(batch * inner, 1) for aval in (left, right))
    left_bytes, right_bytes, out_bytes = (int(aval.dtype.itemsize) for aval in (left, right, out))
    return Product(batch, rows, columns, inner, left_bytes, right_bytes, max(out_bytes, 4), out_bytes)


def n_parts(eqn: Any, gpu: Target) -> int:
    """Predict into how many parts a GPU's compiler splits a product; 1 for no split and for other equations.

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
    """Compute the padded length of the contracted axis when it is split."""
    step = parts * max(1, ALIGNED_BYTES // min(product.left_bytes, product.right_bytes))
    return math.ceil(product.summed / step) * step


def kernels_in_parts(eqn: Any, position: int, reads: Sequence[Any], parts: int) -> list[Kernel]:
    """Make the kernels of a product in parts, copies of the variables that it reads among them where they are padded.

    The buffer of the parts is the pair of the product and `PARTS`.
    """
    v, product = eqn.outvars[0], product_of(eqn)
    length = padded(product, parts)
    copies = list(dict.fromkeys(reads)) if length > product.summed else []
    kernels = [Kernel(position, ((a, position),), frozenset([a]), (aval_bytes(a.aval) * length // product.summed,))
               for a in copies]  # fmt: skip
    size = parts * math.prod(v.aval.shape) * product.sum_bytes
    read = frozenset((a, position) for a in copies) or frozenset(reads)
    return [*kernels, Kernel(position, ((v, PARTS),), read, (size,))]


def _estimate(p: Product, parts: int, n_cores: int, weights: Weights) -> float:
    """Repeat the compiler's estimate of the time of a product in parts, in units of its own."""
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
