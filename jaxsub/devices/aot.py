"""Compile for an absent GPU in a helper process, and return the compiler's memory analysis.

A function with its arguments and a `Target` with a spec go in. The function is exported here (`jax.export`, traced on
shapes alone) and compiled by XLA's whole GPU pipeline in a process of its own (`aot_worker.py`), because JAX has
compile-only devices only before its backends start, and only with the platform set to the CPU. So the user's session,
default device and GPUs stay as they are. Helpers are kept for later programs; there are at most as many as cores, and
they end with this process.

Host callbacks and debug prints are not called: their results stand for them. Nothing is run.
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
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.sharding import NamedSharding, PartitionSpec

from jaxsub.core.errors import UnsupportedError
from jaxsub.devices import aot_worker
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import jaxpr_flops

MAX_HELPERS = 4  # each takes some 400 MB
# JAX does not promise that another jaxlib knows custom calls (cuDNN's, Pallas's, the FFI's); ours reads its own export.
ANY_KERNEL = (jax.export.DisabledSafetyCheck.custom_call("ALL"),)
NEEDS_DEVICES = "require devices to be present during lowering"
FATAL = re.compile(r"F\d{4} |LLVM ERROR|terminate called")
NO_HANDLER = "No FFI handler registered"
FOREIGN_CALL = (
    ". Such a call compiles only where its library is registered (jax.ffi.register_ffi_target): replace it in the "
    "planned function by a stand-in of the same shapes, or leave target out."
)
# Modules of which one must be installed, and the package of the first.
NEEDED = (
    (("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "jax-cuda12-plugin"),
    (("nvidia.cuda_nvcc", "nvidia.cu13"), "nvidia-cuda-nvcc-cu12"),
    (("flatbuffers",), "flatbuffers"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class CrossCompiled:
    """The memory of a program that was compiled for an absent device, in bytes per device.

    Its attributes are those of JAX's `memory_analysis()`. `flops` are those of the traced program, on all devices
    together, loops with their lengths. `leaves_products` says whether cuBLAS runs all products, because XLA found no
    tiles for one of them or the target forbids XLA's own kernels.
    """

    temp_size_in_bytes: int
    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    host_temp_size_in_bytes: int
    flops: float
    leaves_products: bool = False

    def memory_analysis(self) -> CrossCompiled:
        """Return itself, which has the attributes of JAX's memory analysis."""
        return self

    def cost_analysis(self) -> dict[str, float]:
        """Return the FLOPs of the traced program: XLA counts none for an absent device."""
        return {"flops": self.flops}


def cross_compile(
    jitted: Any, args: Sequence[Any], target: Target, kwargs: dict[str, Any] | None = None
) -> CrossCompiled:
    """Compile a function under `jax.jit` for an absent GPU; its donations count.

    Shardings of the arguments over a mesh of the target's devices are kept (`target.mesh` makes one); an array on a
    single device counts as on the target. `UnsupportedError` if the packages of `jaxsub[targets]` are not installed,
    the arguments are sharded over another number of devices, or the program cannot be compiled for an absent device.

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
            f"XLA cannot compile this program for the absent `{target.name}`: {_in_short(answer['error'])}"
            f"{FOREIGN_CALL if NO_HANDLER in answer['error'] else ''}"
        )
    return CrossCompiled(**answer, flops=flops)


def lower(jitted: Any, args: Sequence[Any], target: Target, kwargs: dict[str, Any] | None = None) -> Any:
    """Lower for an absent GPU; arguments and errors as in `cross_compile`, whose packages only some programs need."""
    mesh = _mesh_of((args, kwargs), target)
    shapes, named = jax.tree.map(_unplaced, (tuple(args), kwargs or {}))
    try:
        with _without_callbacks():
            return jitted.trace(*shapes, **named).lower(lowering_platforms=(target.platform,))
    except ValueError as error:
        if mesh is None or NEEDS_DEVICES not in str(error):
            raise
        require_packages()
        return _lowered_here(jitted, (shapes, named), target, mesh)


def require_packages(is_installed: Callable[[str], bool] | None = None) -> None:
    """Refuse where packages that compile for an absent GPU are not installed; `is_installed` says which are."""
    is_installed = is_installed or _is_installed
    if missing := [package for modules, package in NEEDED if not any(map(is_installed, modules))]:
        raise UnsupportedError(
            f"Compiling for an absent GPU needs {' and '.join(missing)}, not installed here. Run "
            'pip install "jaxsub[targets]", or leave target out to plan for the device in use.'
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False


def _export(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target) -> bytes:
    try:
        with _without_callbacks():
            export = jax.export.export(jitted, platforms=[target.platform], disabled_checks=ANY_KERNEL)
            exported = export(*args, **kwargs)
        # the helper knows neither the user's own tree types nor effects: arguments and results go in flat tuples
        leaves = jax.tree.structure((tuple(exported.in_avals), {}))
        results = jax.tree.structure(tuple(exported.out_avals))
        flat = dataclasses.replace(exported, in_tree=leaves, out_tree=results, unordered_effects=())
        return bytes(flat.serialize())
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(
            f"This program cannot be compiled for the absent `{target.name}`: {error} {_next_step(error)}"
        ) from error


def _compile_here(
    jitted: Any, args: tuple[Any, dict[str, Any]], target: Target, mesh: dict[str, Any], flops: float
) -> CrossCompiled:
    """Compile in this process: what partitions itself over a mesh, as cuDNN's attention does, cannot be exported."""
    found = aot_worker.compile_lowered(
        _lowered_here(jitted, args, target, mesh), writes_products=target.writes_products
    )
    return CrossCompiled(**aot_worker.account(*found), flops=flops)


