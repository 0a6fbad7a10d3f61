"""Compile for a GPU that is not there, in a helper process; out comes the compiler's account of memory.

In goes a function with its arguments and a `Target` with a spec. The function is exported here (`jax.export`, traced
on shapes alone) and compiled by XLA's whole GPU pipeline in a process of its own (`aot_worker.py`), because
JAX gives out compile-only devices only before its backends start, and only with the platform set to the CPU. So a
user's own session, its default device and its GPUs stay as they are. A helper is kept for the next program, there
are at most as many as cores, and they end with this process.

What it does not do: host callbacks and debug prints (they belong to a machine that is there); run anything.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.sharding import NamedSharding, PartitionSpec

from jaxsub.core.errors import UnsupportedError
from jaxsub.devices import aot_worker
from jaxsub.devices.targets import Target
from jaxsub.jaxpr.flops import jaxpr_flops

MAX_HELPERS = 4  # each takes some 400 MB
# Kernels as custom calls (cuDNN's, Pallas's, the FFI's) are not sure to be known to another jaxlib; ours reads its own.
ANY_KERNEL = (jax.export.DisabledSafetyCheck.custom_call("ALL"),)
NEEDS_DEVICES = "require devices to be present during lowering"
NO_HANDLER = "No FFI handler registered"
FOREIGN_CALL = (
    ". Such a call can be compiled only where its library is registered (jax.ffi.register_ffi_target): leave it out of "
    "what is planned, by a stand-in of the same shapes, or leave target out."
)
# Modules of which one must be there, and the package that brings the first.
NEEDED = (
    (("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "jax-cuda12-plugin"),
    (("nvidia.cuda_nvcc", "nvidia.cu13"), "nvidia-cuda-nvcc-cu12"),
    (("flatbuffers",), "flatbuffers"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class CrossCompiled:
    """A program that was compiled for a device that is not there: what is known of it, per device, in bytes.

    Its attributes are those of JAX's own account, which `memory_analysis` returns for a program that is there; `flops`
    are those of the traced program, on all devices together, loops with their lengths; `leaves_products` says whether
    cuBLAS runs all its products, since XLA found no tiles for one of them, or was not to write any.
    """

    temp_size_in_bytes: int
    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    host_temp_size_in_bytes: int
    flops: float
    leaves_products: bool = False

    def memory_analysis(self) -> CrossCompiled:
        """The account of memory: itself."""
        return self

    def cost_analysis(self) -> dict[str, float]:
        """FLOPs, counted in the traced program: XLA counts none for a device that is not there."""
        return {"flops": self.flops}


def cross_compile(
    jitted: Any, args: Sequence[Any], target: Target, kwargs: dict[str, Any] | None = None
) -> CrossCompiled:
    """Compile a jitted function for a GPU that is not there.

    Args:
        jitted: A function under `jax.jit`; its donations count.
        args: Its arguments, trees of arrays and shapes. Shardings over a mesh of the target's devices are kept,
            `target.mesh` makes one; what lies on one device is taken to lie on the target.
        target: The GPU.
        kwargs: Its keyword arguments, likewise.

    Raises:
        UnsupportedError: If the packages of `jaxsub[targets]` are not installed, or the program cannot be compiled for
            a device that is not there.
        ValueError: If the arguments are spread over another number of devices than the target has.

    References:
        JAX's documentation: "Exporting and serializing staged-out computations", "Ahead-of-time lowering and
        compilation".
    """
    require_packages()
    mesh = _mesh_of((args, kwargs), target)
    shapes, named = jax.tree.map(_unplaced, (tuple(args), kwargs or {}))
    traced = jitted.trace(*shapes, **named)
    donated = jax.tree.leaves(traced.args_info)
    flops = jaxpr_flops(traced.jaxpr).total
    try:
        program = _export(jitted, shapes, named, target)
    except UnsupportedError as error:
        if mesh is None or NEEDS_DEVICES not in str(error):
            raise
        return _compile_here(jitted, (shapes, named), target, mesh, flops)
    request = {
        "spec": target.spec,
        "n_devices": target.n_devices,
        "mesh": mesh,
        "donated": [index for index, info in enumerate(donated) if info.donated],
        "writes_products": target.writes_products,
        "n_bytes": len(program),
    }
    answer = _helpers(os.getpid()).ask(request, program)
    if "error" in answer:
        raise UnsupportedError(
            f"XLA cannot compile this program for `{target.name}`, which is not there: {answer['error']}"
            f"{FOREIGN_CALL if NO_HANDLER in answer['error'] else ''}"
        )
    return CrossCompiled(**answer, flops=flops)


def lowered_text(jitted: Any, args: Sequence[Any], target: Target, kwargs: dict[str, Any] | None = None) -> str:
    """What would be compiled, as text without source lines; arguments and errors as in `cross_compile`."""
    require_packages()
    shapes, named = jax.tree.map(_unplaced, (tuple(args), kwargs or {}))
    return str(jitted.trace(*shapes, **named).lower(lowering_platforms=(target.platform,)).as_text())


def require_packages(is_there: Callable[[str], bool] | None = None) -> None:
    """Check that programs can be compiled for a GPU that is not there.

    Args:
        is_there: Says whether a module is installed; `None` to look.

    Raises:
        UnsupportedError: If packages are missing.

    Example:
        >>> require_packages(lambda module: module != "flatbuffers")
        Traceback (most recent call last):
        jaxsub.core.errors.UnsupportedError: Compiling for a GPU that is not there needs flatbuffers...
    """
    is_there = is_there or _is_installed
    if missing := [package for modules, package in NEEDED if not any(map(is_there, modules))]:
        raise UnsupportedError(
            f"Compiling for a GPU that is not there needs {' and '.join(missing)}, not installed here. Run "
            'pip install "jaxsub[targets]", or leave target out to plan for the device in use.'
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package it would stand in
        return False


def _export(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target) -> bytes:
    try:
        exported = jax.export.export(jitted, platforms=[target.platform], disabled_checks=ANY_KERNEL)(*args, **kwargs)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(
            f"This program cannot be compiled for `{target.name}`, which is not there: {error} {_next_step(error)}"
        ) from error
    # The user's own tree types are unknown to the helper: arguments and results go in flat tuples.
    leaves = jax.tree.structure((tuple(exported.in_avals), {}))
    flat = dataclasses.replace(exported, in_tree=leaves, out_tree=jax.tree.structure(tuple(exported.out_avals)))
    return bytes(flat.serialize())


def _compile_here(
    jitted: Any, args: tuple[Any, dict[str, Any]], target: Target, mesh: dict[str, Any], flops: float
) -> CrossCompiled:
    """Compile in this process: what partitions itself over a mesh, as cuDNN's attention does, cannot be exported."""
    try:
        grid = aot_worker.mesh_over(aot_worker.devices_of(target.spec, target.n_devices), mesh)
    except (NotImplementedError, RuntimeError) as error:  # JAX started with the platform that the plugin is for
        raise UnsupportedError(
            f"A kernel in this program partitions itself over the mesh (cuDNN's attention does), so it is compiled for "
            f"`{target.name}` in this process, and JAX gives out such devices only where its platform is the CPU "
            f"({error}). Set JAX_PLATFORMS=cpu before JAX starts."
        ) from error

    def placed(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        spec = leaf.sharding.spec if leaf.sharding is not None else PartitionSpec()
        kind = leaf.sharding.memory_kind if leaf.sharding is not None else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(grid, spec, memory_kind=kind))

    shapes, named = jax.tree.map(placed, args)
    found = aot_worker.compile_lowered(jitted.lower(*shapes, **named), writes_products=target.writes_products)
    return CrossCompiled(**aot_worker.account(*found), flops=flops)


