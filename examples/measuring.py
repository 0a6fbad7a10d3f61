"""What comparisons measure, and what they compare with by hand: one account of both for all benchmarks.

Bytes are the target's compiler's. FLOPs are the CPU compiler's count, for targets that are not there too.
Of programs with loops it counts each body once; `traced_flops` counts loops with their lengths.

By hand, a network's blocks are wrapped in `jax.checkpoint`: each, every 2, 4 or √n together, nested, in recursive
halves (jax PR 4363), and each with one of JAX's policies, or one that saves what convolutions make.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

import jaxsub
from jaxsub.devices.targets import Target, get_target
from jaxsub.jaxpr.flops import jaxpr_flops

Count = Callable[[Callable, tuple[Any, ...]], float | None]
ONE_FORWARD_PASS = 4 / 3
"""FLOPs of a gradient that runs its forward pass twice, over those of the plain one: a backward pass takes two."""


@dataclass(frozen=True, slots=True)
class ByHand:
    """A wrapper that goes round blocks, and how many blocks it goes round; a tuple nests."""

    label: str
    wrap: Callable
    every: int | tuple[int, ...] = 1


def by_hand(n_blocks: int, is_convolutional: bool) -> Iterator[ByHand]:
    """Everything that is written by hand round `n_blocks` blocks, nothing twice."""
    root = math.isqrt(n_blocks)
    for n in dict.fromkeys((1, 2, 4, root)):
        yield ByHand(f"every {n}", jax.checkpoint, n)
    yield ByHand(f"every {root}, nested", jax.checkpoint, (root, 1))
    halves = tuple(n_blocks >> level for level in range(1, n_blocks.bit_length()) if n_blocks >> level)
    yield ByHand("recursive halving", jax.checkpoint, halves)
    if is_convolutional:
        yield ByHand("convolutions saved", partial(jax.checkpoint, policy=convolutions_saveable))
        return
    for name in ("dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable"):
        yield ByHand(name, partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, name)))


def convolutions_saveable(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save what convolutions make."""
    return primitive.name == "conv_general_dilated"


def device(target: str) -> str | None:
    """What `jaxsub` calls a target; the CPU is where it runs."""
    return None if target == "cpu" else target


def compiled(
    fun: Callable, args: tuple[Any, ...], target: str | Target | None = None, count: Count | None = None
) -> dict[str, Any]:
    """Bytes of the compiled gradient for a target, its FLOPs, and how long the compile took.

    Args:
        fun: The function.
        args: Its arguments.
        target: What to compile for; `None` for the CPU.
        count: Counts FLOPs where the target's compiler does not; `None` for the CPU's compiler.
    """
    found = jaxsub.measure(fun, *args, target=target)
    return figures(found, fun, args, count)


def within(
    fun: Callable, args: tuple[Any, ...], budget: float, target: str | None = None, count: Count | None = None
) -> dict[str, Any]:
    """The same of a function under a budget, and what its plan says; the least known where the budget is refused."""
    try:
        plan = jaxsub.plan(fun, *args, budget=budget, target=target, progress=False)
    except jaxsub.InfeasibleBudgetError as refusal:
        return {"least_bytes": refusal.least_bytes}
    planned = jaxsub.sublinear(fun, plan=plan)
    in_loops = {"flops_ratio": traced_flops(planned, args) / traced_flops(fun, args)} if plan.slices else {}
    return {
        **figures(plan.measurement, planned, args, count),
        **in_loops,  # a compiler counts a loop's body once
        "predicted_bytes": plan.prediction.temp_bytes if plan.prediction else None,
        "extra": plan.prediction.extra_flops / plan.prediction.forward_flops if plan.prediction else None,
        "regions": plan.n_regions,
    }


def figures(found: jaxsub.Measurement, fun: Callable, args: tuple[Any, ...], count: Count | None) -> dict[str, Any]:
    """Bytes, FLOPs and seconds of what was measured."""
    flops = found.flops if get_target(found.target).is_present else (count or cpu_flops)(fun, args)
    return {"bytes": found.temp_bytes, "flops": flops, "compile_seconds": found.compile_seconds}


def cpu_flops(fun: Callable, args: tuple[Any, ...]) -> float | None:
    """FLOPs of the gradient as the CPU's compiler counts them."""
    return jaxsub.measure(fun, *args).flops


def traced_flops(fun: Callable, args: tuple[Any, ...]) -> float:
    """FLOPs of products and convolutions in the traced gradient, loops counted with their lengths."""
    return jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(fun))(*args)).arithmetic_flops


def processor_seconds() -> float:
    """Processor seconds of this process and of those that it started: helpers that compile for a GPU run on."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds)) + sum(_of_the_living())


def _of_the_living() -> Iterator[float]:
    """Yield the processor seconds of each process that this one has started and that has not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended by now
            found = path.read_text().rpartition(")")[2].split()
            if int(found[1]) == os.getpid():
                yield sum(map(int, found[11:15])) / os.sysconf("SC_CLK_TCK")
