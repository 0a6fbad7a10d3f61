"""Rules of primitives: which dimension of each operand and result carries an independent axis.

An axis of `n` units is independent in an equation that treats it as a batch: some units are computed without the
others. A `Place` names the dimension of a value that carries the axis, and its elements for each unit (more than one
after a reshape that merged a following dimension into it). A `Total` is a result that is summed over slices. A rule
takes the places of an equation's operands, `None` for those that do not carry the axis, at least one not `None`. It
returns the needs of all operands (it may need further operands in slices) and the places of the results, or raises
`NoRule`. It is exact: a slice's result is the slice of the result, to the last bit except for the order of sums.

Primitives with inner jaxprs are in `jaxsub.jaxpr.axis_bodies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis_places import Coarser, NoRule, Place, Rule, Ruled, State, Total, reshaped
from jaxsub.jaxpr.random_bits import is_of_threefry, needs_of_part
from jaxsub.jaxpr.shardings import has_explicit_axes

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex "
    "conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge "
    "gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max "
    "min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow pvary real "
    "reduce_precision regularized_incomplete_beta rem reshard round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta".split()
)
"""Primitives of which each element of a result depends only on the elements at the same index."""

LINALG = frozenset("cholesky lu qr eigh eig svd schur hessenberg tridiagonal householder_product geqrf".split())
"""Primitives that work on matrices in the last two dimensions of their first operand, one by one."""

WINDOWS = frozenset(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add "
    "select_and_gather_add".split()
)
POINT = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}
"""A window of one element."""


def rule_of(eqn: Any) -> Rule | None:
    """The rule of an equation's primitive, if it has one and no jaxpr inside."""
    name = compat.unwrapped(eqn)[0].name
    return _scatter if name.startswith("scatter") else RULES.get(name)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _one(ins: Sequence[Place | None]) -> Place:
    """The place that all operands which carry the axis agree on."""
    places = {place for place in ins if place is not None}
    if len(places) > 1:
        raise NoRule("its operands carry the axis in different dimensions")
    return places.pop()


def _alike(eqn: Any, ins: Sequence[Place | None], n: int) -> tuple[Place, list[Place | None]]:
    """The operands' one place, and what is needed of each: the same where it has the axis in its shape."""
    place = _one(ins)
    shapes = map(_shape, eqn.invars)
    return place, [place if len(s) > place.dim and s[place.dim] == n * place.unit else None for s in shapes]