def _next_step(error: Exception) -> str:
    if "AbstractDevice" in str(error):  # from JAX 0.12 on Pallas asks which GPU there is where its kernel is traced
        return (
            "A Pallas kernel asks which GPU it is for: plan inside `with jax.sharding.use_abstract_mesh(mesh):`, mesh "
            '= jax.sharding.AbstractMesh((1,), ("device",), (jax.sharding.AxisType.Explicit,), abstract_device='
            'jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")), or its like.'
        )
    return "Host callbacks and debug prints cannot: leave them out of what is planned, or leave target out."


def _mesh_of(args: Any, target: Target) -> dict[str, Any] | None:
    """The mesh that the arguments are spread over, in words, or `None` if they are not."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    meshes = {s.mesh.abstract_mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1}
    if not meshes:
        return None
    mesh = meshes.pop()
    if meshes or mesh.size != target.n_devices:
        others = " and other meshes" if meshes else ""
        raise ValueError(
            f"the arguments are spread over {mesh}{others}, and target `{target.name}` has {target.n_devices} devices: "
            f'ask for "{target.name.split(":")[0]}:{mesh.size}" and use one mesh'
        )
    return {
        "names": list(mesh.axis_names),
        "sizes": list(mesh.axis_sizes),
        "types": [axis_type.name for axis_type in mesh.axis_types],
    }


def _unplaced(leaf: Any) -> Any:
    """An argument's shape without the device it lies on; one that is spread over a mesh keeps its sharding."""
    if not hasattr(leaf, "shape"):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    spread = sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spread, weak_type=getattr(leaf, "weak_type", False))


@functools.cache
def _helpers(process: int) -> _Helpers:
    """This process's helpers. The one piece of state here: starting a helper takes a second, a program often less."""
    helpers = _Helpers(min(MAX_HELPERS, os.cpu_count() or 1))
    atexit.register(helpers.close)
    return helpers


class _Helpers:
    """At most `n` helper processes, started when first needed, each with one program at a time."""

    def __init__(self, n: int):
        self.free: queue.LifoQueue[_Helper | None] = queue.LifoQueue()
        for _ in range(n):
            self.free.put(None)

    def ask(self, request: dict[str, Any], program: bytes) -> dict[str, Any]:
        """Have a program compiled; waits for a free helper."""
        helper, is_whole = self.free.get(), False
        try:
            if helper is not None and not helper.is_alive():
                helper.close()
                helper = None
            helper = helper or _Helper()
            answer = helper.ask(request, program)
            is_whole = True
        finally:  # one that was interrupted half-way would give its answer to the next request
            if helper is not None and not is_whole:
                helper.close()
            self.free.put(helper if is_whole else None)
        return answer

    def close(self) -> None:
        """End the helpers that are free."""
        while not self.free.empty():
            if (helper := self.free.get()) is not None:
                helper.close()


class _Helper:
    """One helper process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the helper)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("aot_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # the user's Ctrl-C is for this process alone
        )
        self._send(json.dumps({"path": sys.path, "parent": self.owner}).encode() + b"\n")

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: dict[str, Any], program: bytes) -> dict[str, Any]:
        self._send(json.dumps(request).encode() + b"\n" + program)
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it, unless it belongs to the process this one was forked from. It holds nothing worth saving."""
        if self.owner != os.getpid():
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            # What was not yet written is of no use to a process that has ended.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]

    def _send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error

    def _died(self) -> UnsupportedError:
        code = self.process.wait()
        self.log.seek(0)
        said = self.log.read().decode(errors="replace").strip().splitlines()[-12:]
        return UnsupportedError(
            f"The helper process that compiles for GPUs that are not there ended with code {code}"
            f"{' (was it killed for memory?)' if code == -9 else ''}. Its last lines:\n" + "\n".join(said)
        )
