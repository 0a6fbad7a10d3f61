"""How much longer work takes in slices, and how many rows a slice should have.

A slice reads each weight twice and its running gradient twice again, in float32: with 2-byte weights 12 bytes for 6
FLOPs a row. As many rows as keep the target's arithmetic busy meanwhile are needed, rounded up to a power of two: 1,024
on an H100 in bfloat16, and fewer on a CPU. Each slice after the first adds that time to the run's, on a CPU only where
it has fewer rows, for what more rows make stays in its cache; and on a GPU what its kernels take however little they do
(`jaxsub.costs.roofline.KERNEL_SECONDS`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxsub.core.decisions import Slices
from jaxsub.costs.roofline import KERNEL_SECONDS, eqns_seconds
from jaxsub.devices.targets import Target
from jaxsub.jaxpr.flops import bodies_of, is_costly
from jaxsub.jaxpr.trace import Program

PASSES = 3
"""Forward passes that a gradient takes: a backward pass is two."""

TILE_ROWS = 128
"""Rows of a GPU's tile of a product: of fewer, a product takes as long."""


def least_rows(target: Target, dtype: str = "bfloat16") -> int:
    """Count the rows of a product of a dtype below which slices cost time; see the module.

    Example:
        >>> from jaxsub.devices.targets import get_target
        >>> [least_rows(get_target("h100"), dtype) for dtype in ("bfloat16", "float32")]
        [1024, 512]
    """
    return int(2 ** math.ceil(math.log2(busy_rows(target, dtype))))


def busy_rows(target: Target, dtype: str = "bfloat16") -> float:
    """Count the rows at which a product takes as long as to read its weights and add to their gradients.

    A CPU computes in float32.
    """
    dtype = "float32" if target.platform == "cpu" else dtype
    weight_bytes = jnp.dtype(dtype).itemsize
    return target.rate(dtype, is_matmul=True) / target.bytes_per_second * (2 * weight_bytes + 8) / 6


@dataclass(frozen=True, slots=True)
class SliceTime:
    """How much longer a further slice takes, as a share of a program's forward pass; `slice_time` makes it.

    Attributes:
        row_seconds: What each FLOP of a forward pass takes longer, times rows of a slice.
        kernel_seconds: What a kernel takes however little it does.
        forward_seconds: What the program's forward pass takes.
        cached_rows: Of so many rows in a slice products take no longer, on a CPU.
    """

    row_seconds: float = 0.0
    kernel_seconds: float = 0.0
    forward_seconds: float = 1.0
    cached_rows: float = math.inf

    def share(self, flops: float, rows: int, n_kernels: int, count: int = 2) -> float:
        """What each further slice costs: its weights are read once more, their gradients added to, all launched.

        Args:
            flops: FLOPs of the run's forward pass.
            rows: Rows of its products, in all slices together.
            n_kernels: Kernels of its forward pass.
            count: How many slices there are.
        """
        row_seconds = self.row_seconds if rows < self.cached_rows * count else 0.0
        seconds = flops * row_seconds / max(rows, 1) + n_kernels * self.kernel_seconds
        return PASSES * seconds / self.forward_seconds


NO_TIME = SliceTime()
"""Of slices that cost nothing, or whose time nobody asks for."""


def slice_time(program: Program, target: Target, dtype: str) -> SliceTime:
    """What slices of a program's runs cost on a target, their products of a dtype."""
    forward = eqns_seconds(program.eqns, program.invars, program.outvars, target)
    rows = busy_rows(target, dtype) / target.rate(dtype, is_matmul=True)
    if not forward:
        return NO_TIME
    if target.platform == "cpu":
        return SliceTime(rows, 0.0, forward, least_rows(target, dtype))
    return SliceTime(rows, KERNEL_SECONDS * target.n_devices, forward)


def product_dtype(program: Program) -> str:
    """The dtype of the operands of most of a program's products, by FLOPs; float32 without any."""
    flops: dict[str, float] = {}
    for node, eqn in zip(program.graph.nodes, program.eqns, strict=True):
        dtypes = [str(product.invars[0].aval.dtype) for product in _products([eqn])]
        for dtype in dtypes:
            flops[dtype] = flops.get(dtype, 0.0) + node.flops / len(dtypes)
    return max(flops, key=flops.__getitem__, default="float32")


def _products(eqns: Iterable[Any]) -> Iterator[Any]:
    """The costly equations among some, and in the bodies of loops and calls."""
    for eqn in eqns:
        if bodies := bodies_of(eqn):
            yield from (product for body in bodies for product in _products(body.eqns))
        elif is_costly(eqn):
            yield eqn


def has_slow_convolutions(program: Program, target: Target, runs: Iterable[Slices]) -> bool:
    """Whether runs hold convolutions that would run in a loop on a CPU: XLA makes those of gradients fast elsewhere.

    `ConvCanonicalization` of XLA's CPU compiler rewrites the entry computation; other layouts are naive loops.
    """
    eqns = (eqn for run in runs if not run.within for eqn in program.eqns[run.start : run.stop])
    return target.platform == "cpu" and any(eqn.primitive.name == "conv_general_dilated" for eqn in eqns)
