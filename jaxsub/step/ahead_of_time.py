"""Steps compiled ahead of time that take more than arrays, such as modules: the stages of JAX, with such a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

Call = Callable[..., Any]
"""Calls what was compiled for arrays, its first argument, with the step's own arguments."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled step: `jax.stages.Compiled` in all but its call, which takes the step's own arguments.

    Static values are those that it was lowered with. Static arguments of `jaxsub.flax.nnx.jit` are left out of the
    call, as of `jax.jit`; other leaves than arrays are not looked at in that of `jaxsub.equinox.filter_jit`.

    Attributes:
        compiled: What JAX compiled, a function of arrays.
        call: Calls it with the step's own arguments.
    """

    compiled: jax.stages.Compiled
    call: Call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        return self.call(self.compiled, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A lowered step: `jax.stages.Lowered` in all but what it compiles to.

    Attributes:
        lowered: What JAX lowered, a function of arrays.
        call: Calls what is compiled with the step's own arguments.
    """

    lowered: jax.stages.Lowered
    call: Call

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compile it; arguments are those of `jax.stages.Lowered.compile`."""
        return Compiled(self.lowered.compile(*args, **kwargs), self.call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)
