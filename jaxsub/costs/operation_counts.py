"""How many operations a GPU's compiler counts for elementwise work and reductions: `jaxsub.costs.priority_fusion`.

XLA has numbers of clock cycles per element, measured on a GPU of each generation; what it has no number for counts
`OTHER`. Its numbers for float32 are repeated here. Floats of 16 bits are computed in float32, but for the few
primitives that a GPU has for them, which count `OTHER`.

Source: OpenXLA, `xla/service/gpu/model/hlo_op_profiles_data.h` and `xla/service/gpu/gpu_float_support.cc`; the parts of
what XLA expands were counted in programs that it compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxsub.costs.fusible import is_reduction
from jaxsub.devices.targets import Target

OTHER = 3
COUNTS: Mapping[tuple[int, int], Mapping[str, int]] = {
    (7, 0): {"add": 6, "sub": 6, "mul": 6, "div": 21, "tanh": 269, "exp": 79, "expm1": 205, "log": 180, "log1p": 217,
             "sqrt": 76, "rsqrt": 76, "cbrt": 189, "sin": 373, "cos": 373, "atan2": 406, "pow": 673},
    (8, 0): {"tanh": 504, "log": 259, "pow": 1221},
    (8, 6): {"tanh": 190, "exp": 86, "expm1": 381, "log": 244, "log1p": 262, "sqrt": 75, "rsqrt": 75, "cbrt": 867,
             "sin": 662, "cos": 662, "atan2": 486, "pow": 925},
    (9, 0): {"add": 7, "sub": 7, "mul": 3, "div": 19, "tanh": 467, "exp": 79, "expm1": 190, "log": 166, "log1p": 229,
             "sqrt": 75, "rsqrt": 75, "cbrt": 178, "sin": 958, "cos": 978, "atan2": 431, "pow": 510},
    (10, 0): {"add": 7, "sub": 7, "mul": 7, "div": 23, "tanh": 137, "exp": 82, "expm1": 196, "log": 165, "log1p": 200,
              "sqrt": 74, "rsqrt": 74, "cbrt": 180, "sin": 990, "cos": 1002, "atan2": 373, "pow": 463, "erf": 161},
}  # fmt: skip
"""Operations per element in float32, by compute capability."""

DEFAULT = (8, 6)
"""The capability whose numbers stand for those of others."""

PARTS: Mapping[str, Mapping[str, int]] = {
    "add_any": {"add": 1},
    "reduce_sum": {"add": 1},
    "exp2": {"mul": 1, "exp": 1},
    "random_bits": {"xor": 116},
    "threefry2x32": {"xor": 116},
    "logistic": {"neg": 1, "exp": 1, "add": 1, "div": 1},
    "atan": {"atan2": 1},
    "erfc": {"mul": 51, "add": 21, "sub": 2, "div": 2, "exp": 1, "select_n": 10},
    "erf_inv": {"mul": 11, "add": 10, "log1p": 1, "sqrt": 1, "select_n": 16},
    "bessel_i1e": {"mul": 30, "add": 26, "sub": 22, "div": 1, "rsqrt": 1, "select_n": 4},
    "lgamma": {"mul": 3, "add": 22, "sub": 5, "div": 9, "log": 2, "log1p": 1, "sin": 1, "select_n": 13},
    "digamma": {"mul": 11, "add": 22, "sub": 10, "div": 19, "log1p": 1, "sin": 1, "cos": 1, "select_n": 11},
}
"""What XLA makes of some primitives, in terms of others."""

NARROW = frozenset("add add_any sub mul exp log".split())
"""Primitives that GPUs have for bfloat16, from compute capability 9 on."""


def operations(eqn: Any, gpu: Target) -> int:
    """Count the operations of elementwise work or of a reduction."""
    aval, name = (eqn.invars if is_reduction(eqn) else eqn.outvars)[0].aval, eqn.primitive.name
    size = math.prod(aval.shape)
    if aval.dtype == jnp.bfloat16 and gpu.capability >= (9, 0) and name in NARROW:
        return int(OTHER * size)
    counts = COUNTS.get(gpu.capability, COUNTS[DEFAULT])
    return int(size * sum(n * counts.get(part, OTHER) for part, n in PARTS.get(name, {name: 1}).items()))
