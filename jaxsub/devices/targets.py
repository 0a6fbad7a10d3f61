"""Devices one can compile for, present or not, and their public figures.

A `Target` is plain data: a name, the platform, the published memory, bandwidth and arithmetic rates, and, for an absent
GPU, XLA's text description of it. `get_target` finds one by name (`"h200"`, `"h100:8"`, `"cpu"`), by a path to such a
description, from a `jax.Device`, or for the device in use.

The figures are peaks from datasheets, without sparsity, as a roofline needs; programs do not reach them. Those of a CPU
are nominal. Nothing here compiles; `jaxsub.devices.compile` does.
"""

# pyright: reportInvalidTypeForm=false
# jax.Device comes from compiled code
from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

GIB = 2**30
Rates = tuple[tuple[str, float], ...]

# FLOPs per clock and streaming multiprocessor on tensor cores, dense, f32 accumulate, by compute capability: for GPUs
# known only by a spec. From NVIDIA's architecture papers (V100, Turing, A100, GA102, Ada, H100). GeForce does half.
TENSOR_FLOPS_PER_CLOCK: Mapping[tuple[int, int], Mapping[str, int]] = {
    (7, 0): {"float16": 1024},
    (7, 5): {"float16": 1024},
    (8, 0): {"float16": 2048, "bfloat16": 2048, "tfloat32": 1024},
    (8, 6): {"float16": 1024, "bfloat16": 1024, "tfloat32": 512},
    (8, 9): {"float16": 1024, "bfloat16": 1024, "tfloat32": 512},
    (9, 0): {"float16": 4096, "bfloat16": 4096, "tfloat32": 2048, "float8": 8192},
}


