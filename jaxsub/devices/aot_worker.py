"""Compile for absent GPUs in a process of its own: the script that `jaxsub.devices.aot` starts.

JAX provides compile-only devices only where its platform was set to the CPU before its backends started, and a user's
process may have started them already. Each request on stdin is a line of JSON, then a program as `jax.export`
serialises it; each answer on stdout is a line of JSON. The process ends with its stdin or, even during a compile, with
its parent.
"""

import functools
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

if __name__ == "__main__":  # before JAX is imported and can print anything
    ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    FOUND = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = FOUND["path"]

import jax
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

ATTENTION_BACKWARD = re.compile(r"__cudnn\$fmha\w*Backward")
NO_TILES = "output tile sizes"
ALIGNED = 256
"""Bytes that cuDNN's workspaces are aligned to: one of them more is asked for."""
MOST_KERNEL_BYTES = 2**26
"""XLA reads the whole cache in every compile."""
FIELDS = tuple(f"{what}_size_in_bytes" for what in ("temp", "argument", "output", "alias", "host_temp"))


@functools.cache
def devices_of(spec: str, n_devices: int) -> list[Any]:
    """Make the compile-only devices of one host."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=spec, topology=f"1x1x{n_devices}")
    return list(topology.devices)


def mesh_over(devices: list[Any], mesh: dict[str, Any]) -> Mesh:
    """Make a mesh over such devices from its description."""
    types = tuple(getattr(AxisType, name) for name in mesh["types"])
    grid = np.array(devices[: math.prod(mesh["sizes"])]).reshape(mesh["sizes"])
    return Mesh(grid, tuple(mesh["names"]), axis_types=types)


def shardings_of(exported: jax.export.Exported, devices: list[Any], mesh: dict[str, Any] | None) -> list[Any]:
    """List the sharding of each argument: the one device, or as exported over the mesh."""
    if mesh is None:
        return [SingleDeviceSharding(devices[0])] * len(exported.in_avals)
    made = mesh_over(devices, mesh)
    everywhere = NamedSharding(made, PartitionSpec())
    return [sharding or everywhere for sharding in exported.in_shardings_jax(made)]


def compile_lowered(
    lowered: Any, options: dict[str, Any] | None = None, *, writes_products: bool = True
) -> tuple[Any, bool]:
    """Compile; where XLA finds no tiles for a matrix product's kernel of its own, use cuBLAS for all products.

    With a GPU XLA tries such kernels and skips those that fail; without one it takes the first. Returns also whether
    cuBLAS runs its products; without `writes_products` XLA generates no kernels of products at all.
    """
    options = options or {}
    try:
        if writes_products:
            return lowered.compile(compiler_options=options), False
    except jax.errors.JaxRuntimeError as error:
        if NO_TILES not in str(error):
            raise
    return lowered.compile(compiler_options={**options, "xla_gpu_enable_triton_gemm": False}), True


def attention_workspace(query: Sequence[int], key: Sequence[int], value: Sequence[int], n_bytes: int) -> int:
    """Count the bytes that cuDNN's attention works with in its backward pass.

    With a GPU, XLA asks cuDNN for them when it compiles; without one it leaves them out. cuDNN sums the query's
    gradient and a term of each row in f32; where queries share keys, it makes the gradients of each query's own first.

    Args:
        query: Shape of the query's gradient: batch, heads, length, width.
        key: The same of the key's.
        value: The same of the value's.
        n_bytes: Bytes of one element.
    """
    batch, heads, length, width = query
    own = heads * key[2] * (key[3] + value[3]) * n_bytes if heads != key[1] else 0
    return batch * (heads * length * (width + 1) * 4 + own) + ALIGNED


def with_workspaces(lowered: Any) -> Any:
    """Give calls of cuDNN's attention in a lowered program the memory that they work with; it is changed in place."""
    for op in _operations(lowered.compiler_ir("stablehlo").operation):
        if op.name == "stablehlo.custom_call" and ATTENTION_BACKWARD.fullmatch(op.attributes["call_target_name"].value):
            query, key, value, *_, workspace = (ir.RankedTensorType(result.type) for result in op.results)
            dtype: Any = query.element_type
            n_bytes = attention_workspace(query.shape, key.shape, value.shape, dtype.width // 8)
            larger = ir.RankedTensorType.get([n_bytes], workspace.element_type, loc=op.location)
            op.results[len(op.results) - 1].set_type(larger)
    return lowered


def _operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def compile_program(program: bytes, request: dict[str, Any]) -> dict[str, Any]:
    """Compile a serialised program and return its memory analysis, in bytes per device."""
    exported = jax.export.deserialize(bytearray(program))
    shardings = shardings_of(exported, devices_of(request["spec"], request["n_devices"]), request["mesh"])
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    lowered = with_workspaces(jax.jit(exported.call, donate_argnums=tuple(request["donated"])).lower(*args))
    kernels = kernel_cache(request["kernels"])
    return account(*compile_lowered(lowered, kernels, writes_products=request["writes_products"]))


def kernel_cache(file: str) -> dict[str, Any]:
    """XLA's options for compiles that share their kernels: plans of one program have most in common.

    All but the first take a third less time, and allocate the same. A file that has grown large is begun anew.
    """
    if os.path.exists(file) and os.path.getsize(file) > MOST_KERNEL_BYTES:
        os.remove(file)
    return {"xla_gpu_kernel_cache_file": file}


def account(compiled: Any, leaves_products: bool) -> dict[str, Any]:
    """Read the memory analysis of a compiled program, in bytes per device, and whether cuBLAS runs its products."""
    memory = compiled.memory_analysis()
    return {name: int(getattr(memory, name)) for name in FIELDS} | {"leaves_products": leaves_products}


def end_with(process: int) -> None:
    """End this process soon after its parent has: a compile may take long, and nobody would read its answer."""
    while os.getppid() == process:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Answer a parent's requests until there are no more."""
    threading.Thread(target=end_with, args=[FOUND["parent"]], daemon=True).start()
    jax.config.update("jax_enable_x64", True)  # dtypes come with the program; none may be narrowed here
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot load programs for absent devices
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        program = sys.stdin.buffer.read(request["n_bytes"])
        try:
            answer = compile_program(program, request)
        except Exception as error:  # noqa: BLE001 (a process boundary: the parent raises any error)
            answer = {"error": f"{type(error).__name__}: {error}"}
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()


if __name__ == "__main__":
    main()
