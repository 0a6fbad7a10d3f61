"""Count an equation's FLOPs from its shapes alone, and tell whether it is costly.

There are two counts. `arithmetic_flops` are those of matrix products, convolutions and other costly primitives;
`elementwise_flops` are one for each element of a map or reduction. Planners weigh the second by `ELEMENTWISE_WEIGHT`:
the compiler fuses such work into its neighbours, so that recomputing it is nearly free. Loops count with their lengths,
unlike in the compiler's own cost analysis; a `while` loop, of unknown length, counts once; a conditional counts its
most expensive branch.

Factorisations of matrices count as LAPACK's algorithms do (Golub and Van Loan, 2013), Fourier transforms and sorts as
their sizes and the logarithms of these.

A fused kernel is opaque. cuDNN's attention is counted from its shapes; a Pallas kernel by its own cost estimate, or its
body once for each point of its grid; any other call (the FFI's) like a sort of its largest array, a guess.

Shapes are those of the jaxpr: under `shard_map` that is one device's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxsub.jaxpr import compat

ELEMENTWISE_WEIGHT = 0.02
"""Cost of recomputing an elementwise FLOP, as a share of one: fitted to compiled ResNets and GPTs."""

MOVES = frozenset(
    "reshape broadcast_in_dim transpose slice dynamic_slice dynamic_update_slice concatenate pad squeeze rev gather "
    "convert_element_type copy copy_p iota name optimization_barrier stop_gradient bitcast_convert_type "
    "sharding_constraint random_wrap random_unwrap expand_dims split reduce_precision device_put mesh_cast".split()
)
"""Primitives that move or rename elements and compute nothing."""

COSTLY = frozenset(
    "dot_general conv_general_dilated ragged_dot ragged_dot_general fft cholesky triangular_solve eigh eig svd qr "
    "lu householder_product geqrf geqp3 schur hessenberg tridiagonal sort top_k approx_top_k pallas_call ffi_call "
    "custom_call tridiagonal_solve scaled_matmul scaled_matmul_wrapper dot_product_attention_fwd_wrapper "
    "dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd_wrapper "
    "dot_product_attention_fp8_bwd_wrapper".split()
)
"""Primitives whose results §4.2 of Chen et al. (2016) saves: recompute costs their time."""

FACTORISATIONS: Mapping[str, Callable[[float, float], float]] = {
    "cholesky": lambda m, n: n**3 / 3,
    "lu": lambda m, n: n**2 * (m - n / 3),
    "qr": lambda m, n: 4 * n**2 * (m - n / 3),
    "geqrf": lambda m, n: 2 * n**2 * (m - n / 3),
    "geqp3": lambda m, n: 2 * n**2 * (m - n / 3),
    "householder_product": lambda m, n: 2 * n**2 * (m - n / 3),
    "hessenberg": lambda m, n: 10 * n**3 / 3,
    "tridiagonal": lambda m, n: 4 * n**3 / 3,
    "eigh": lambda m, n: 9 * n**3,
    "eig": lambda m, n: 25 * n**3,
    "schur": lambda m, n: 25 * n**3,
    "svd": lambda m, n: 6 * m * n**2 + 20 * n**3,
}
"""FLOPs of one matrix of `m` rows and `n` columns, or the other way round, `m` no fewer: with the vectors or the matrix
that it returns."""


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one execution, by kind."""

    arithmetic_flops: float = 0.0
    elementwise_flops: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.arithmetic_flops + other.arithmetic_flops, self.elementwise_flops + other.elementwise_flops)

    def times(self, n: float) -> Flops:
        """Multiply by a number of executions."""
        return Flops(self.arithmetic_flops * n, self.elementwise_flops * n)

    @property
    def weighted(self) -> float:
        """The figure that planners minimise."""
        return self.arithmetic_flops + ELEMENTWISE_WEIGHT * self.elementwise_flops

    @property
    def total(self) -> float:
        """All FLOPs, of either kind."""
        return self.arithmetic_flops + self.elementwise_flops


def flops_of(eqn: Any) -> Flops:
    """Count the FLOPs of one equation.

    Example:
        >>> import jax
        >>> eqn = jax.make_jaxpr(lambda a, b: a @ b)(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 4))).eqns[0]
        >>> flops_of(eqn).arithmetic_flops
        48.0
    """
    name = eqn.primitive.name
    if name in MOVES:
        return Flops()
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        return Flops(_dot_flops(eqn))
    if name == "conv_general_dilated":
        return Flops(_conv_flops(eqn))
    if name.startswith("dot_product_attention_"):
        return Flops(_attention_flops(eqn))
    if name == "pallas_call" and getattr(eqn.params.get("cost_estimate"), "flops", None) is not None:
        return Flops(float(eqn.params["cost_estimate"].flops))
    bodies = bodies_of(eqn)
    if bodies:
        return _body_flops(eqn, bodies)
    size = float(max([_size(v.aval) for v in (*eqn.outvars, *eqn.invars)], default=0))
    if name in COSTLY:
        return Flops(_costly_flops(eqn, size))
    return Flops(elementwise_flops=size)