@dataclass(frozen=True, slots=True)
class Target:
    """A device to compile for.

    Attributes:
        name: Its name, such as `h200`.
        platform: `cpu`, `cuda`, or what JAX calls its platform.
        memory_bytes: Memory of one device; of a present GPU, the part that JAX may allocate.
        bytes_per_second: Bandwidth of that memory.
        flops_per_second: FLOPs per second outside tensor cores, by dtype name.
        tensor_flops_per_second: FLOPs per second of matrix products on tensor cores, by dtype name (`tfloat32` for
            f32 at XLA's default precision); empty where there are none.
        pcie_bytes_per_second: Bandwidth between one device and the host, in one direction.
        n_devices: How many devices a program is sharded over.
        n_cores: Streaming multiprocessors of one device; 0 of other devices.
        capability: Its compute capability.
        spec: XLA's description of an absent GPU, as a text proto; `None` for a present device.
        device: The device, if it is present.
        origin: Where the figures come from: `datasheet`, `spec` (computed from it) or `nominal` (a guess: of a CPU,
            or of a GPU that is not in the table, for which the A100's figures are used).
        writes_products: Whether XLA may generate kernels of matrix products itself; otherwise cuBLAS runs them all. It
            always may on a present device.
    """

    name: str
    platform: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: Rates
    tensor_flops_per_second: Rates = ()
    pcie_bytes_per_second: float = 16e9
    n_devices: int = 1
    n_cores: int = 0
    capability: tuple[int, int] = (0, 0)
    spec: str | None = None
    device: jax.Device | None = None
    origin: str = "datasheet"
    writes_products: bool = True

    @property
    def is_present(self) -> bool:
        """Whether the device is present; for an absent one programs can be compiled but not run."""
        return self.spec is None

    @property
    def gpu(self) -> Target | None:
        """The target itself, or `None` for a CPU."""
        return None if self.platform == "cpu" else self

    def rate(self, dtype: str, *, is_matmul: bool) -> float:
        """Look up the FLOPs per second for a dtype.

        Args:
            dtype: A dtype's name, such as `bfloat16`.
            is_matmul: Whether the work is matrix products or convolutions, which run on tensor cores. Those in f32
                count as `tfloat32`, which XLA uses on GPUs by default.

        Example:
            >>> get_target("h100").rate("bfloat16", is_matmul=True)
            989500000000000.0
            >>> get_target("h100").rate("float64", is_matmul=False)
            33500000000000.0
        """
        family = re.sub(r"^(float8|int4|int8).*", r"\1", dtype)
        if is_matmul:
            tensor = dict(self.tensor_flops_per_second)
            name = "tfloat32" if family == "float32" else family
            if name in tensor:
                return tensor[name]
        vector = dict(self.flops_per_second)
        return vector.get(family, vector["float32"])

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.AbstractMesh:
        """Make a mesh over a target's devices, for the shardings of `jax.ShapeDtypeStruct` arguments.

        Args:
            shape: How many devices along each axis; their product is `n_devices`.
            names: The axes' names.

        Raises:
            ValueError: If the product is not `n_devices`.

        Example:
            >>> mesh = get_target("h100:8").mesh((8,), ("data",))
            >>> sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
            >>> jax.ShapeDtypeStruct((64, 32), "float32", sharding=sharding).sharding.shard_shape((64, 32))
            (8, 32)
        """
        mesh = jax.sharding.AbstractMesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
        if mesh.size != self.n_devices:
            raise ValueError(
                f"a mesh of shape {shape} has {mesh.size} devices, and target `{self.name}` has {self.n_devices}; "
                f'pass target="{self.name.split(":")[0]}:{mesh.size}"'
            )
        return mesh


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One row of the table below; units as in the datasheets, rates in TFLOP/s."""

    product: str
    capability: tuple[int, int]
    n_cores: int
    clock_ghz: float
    memory_gib: float
    memory_gb_per_second: float
    l2_mib: float
    shared_kib: int
    shared_optin_kib: int
    threads_per_core: int
    fpus_per_core: int
    vector: Mapping[str, float]
    tensor: Mapping[str, float]
    pcie_gb_per_second: float


# Peaks without sparsity, from NVIDIA's datasheets and architecture papers, at boost clock:
# - H200, H100 SXM: "NVIDIA H200 Tensor Core GPU Datasheet", "NVIDIA H100 Tensor Core GPU Datasheet" and the Hopper
#   architecture paper (sparse figures halved); A100 SXM: "NVIDIA A100 Tensor Core GPU Datasheet";
# - V100 SXM2: "NVIDIA V100 Tensor Core GPU Datasheet"; T4: "NVIDIA T4 Datasheet" and the Turing architecture paper;
# - L4: "NVIDIA L4 Tensor Core GPU Datasheet" (sparse figures halved);
# - RTX 4090, RTX 3090: the Ada and GA102 architecture papers, appendix A, tensor rates with f32 accumulate.
# Cores, caches and shared memory: the same papers and the CUDA C++ Programming Guide's table of compute capabilities.
# Compared with public tables of these figures: glennklockwood.com/garden/processors (H100, A100: cores, bandwidth,
# rates by dtype), archive-lib.hpctech.co.jp (H100: caches, shared memory), aiminingco.com (H200: memory, and that the
# rest is the H100's), sysrqmts.com (A100, V100, T4: cores, clocks, bandwidth, caches, rates), fpsbench.com (L4; some
# tables give it the 60 cores of the whole die), thefpsreview.com (RTX 4090), igorslab.de (RTX 3090: cores and rate).
_HOPPER: dict[str, Any] = {
    "vector": {"float32": 66.9, "float64": 33.5, "float16": 133.8, "bfloat16": 133.8},
    "tensor": {"float16": 989.5, "bfloat16": 989.5, "tfloat32": 494.7, "float8": 1979, "int8": 1979, "float64": 66.9},
    "pcie_gb_per_second": 64,
}
_AMPERE: dict[str, Any] = {
    "vector": {"float32": 19.5, "float64": 9.7, "float16": 78, "bfloat16": 39},
    "tensor": {"float16": 312, "bfloat16": 312, "tfloat32": 156, "int8": 624, "float64": 19.5},
    "pcie_gb_per_second": 32,
}
_VOLTA: dict[str, Any] = {
    "vector": {"float32": 15.7, "float64": 7.8, "float16": 31.4},
    "tensor": {"float16": 125},
    "pcie_gb_per_second": 16,
}
_GPUS: Mapping[str, _Gpu] = {
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 1.98, 141, 4800, 50, 228, 227, 2048, 128, **_HOPPER),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 80, 3350, 50, 228, 227, 2048, 128, **_HOPPER),
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 80, 2039, 40, 164, 163, 2048, 64, **_AMPERE),
    "a100-40gb": _Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41, 40, 1555, 40, 164, 163, 2048, 64, **_AMPERE),
    "v100": _Gpu("Tesla V100-SXM2-16GB", (7, 0), 80, 1.53, 16, 900, 6, 96, 96, 2048, 64, **_VOLTA),
    "v100-32gb": _Gpu("Tesla V100-SXM2-32GB", (7, 0), 80, 1.53, 32, 900, 6, 96, 96, 2048, 64, **_VOLTA),
    "l4": _Gpu("NVIDIA L4", (8, 9), 58, 2.04, 24, 300, 48, 100, 99, 1536, 128,
               {"float32": 30.3, "float64": 0.473, "float16": 30.3, "bfloat16": 30.3},
               {"float16": 121, "bfloat16": 121, "tfloat32": 60, "float8": 242.5, "int8": 242.5}, 32),
    "t4": _Gpu("Tesla T4", (7, 5), 40, 1.59, 16, 320, 4, 64, 64, 1024, 64,
               {"float32": 8.1, "float64": 0.254, "float16": 16.2}, {"float16": 65, "int8": 130}, 16),
    "rtx4090": _Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 24, 1008, 72, 100, 99, 1536, 128,
                    {"float32": 82.6, "float64": 1.29, "float16": 82.6, "bfloat16": 82.6},
                    {"float16": 165.2, "bfloat16": 165.2, "tfloat32": 82.6, "float8": 330.3, "int8": 660.6}, 32),
    "rtx3090": _Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695, 24, 936, 6, 100, 99, 1536, 128,
                    {"float32": 35.6, "float64": 0.556, "float16": 35.6, "bfloat16": 35.6},
                    {"float16": 71, "bfloat16": 71, "tfloat32": 35.6, "int8": 284}, 32),
}  # fmt: skip
NAMES = tuple(_GPUS)


def get_target(target: str | os.PathLike[str] | jax.Device | Target | None = None) -> Target:
    """Find a target.

    Args:
        target: A name (`"cpu"`, `"h200"`, `"h100"`, `"a100"`, `"v100"`, `"l4"`, `"t4"`, `"rtx4090"`, `"rtx3090"`,
            `"a100-40gb"`, `"v100-32gb"`), followed by `":8"` for several devices of one host; a path to a file with
            XLA's text description of a GPU; a present device; a target, which is returned; or `None` for the device in
            use.

    Raises:
        ValueError: If there is no such name or file, or the file describes no GPU.

    Example:
        >>> get_target("h100:8").n_devices
        8
        >>> get_target("cpu").platform
        'cpu'
    """
    if isinstance(target, Target):
        return target
    if target is None:
        return _present(_default_device())
    if isinstance(target, jax.Device):
        return _present(target)
    if isinstance(target, os.PathLike):
        return read_spec(Path(target))
    if not isinstance(target, str):
        raise ValueError(f"cannot read the target {target!r} of type {type(target).__name__}. {_forms()}")
    name, _, count = target.strip().lower().partition(":")
    if name in _GPUS:
        return _absent(name, _GPUS[name], _count(target, count))
    if name == "cpu" and not count:
        return _present(jax.local_devices(backend="cpu")[0])
    if Path(target).is_file():
        return read_spec(Path(target))
    raise ValueError(f"there is no target {target!r}. {_forms()}")


def is_gpu(platform: str) -> bool:
    """Tell whether a platform, by JAX's name, is GPUs.

    Example:
        >>> is_gpu("cuda"), is_gpu("cpu")
        (True, False)
    """
    return platform in ("cuda", "rocm", "gpu")


def read_spec(path: Path) -> Target:
    """Read a target from XLA's text description of a GPU (a `GpuTargetConfigProto`).

    Its rates are computed from the number of cores, the clock and the compute capability.

    Raises:
        ValueError: If the file lacks a needed field.
    """
    text = path.read_text(encoding="utf-8")
    fields = dict(re.findall(r"(\w+)\s*:\s*([0-9.eE+]+)", text))
    needed = ("core_count", "fpus_per_core", "clock_rate_ghz", "memory_bandwidth", "device_memory_size")
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(f"{path} is no description of a GPU that XLA can compile for: it lacks {', '.join(missing)}")
    capability = re.search(r"cuda_compute_capability\s*\{\s*major\s*:\s*(\d+)(?:\s*minor\s*:\s*(\d+))?", text)
    version = (int(capability[1]), int(capability[2] or 0)) if capability else (0, 0)
    per_clock = TENSOR_FLOPS_PER_CLOCK.get(version, {})
    clocks = float(fields["core_count"]) * float(fields["clock_rate_ghz"]) * 1e9
    described = re.search(r'device_description_str\s*:\s*"([^"]+)"', text)
    share = 0.5 if described and "GeForce" in described[1] else 1.0
    return Target(
        name=described[1] if described else path.stem,
        platform="cuda",
        memory_bytes=int(fields["device_memory_size"]),
        bytes_per_second=float(fields["memory_bandwidth"]),
        flops_per_second=(("float32", 2 * clocks * float(fields["fpus_per_core"])),),
        tensor_flops_per_second=tuple((dtype, share * clocks * flops) for dtype, flops in per_clock.items()),
        n_cores=int(float(fields["core_count"])),
        capability=version,
        spec=text,
        origin="spec",
    )


def _absent(name: str, gpu: _Gpu, n_devices: int) -> Target:
    return replace(
        _figures(name, gpu),
        name=name if n_devices == 1 else f"{name}:{n_devices}",
        n_devices=n_devices,
        spec=_spec(gpu),
    )


def _figures(name: str, gpu: _Gpu) -> Target:
    return Target(
        name=name,
        platform="cuda",
        memory_bytes=int(gpu.memory_gib * GIB),
        bytes_per_second=gpu.memory_gb_per_second * 1e9,
        flops_per_second=tuple((dtype, tera * 1e12) for dtype, tera in gpu.vector.items()),
        tensor_flops_per_second=tuple((dtype, tera * 1e12) for dtype, tera in gpu.tensor.items()),
        pcie_bytes_per_second=gpu.pcie_gb_per_second * 1e9,
        n_cores=gpu.n_cores,
        capability=gpu.capability,
    )


def _spec(gpu: _Gpu) -> str:
    """Write XLA's description of a GPU, with only the fields that its compiler needs: it refuses unknown ones."""
    major, minor = gpu.capability
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_kib * 1024}
  shared_memory_per_block_optin: {gpu.shared_optin_kib * 1024}
  core_count: {gpu.n_cores} fpus_per_core: {gpu.fpus_per_core} clock_rate_ghz: {gpu.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.memory_gb_per_second * 1e9)} l2_cache_size: {int(gpu.l2_mib * 2**20)}
  device_memory_size: {int(gpu.memory_gib * GIB)}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{gpu.product}"
