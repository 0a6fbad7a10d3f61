"""Compile a function for a target and measure the memory that the compiler allocates.

A function with its arguments, arrays or `jax.ShapeDtypeStruct`s, goes in; a `Measurement` comes out. Nothing is run.
This is safe inside a user's own trace, since the function is traced on shapes alone.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxsub.core.errors import UnsupportedError
from jaxsub.core.measurement import Measurement
from jaxsub.devices.aot import NEEDS_DEVICES, cross_compile, lower
from jaxsub.devices.targets import Target, get_target
from jaxsub.jaxpr.compat import cpu_measuring_options

LONG_SECONDS = 10.0
"""A compile that takes longer is announced, and its freed memory is returned to the system."""


class Compiled(Protocol):
    """A compiled program; `jax.stages.Compiled` is one."""

    def memory_analysis(self) -> Any:
        """Return the compiler's memory analysis, or `None`."""

    def cost_analysis(self) -> Any:
        """Return the compiler's cost analysis, or `None`."""


def compile_for(
    fun: Callable[..., Any], args: Sequence[Any], target: Target | None = None, *, donate_argnums: tuple[int, ...] = ()
) -> Compiled:
    """Compile a function for a target to measure its memory: on the CPU its code is not optimised for running.

    A function under `jax.jit` keeps its shardings and donations; `target=None` is the device in use. Of an absent
    device only the memory analysis comes back; `UnsupportedError` where it cannot be compiled for.
    """
    target = get_target(target)
    jitted: Any = fun if hasattr(fun, "lower") else jax.jit(fun, donate_argnums=donate_argnums)
    if not target.is_present:
        return cross_compile(jitted, args, target)
    options = cpu_measuring_options() if target.platform == "cpu" else {}
    placed = jax.tree.map(lambda leaf: _place(leaf, target), tuple(args))
    with jax.default_device(target.device):
        compiled: Compiled = jitted.lower(*placed).compile(compiler_options=options or None)
    return compiled


def lower_for(fun: Callable[..., Any], args: Sequence[Any], target: Target) -> Any:
    """Lower a function of shapes for a target; over an abstract mesh only what partitions itself needs its devices."""
    jitted: Any = jax.jit(fun)
    if not target.is_present:
        return lower(jitted, args, target)
    try:
        return jitted.trace(*args).lower(lowering_platforms=(target.platform,))
    except ValueError as error:
        if NEEDS_DEVICES not in str(error):
            raise
    return jitted.lower(*jax.tree.map(lambda leaf: _place(leaf, target), tuple(args)))


def measurement(compiled: Compiled, target: Target, seconds: float) -> Measurement:
    """Read the memory that the compiler allocates for a program; `UnsupportedError` if it does not report any."""
    memory = compiled.memory_analysis()
    if memory is None or not hasattr(memory, "temp_size_in_bytes"):
        raise UnsupportedError(
            f"The compiler for `{target.name}` ({target.platform}) does not report what it allocates, so no budget can "
            'be verified there. Pass verify=False to use the prediction, or target="cpu" to measure on the CPU.'
        )
    costs: Any = compiled.cost_analysis()
    costs = costs[0] if isinstance(costs, list) and costs else costs
    flops = float(costs.get("flops", -1.0)) if costs else -1.0  # below zero where XLA cannot count
    return Measurement(
        temp_bytes=int(memory.temp_size_in_bytes),
        argument_bytes=int(memory.argument_size_in_bytes),
        output_bytes=int(memory.output_size_in_bytes),
        alias_bytes=int(memory.alias_size_in_bytes),
        flops=flops if 0 <= flops < math.inf else None,
        compile_seconds=seconds,
        target=target.name,
        host_temp_bytes=int(getattr(memory, "host_temp_size_in_bytes", 0)),
    )


def measure_compiled(
    fun: Callable[..., Any], args: Sequence[Any], target: Target | None = None, *, donate_argnums: tuple[int, ...] = ()
) -> Measurement:
    """Compile a function for a target and measure the memory it needs; as `compile_for`."""
    target = get_target(target)
    start = time.perf_counter()
    compiled = compile_for(fun, args, target, donate_argnums=donate_argnums)
    seconds = time.perf_counter() - start
    if seconds > LONG_SECONDS:
        return_freed_memory()
    return measurement(compiled, target, seconds)


def return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps it for the threads that freed it, and others allocate more."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _place(leaf: Any, target: Target) -> Any:
    """Drop another device from an argument; one that is sharded over several devices stays so."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh) and sharding.mesh.size > 1:
        where = NamedSharding(_mesh_here(sharding.mesh, target), sharding.spec, memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding) and target.device not in sharding.device_set:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    return leaf


def _mesh_here(mesh: AbstractMesh, target: Target) -> Mesh:
    """Make a mesh of the first present devices of the target's platform."""
    assert target.device is not None
    devices = jax.devices(target.device.platform)
    if len(devices) < mesh.size:
        raise UnsupportedError(
            f"The arguments are sharded over {mesh.size} devices, and {len(devices)} of `{target.name}` are present. "
            f'Pass a target that has as many, such as target="h100:{mesh.size}".'
        )
    return Mesh(np.array(devices[: mesh.size]).reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)
