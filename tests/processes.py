"""The environment of processes that tests start: they compile as quickly as the tests themselves do."""

import os

QUICK_FLAGS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
"""Let XLA emit a CPU's code as it did before, where it still can, and in one piece: half the time, same buffers."""


def quickly(n_devices=1):
    """Settings with which a process compiles quickly, for so many CPU devices; what a program allocates is the same."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS} --xla_force_host_platform_device_count={n_devices}"
    return {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags}