def _elementwise(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    place, needs = _alike(eqn, ins, n)
    return needs, [place] * len(eqn.outvars)


def _broadcast(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    place = _first_only(ins)
    return list(ins), [Place(eqn.params["broadcast_dimensions"][place.dim], place.unit)]


def _first_only(ins: Sequence[Place | None]) -> Place:
    """The first operand's place, where no other operand carries the axis."""
    place, *rest = ins
    if place is None or any(rest):
        raise NoRule("what says where it works carries the axis")
    return place


def _reshape(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    place = _first_only(ins)
    if eqn.params.get("dimensions") is not None:
        raise NoRule("it transposes too")
    return list(ins), [reshaped(place, _shape(eqn.invars[0]), _shape(eqn.outvars[0]), n)]


def _transpose(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    place = _one(ins)
    return list(ins), [Place(tuple(eqn.params["permutation"]).index(place.dim), place.unit)]


def _without(place: Place, dims: Sequence[int]) -> Place:
    return Place(place.dim - sum(d < place.dim for d in dims), place.unit)


def _stack(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    place, needs = _alike(eqn, ins, n)
    return needs, [Place(place.dim + (place.dim >= eqn.params["axis"]), place.unit)]


def _unstack(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    place = _other_than(ins, [eqn.params["axis"]], "takes it apart along the axis")
    return list(ins), [_without(place, [eqn.params["axis"]])] * len(eqn.outvars)


def _other_than(ins: Sequence[Place | None], dims: Sequence[int], why: str) -> Place:
    place = _one(ins)
    if place.dim in dims:
        raise NoRule(f"it {why}")
    return place


def _unless(is_along: Callable[[Any, Place, int], bool], why: str) -> Rule:
    """The rule of what returns the axis where its operands have it, unless it works along the axis."""

    def rule(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
        if is_along(eqn, _one(ins), n):
            raise NoRule(f"it {why}")
        return _elementwise(eqn, ins, n)

    return rule


def _along(param: str, why: str) -> Rule:
    """The rule of what works along one dimension, or several, that a parameter says."""
    return _unless(lambda eqn, at, n: at.dim in np.atleast_1d(eqn.params[param]).tolist(), why)


def _sizes(eqn: Any, at: Place) -> tuple[int, int]:
    """The length of a dimension of the first operand, and of the first result."""
    return _shape(eqn.invars[0])[at.dim], _shape(eqn.outvars[0])[at.dim]


def _has_no_mesh(eqn: Any, at: Place, n: int) -> bool:
    return getattr(eqn.params["sharding"], "spec", None) is None


def _draws_together(eqn: Any, at: Place, n: int) -> bool:
    """Whether what keys give depends on other keys: generators but threefry may use the first of them for all."""
    keys = [v for v in (*eqn.invars, *eqn.outvars) if jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)]
    return at.dim >= max(v.aval.ndim for v in keys) or not all(map(is_of_threefry, keys))


def _reaches(eqn: Any, at: Place, n: int) -> bool:
    """Whether a window is more than one element along the axis."""
    return any(eqn.params.get(param) and eqn.params[param][at.dim] != value for param, value in POINT.items())


def _triangular_solve(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    """Matrices one by one; or the columns of the right-hand side (rows, where that is on the left) of one matrix."""
    matrix, given = ins
    first = len(_shape(eqn.invars[1])) - 2
    if matrix is None and given is not None and given.dim == first + eqn.params["left_side"]:
        return list(ins), [given]
    if _one(ins).dim >= first:
        raise NoRule("it works on matrices along the axis")
    return _elementwise(eqn, ins, n)


def _reduce(how: str | None) -> Rule:
    """The rule of a reduction, and how its results over slices are put together, if they can be."""

    def rule(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
        place = _one(ins)
        if place.dim not in eqn.params["axes"]:
            return list(ins), [_without(place, eqn.params["axes"])]
        if how is None:
            raise NoRule("it reduces over the axis, and not by a sum")
        return list(ins), [Total(how)]

    return rule


def _general_reduce(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    half = len(ins) // 2
    if any(ins[half:]):
        raise NoRule("what it starts from carries the axis")
    place = _other_than(ins, eqn.params["dimensions"], "reduces over the axis by a function of the user's")
    return [place] * half + [None] * half, [_without(place, eqn.params["dimensions"])] * len(eqn.outvars)


def first_units(eqn: Any, ins: Sequence[State]) -> int | None:
    """How many units a slice takes, if these are the first ones of the axis and not all of them."""
    place = ins[0] if eqn.primitive.name == "slice" else None
    if not isinstance(place, Place):
        return None
    start, stop = (eqn.params[name][place.dim] for name in ("start_indices", "limit_indices"))
    is_dense = not eqn.params["strides"] or eqn.params["strides"][place.dim] == 1
    whole = _shape(eqn.invars[0])[place.dim]
    n_units, rest = divmod(stop, place.unit)
    return n_units if start == 0 and is_dense and stop < whole and rest == 0 and n_units > 1 else None


def _update(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    place = _one(ins[:2]) if any(ins[:2]) else None
    if place is None or any(ins[2:]):
        raise NoRule("what says where it works carries the axis")
    operand, update = map(_shape, eqn.invars[:2])
    if update[place.dim] != operand[place.dim]:
        raise NoRule("it writes a part of the axis")
    return [place, place, *ins[2:]], [place]


def _dot(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    contracted, batch = eqn.params["dimension_numbers"]
    sides = []
    for operand, cs, bs in zip(eqn.invars, contracted, batch, strict=True):
        sides.append([d for d in range(len(_shape(operand))) if d not in cs and d not in bs])
    for here, place in enumerate(ins):
        if place is None:
            continue
        there, needs = 1 - here, list(ins)
        for paired, result in ((batch, None), (contracted, Total())):
            if place.dim in paired[here]:
                at = tuple(paired[here]).index(place.dim)
                needs[there] = Place(paired[there][at], place.unit)
                if ins[there] not in (None, needs[there]):
                    raise NoRule("its operands carry the axis in different dimensions")
                return needs, [result or Place(at, place.unit)]
        if ins[there] is None:
            first = len(batch[0]) + (len(sides[0]) if here else 0)
            return needs, [Place(first + sides[here].index(place.dim), place.unit)]
    raise NoRule("it multiplies every part of the axis with every other")


def _conv(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    params, (left, right) = eqn.params, ins
    dims = params["dimension_numbers"]
    is_grouped = params["feature_group_count"] != 1
    if params["batch_group_count"] != 1:
        raise NoRule("its batch is in groups")
    if right is None and left is not None and left.dim == dims.lhs_spec[0]:
        return list(ins), [Place(dims.out_spec[0], left.unit)]
    if left is None and right is not None and right.dim == dims.rhs_spec[0] and not is_grouped:
        return list(ins), [Place(dims.out_spec[1], right.unit)]
    unit = (left or right or Place(0)).unit
    needs = [Place(dims.lhs_spec[1], unit), Place(dims.rhs_spec[1], unit)]
    if is_grouped or any(a not in (None, b) for a, b in zip(ins, needs, strict=True)):
        raise NoRule("it convolves along the axis")
    return needs, [Total()]


def _gather(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    dims, (operand, indices) = eqn.params["dimension_numbers"], ins
    pairs = list(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
    shape, n_indices = _shape(eqn.invars[0]), len(_shape(eqn.invars[1])) - 1
    batch = [d for d in range(len(_shape(eqn.outvars[0]))) if d not in dims.offset_dims]
    for a, b in pairs:
        if (operand and operand.dim == a) or (indices and indices.dim == b):
            unit = (operand or indices or Place(0)).unit
            needs = [Place(a, unit), Place(b, unit)]
            if any(x not in (None, y) for x, y in zip(ins, needs, strict=True)):
                raise NoRule("its operands carry the axis in different dimensions")
            return needs, [Place(batch[b], unit)]
    if operand is None and indices is not None and indices.dim < n_indices:
        return list(ins), [Place(batch[indices.dim], indices.unit)]
    if indices is not None or operand is None:
        raise NoRule("its indices and what they point into carry the axis")
    d, taken = operand.dim, eqn.params["slice_sizes"]
    if d in dims.collapsed_slice_dims or d in dims.start_index_map or taken[d] != shape[d]:
        raise NoRule("it takes elements along the axis")
    window = [k for k in range(len(shape)) if k not in (*dims.collapsed_slice_dims, *dims.operand_batching_dims)]
    return list(ins), [Place(dims.offset_dims[window.index(d)], operand.unit)]


def _scatter(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    dims, place = eqn.params["dimension_numbers"], next(p for p in ins if p is not None)
    operand, _, updates = map(_shape, eqn.invars)
    pairs = dict(zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True))
    window = [d for d in range(len(operand)) if d not in (*dims.inserted_window_dims, *pairs)]
    scattered = [d for d in range(len(updates)) if d not in dims.update_window_dims]
    found: list[tuple[Place, Place | None, Place]] = [
        (Place(a, place.unit), Place(b, place.unit), Place(scattered[b], place.unit)) for a, b in pairs.items()
    ]
    found += [
        (Place(d, place.unit), None, Place(u, place.unit))
        for d, u in zip(window, dims.update_window_dims, strict=True)
        if updates[u] == operand[d] and d not in dims.scatter_dims_to_operand_dims
    ]
    for needs in found:
        if all(a is None or a == b for a, b in zip(ins, needs, strict=True)):
            return needs, [needs[0]]
    raise NoRule("it writes elements along the axis")


def _cudnn_attention(eqn: Any, ins: Sequence[Place | None], n: int) -> Ruled:
    """Attention kernels of cuDNN, forward and backward, along the batch in front of queries, keys and values."""
    params = eqn.params
    if params["dropout_rate"] or params.get("score_mod") is not None:
        raise NoRule("it draws random bits inside, or calls a function of the user's")
    if any(place not in (None, Place(0)) for place in ins) or any(params["variadic_args"]):
        raise NoRule("its kernel works on whole sequences and heads, or sums over the batch")
    needs = [Place(0) if _shape(a)[:1] == (n,) else None for a in eqn.invars]
    if any(place is not None and need is None for place, need in zip(ins, needs, strict=True)):
        raise NoRule("its kernel works on whole sequences and heads")
    return needs, [Place(0)] * len(eqn.outvars)


def narrows(eqn: Any) -> bool:
    """Tell whether an equation is a cast from floats to narrower ones."""
    old, new = (a.aval.dtype for a in (eqn.invars[0], eqn.outvars[0]))
    are_floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return bool(are_floats and old.itemsize > new.itemsize)


def needs_at(eqn: Any, place: Place, n: int) -> tuple[Place | None, ...] | None:
    """What a whole equation's operands are to be for its result at a slice's shape; `None` if it is not made so."""
    name, params = eqn.primitive.name, eqn.params
    is_placed = params.get("sharding") is not None and not has_explicit_axes(eqn.outvars)
    if eqn.effects or len(eqn.outvars) != 1 or is_placed:
        return None
    shapes = [tuple(a.aval.shape) for a in eqn.invars]
    if name == "random_bits":
        return needs_of_part(eqn, place)
    if name in ELEMENTWISE or (name == "bitcast_convert_type" and shapes[0] == _shape(eqn.outvars[0])):
        has = [len(s) > place.dim and s[place.dim] == n * place.unit for s in shapes]
        return tuple(place if h else None for h in has)
    if name == "iota":
        return ()
    if name == "broadcast_in_dim" and len(shapes) == 1:
        dims = tuple(params["broadcast_dimensions"])
        is_read = place.dim in dims and shapes[0][dims.index(place.dim)] == n * place.unit
        return (Place(dims.index(place.dim), place.unit) if is_read else None,)
    if name == "transpose":
        return (Place(params["permutation"][place.dim], place.unit),)
    if name == "reshape" and len(shapes) == 1 and params.get("dimensions") is None:
        try:
            return (reshaped(place, tuple(eqn.outvars[0].aval.shape), shapes[0], n),)
        except (NoRule, Coarser):
            return None
    return None


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(LINALG, _unless(lambda eqn, at, n: at.dim >= len(_shape(eqn.invars[0])) - 2,
                                    "works on matrices along the axis")),
    "triangular_solve": _triangular_solve,
    **dict.fromkeys(("random_seed", "random_fold_in", "random_split", "random_bits", "random_wrap", "random_unwrap"),
                    _unless(_draws_together, "draws bits of several keys together")),
    "approx_top_k": _along("reduction_dimension", "looks for the largest along the axis"),
    **dict.fromkeys(("lu_pivots_to_permutation", "tridiagonal_solve"),
                    _unless(lambda eqn, at, n: at.dim >= len(_shape(eqn.invars[0])) - 1,
                            "works on matrices along the axis")),
    **dict.fromkeys(WINDOWS, _unless(_reaches, "has a window that reaches along the axis")),
    "bitcast_convert_type": _unless(lambda eqn, at, n: _shape(eqn.invars[0]) != _shape(eqn.outvars[0]),
                                    "splits or joins elements"),
    "optimization_barrier": lambda eqn, ins, n: (list(ins), list(ins)),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": lambda eqn, ins, n: (list(ins), [_without(_one(ins), eqn.params["dimensions"])]),
    "stack": _stack,
    "unstack": _unstack,
    "rev": _along("dimensions", "turns the axis round"),
    "concatenate": _along("dimension", "joins arrays along the axis"),
    "split": _along("axis", "splits the axis"),
    "sort": _along("dimension", "sorts along the axis"),
    **{f"cum{kind}": _along("axis", "runs along the axis") for kind in ("sum", "prod", "max", "min", "logsumexp")},
    "reduce_sum": _reduce("sum"),
    "reduce_max": _reduce("max"),
    "reduce_min": _reduce("min"),
    "reduce_or": _reduce("max"),
    "reduce_and": _reduce("min"),
    **{name: _reduce(None) for name in ("reduce_prod", "reduce_xor", "argmax", "argmin")},
    "reduce": _general_reduce,
    "pad": _unless(lambda eqn, at, n: tuple(eqn.params["padding_config"][at.dim]) != (0, 0, 0), "pads along the axis"),
    **{name: _unless(lambda eqn, at, n: len({*_sizes(eqn, at)}) > 1, "takes a part of the axis")
       for name in ("slice", "dynamic_slice")},
    "dynamic_update_slice": _update,
    "tile": _unless(lambda eqn, at, n: _sizes(eqn, at)[1] != n * at.unit, "repeats the axis"),
    "top_k": _unless(lambda eqn, at, n: at.dim == eqn.params.get("axis", -1) % len(_shape(eqn.invars[0])),
                     "looks for the largest along the axis"),
    "fft": _unless(lambda eqn, at, n: at.dim >= len(_shape(eqn.invars[0])) - len(eqn.params["fft_lengths"]),
                   "transforms along the axis"),
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "sharding_constraint": _unless(_has_no_mesh, "has no mesh"),
    **{f"dot_product_attention_{way}_wrapper": _cudnn_attention for way in ("fwd", "bwd")},
}  # fmt: skip