def _lowered_here(jitted: Any, args: tuple[Any, dict[str, Any]], target: Target, mesh: dict[str, Any]) -> Any:
    """Lower for a mesh of the target's devices as this process has them."""
    try:
        grid = aot_worker.mesh_over(aot_worker.devices_of(target.spec, target.n_devices), mesh)
    except (NotImplementedError, RuntimeError) as error:  # JAX started with the platform that the plugin is for
        raise UnsupportedError(
            f"A kernel in this program partitions itself over the mesh (cuDNN's attention does), so it must compile "
            f"for `{target.name}` in this process, where JAX provides such devices only if its platform is the CPU "
            f"({error}). Set JAX_PLATFORMS=cpu before JAX starts."
        ) from error

    def placed(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        spec = leaf.sharding.spec if leaf.sharding is not None else PartitionSpec()
        kind = leaf.sharding.memory_kind if leaf.sharding is not None else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(grid, spec, memory_kind=kind))

    shapes, named = jax.tree.map(placed, args)
    with _without_callbacks():
        return jitted.lower(*shapes, **named)


def _without_callbacks() -> contextlib.AbstractContextManager[None]:
    """Leave host callbacks out, unless JAX can lower them: for a GPU where one is in use."""
    return contextlib.nullcontext() if jax.default_backend() == "gpu" else compat.callbacks_left_out()


def _in_short(error: str) -> str:
    """XLA's error with the first line of source that it suspects: the rest is how we came there."""
    said, _, places = error.partition("Suspected Python Code Location:")
    first = places.strip().split("\n")[0].strip()
    return f"{said.strip()} ({first})" if first else said.strip()


def _next_step(error: Exception) -> str:
    if "AbstractDevice" in str(error):  # from JAX 0.12 on, tracing a Pallas kernel needs to know the GPU
        return (
            "A Pallas kernel needs to know its GPU: plan inside `with jax.sharding.use_abstract_mesh(mesh):`, mesh "
            '= jax.sharding.AbstractMesh((1,), ("device",), (jax.sharding.AxisType.Explicit,), abstract_device='
            'jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")), or its like.'
        )
    return "Leave it out of the function (callbacks that are ordered cannot be exported), or leave target out."


def only_mesh(shardings: Iterable[Any], target: Target) -> Any:
    """Find the mesh that arguments are sharded over, `None` without one; refuse several, or one of another size."""
    meshes = {s.mesh.abstract_mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1}
    if not meshes:
        return None
    mesh = meshes.pop()
    if meshes or mesh.size != target.n_devices:
        others = " and other meshes" if meshes else ""
        raise UnsupportedError(
            f"The arguments are sharded over {mesh.size} devices ({mesh}){others}, and `{target.name}` has "
            f'{target.n_devices}. Pass target="{target.name.split(":")[0]}:{mesh.size}" and use one mesh.'
        )
    return mesh


def _mesh_of(args: Any, target: Target) -> dict[str, Any] | None:
    """Describe the mesh that the arguments are sharded over; `None` if they are not sharded."""
    mesh = only_mesh((getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)), target)
    return mesh and {
        "names": list(mesh.axis_names),
        "sizes": list(mesh.axis_sizes),
        "types": [axis_type.name for axis_type in mesh.axis_types],
    }


def _unplaced(leaf: Any) -> Any:
    """Make an argument's shape without its device; one that is sharded over a mesh keeps its sharding."""
    if not hasattr(leaf, "shape"):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    kept = sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kept, weak_type=getattr(leaf, "weak_type", False))


@functools.cache
def _helpers(process: int) -> _Helpers:
    """Make this process's helpers, the only state here: starting one takes a second, a program often less."""
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
        """Compile a program in a free helper; wait for one."""
        helper, is_whole = self.free.get(), False
        try:
            if helper is not None and not helper.is_alive():
                helper.close()
                helper = None
            helper = helper or _Helper()
            answer = helper.ask(request, program)
            is_whole = True
        finally:  # an interrupted helper would answer the next request with this one's result
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
        self.folder = tempfile.TemporaryDirectory(prefix="jaxsub-")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("aot_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C must interrupt the user's process alone
        )
        self._send(json.dumps({"path": sys.path, "parent": self.owner}).encode() + b"\n")

    @property
    def kernels(self) -> str:
        """The file in which its compiles share kernels."""
        return str(Path(self.folder.name, "kernels"))

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: dict[str, Any], program: bytes) -> dict[str, Any]:
        self._send(json.dumps({**request, "kernels": self.kernels}).encode() + b"\n" + program)
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it, unless it belongs to the process that this one was forked from."""
        if self.owner != os.getpid():
            return
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):  # unwritten data is of no use to an ended process
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
        return UnsupportedError(how_it_ended(code, self.log.read().decode(errors="replace")))


def how_it_ended(code: int, log: str) -> str:
    """Say why a helper process has ended, from its exit code and all that it wrote."""
    lines = log.strip().splitlines()
    if fatal := next((line for line in reversed(lines) if FATAL.match(line)), ""):
        return (
            f"XLA's compiler gave up on this program, as it would on the GPU itself: {fatal!r}. XLA_FLAGS may turn off "
            "what it names, such as --xla_gpu_enable_triton_gemm=false what Triton compiles."
        )
    cause = " (was it killed for memory?)" if code == -9 else ""
    said = "\n".join(lines[-12:])
    return f"The helper process that compiles for absent GPUs ended with code {code}{cause}. Its last lines:\n{said}"