def jaxpr_flops(jaxpr: Any) -> Flops:
    """Count the FLOPs of a jaxpr, every equation once."""
    return sum((flops_of(eqn) for eqn in jaxpr.eqns), Flops())


def is_costly(eqn: Any) -> bool:
    """Tell whether an equation is costly, itself or in an inner program."""
    return any(name in COSTLY for name in primitives_in(eqn))


def primitives_in(eqn: Any) -> Iterator[str]:
    """Yield the names of an equation's primitive and of those in its inner programs."""
    return (inner.primitive.name for inner, _ in walk([eqn]))


def walk(eqns: Sequence[Any], times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield equations and those of their inner programs, each with how many steps of loops it runs."""
    for eqn in eqns:
        yield eqn, times
        steps = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in bodies_of(eqn):
            yield from walk(body.eqns, times * steps)


def bodies_of(eqn: Any) -> tuple[Any, ...]:
    """Find the inner programs that run with an equation: loop bodies, branches, functions with custom rules."""
    found: list[Any] = []
    for key, param in compat.unwrapped(eqn)[1].items():
        if type(param) in _PLAIN or key in ("jvp_jaxpr_fun", "cond_jaxpr"):
            continue
        for entry in param if isinstance(param, tuple | list) else (param,):
            if type(entry) not in _PLAIN and hasattr(entry, "eqns"):
                found.append(entry)
    return tuple(found)


_PLAIN = frozenset((type(None), bool, int, float, str, np.dtype))
"""Types of parameters that hold no program: skipping them saves most of the time."""


def _body_flops(eqn: Any, bodies: tuple[Any, ...]) -> Flops:
    counts = [jaxpr_flops(body) for body in bodies]
    if eqn.primitive.name == "cond":
        return max(counts, key=lambda c: c.weighted)
    if eqn.primitive.name == "scan":
        return counts[0].times(eqn.params["length"])
    if eqn.primitive.name == "pallas_call":
        return sum(counts, Flops()).times(_grid_points(eqn))
    return sum(counts, Flops())


def _dot_flops(eqn: Any) -> float:
    lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
    if eqn.primitive.name != "dot_general":
        return 2.0 * _size(out) * float(lhs.shape[-1])
    (contracting, _), _ = eqn.params["dimension_numbers"]
    return 2.0 * _size(out) * float(math.prod(lhs.shape[d] for d in contracting))


def _costly_flops(eqn: Any, size: float) -> float:
    """Count what is neither a product nor a convolution; `size` is that of the largest array."""
    name = eqn.primitive.name
    shape = list[int](eqn.invars[0].aval.shape if eqn.invars else ())
    if name in FACTORISATIONS:
        n, m = sorted(shape[-2:])
        return math.prod(shape[:-2]) * FACTORISATIONS[name](float(m), float(n))
    if name == "triangular_solve":
        return float(_size(eqn.outvars[0].aval) * shape[-1])
    if name == "fft":
        return 5 * size * math.log2(max(2, math.prod(eqn.params["fft_lengths"])))
    length = shape[eqn.params["dimension"]] if name == "sort" else size
    return size * max(1.0, math.log2(max(length, 2)))


def _attention_flops(eqn: Any) -> float:
    """Count two products of queries with keys or values forward, five backward; half of each if causal."""
    queries, keys = eqn.invars[0].aval, eqn.invars[1].aval
    n_keys = float(keys.shape[2 if eqn.params.get("layout") else 1])
    products = 2 if "_fwd" in eqn.primitive.name else 5
    is_halved = "CAUSAL" in str(eqn.params.get("mask_type"))
    return 2.0 * products * _size(queries) * n_keys / (2 if is_halved else 1)


def _grid_points(eqn: Any) -> int:
    """Count the runs of a Pallas kernel's body; a dynamic grid counts once."""
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    return math.prod(n for n in grid if isinstance(n, int))


def _conv_flops(eqn: Any) -> float:
    kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
    out_features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * _size(out) * _size(kernel) / float(max(out_features, 1))


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))
