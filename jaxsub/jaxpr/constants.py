"""Arrays that a function closes over: constants of the user's compiled program, which XLA may fold.

A traced program goes in; its constants that JAX does not trace come out, and what of their values decides what is
compiled. They are inputs of the program all the same: of the measured gradient alone they are none.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxsub.jaxpr.shardings import sharding_of
from jaxsub.jaxpr.trace import Program, remembered

MOST_FOLDED = 45 * 2**20
"""Elements of the largest constant that XLA folds (`kMaximumConstantSizeElements`)."""


def known_constants(program: Program) -> dict[int, Any]:
    """The arrays that a function closes over, by input; not those that JAX traces, nor those over several devices.

    What is too large for XLA to fold counts as an argument: a copy of it in each measured program helps nobody.
    """
    return {i: const for i, (const, variable) in enumerate(zip(program.consts, program.invars, strict=False))
            if not isinstance(const, jax.core.Tracer) and sharding_of(const) is None
            and math.prod(variable.aval.shape) <= MOST_FOLDED}  # fmt: skip


@remembered
def constants_key(program: Program) -> str:
    """What of known constants decides memory: which they are, and which repeat one value, that XLA broadcasts."""
    return repr({i: _is_uniform(const) for i, const in known_constants(program).items()})


def _is_uniform(const: Any) -> bool:
    if jnp.issubdtype(jnp.result_type(const), jax.dtypes.extended):  # keys of random numbers
        return False
    values = np.asarray(const)
    return values.size > 0 and bool((values == values.flat[0]).all())