"""


def _present(device: jax.Device) -> Target:
    if device.platform == "cpu":
        return Target("cpu", "cpu", _host_bytes(), device=device, origin="nominal", **_cpu_rates())
    platform = "cuda" if device.platform in ("gpu", "cuda") else device.platform
    words = re.split(r"[ -]+", device.device_kind.lower())
    names = [*map("".join, itertools.pairwise(words)), *words]
    name = next((name for name in names if name in _GPUS), None)
    figures = _figures(name, _GPUS[name]) if name else _figures(device.device_kind, _GPUS["a100"])
    figures = replace(figures, origin="datasheet" if name else "nominal")
    limit = (device.memory_stats() or {}).get("bytes_limit", figures.memory_bytes)
    return replace(figures, platform=platform, memory_bytes=int(limit), device=device)


def _default_device() -> jax.Device:
    """Find the device that an uncommitted program would run on."""
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    if chosen is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_rates() -> dict[str, Any]:
    """Assume nominal rates: a core does two 8-wide f32 multiply-adds per clock at 2.5 GHz; memory has 20 GB/s."""
    flops = (os.cpu_count() or 1) * 2 * 8 * 2 * 2.5e9
    return {"bytes_per_second": 20e9, "flops_per_second": (("float32", flops), ("float64", flops / 2))}


def _count(target: str, count: str) -> int:
    if count and not (count.isdigit() and int(count) > 0):
        raise ValueError(f"cannot read the number of devices of the target {target!r}. {_forms()}")
    return int(count or 1)


def _forms() -> str:
    return (
        f'Pass one of "cpu", {", ".join(f"{name!r}" for name in NAMES)}, followed by ":8" for eight devices; '
        "a path to XLA's text description of a GPU; a jax.Device; or None for the device in use."
    )
