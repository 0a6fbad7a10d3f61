"""JAX's CUDA plugin on a machine without a GPU."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

# Any of these files means that an NVIDIA driver is installed: on Linux, on Linux under Windows, on Jetson.
NVIDIA_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")


def quiet_cuda_plugin(drivers: Sequence[str] = NVIDIA_DRIVERS) -> None:
    """Suppress the traceback that JAX prints on a machine without a GPU if `jaxsub[targets]` is installed.

    The extra installs JAX's CUDA plugin, to compile with. Without a driver (none of the files `drivers`) the plugin
    cannot start, and JAX prints a long traceback unless a platform was chosen. Only then this keeps it from starting:
    the device in use stays the CPU. Call it before JAX's first use.
    """
    if any(map(os.path.exists, drivers)):
        return
    for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        try:
            plugin: Any = importlib.import_module(name)
        except ImportError:
            continue
        if not hasattr(plugin.initialize, "__wrapped__"):
            plugin.initialize = _only_if_asked(plugin.initialize)


def _only_if_asked(initialize: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(initialize)
    def initialize_if_asked() -> None:
        if getattr(jax.config, "jax_platforms", None):
            initialize()

    return initialize_if_asked
