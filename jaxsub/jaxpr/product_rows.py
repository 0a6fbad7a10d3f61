"""How many rows a run's products have along an axis: what bounds the number of slices.

An `Axis` goes in, one number of rows comes out. A product of too few rows reads its weights for little arithmetic, and
takes the time of one with enough. So with `n` slices, a product of `r` rows takes `least * n / r` times as long, where
that is above one. Of a run whose products differ in rows, the number is the one at which what all of them lose together
is a small share of their FLOPs (`TUNING.little_recompute`): a classifier's few rows behind large convolutions do not
decide. Products in loops count as often as they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from jaxsub.core.tuning import TUNING
from jaxsub.jaxpr.axis import Axis, Step
from jaxsub.jaxpr.axis_places import Place
from jaxsub.jaxpr.flops import flops_of


def rows_of(axis: Axis) -> int:
    """Rows of a run's products or convolutions along an axis; elements of its largest value where there is none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxsub.jaxpr.axes import follow
        >>> def rows(f, *shapes):
        ...     jaxpr = jax.make_jaxpr(f)(*(jnp.ones(s) for s in shapes)).jaxpr
        ...     return rows_of(follow(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, jaxpr.invars[0], 0))
        >>> rows(lambda x, w: (x @ w).sum(), (100, 8), (8, 8))
        105
        >>> rows(lambda x, w: ((x @ w).sum(1) @ w).sum(), (100, 64, 8), (8, 8))  # few FLOPs at 100 rows
        425
        >>> rows(lambda x, w: jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ w), x).sum(), (100, 8), (8, 8))
        105
    """
    found = sorted(product for product in _products(axis.steps) if all(product))  # those of empty arrays cost nothing
    if not found:
        sizes = [v.aval.size for v, place in axis.places.items() if isinstance(place, Place)]
        return max(sizes, default=axis.length)
    most, loss = math.inf, TUNING.little_recompute * sum(flops for _, flops in found)
    by_rows = flops_so_far = 0.0
    for rows, flops in found:
        if rows >= most:
            break
        by_rows, flops_so_far = by_rows + flops / rows, flops_so_far + flops
        most = (loss + flops_so_far) / by_rows
    return int(most)


def _products(steps: Iterable[Step], times: float = 1.0) -> Iterator[tuple[int, float]]:
    """Rows and FLOPs of products, those in bodies of equations among them."""
    for step in steps:
        if step.eqn is None:
            continue
        if not step.bodies:
            yield from ((rows, times * flops_of(step.eqn).total) for rows in _product_rows(step))
        for body in step.bodies:
            yield from _products(body.steps, times * step.eqn.params.get("length", 1))


def _product_rows(step: Step) -> Iterator[int]:
    params = step.eqn.params
    for side, (atom, need) in enumerate(zip(step.reads, step.needs, strict=True)):
        if need is None:
            continue
        shape = atom.aval.shape
        if step.eqn.primitive.name == "dot_general":
            contracted, batch = (dims[side] for dims in params["dimension_numbers"])
            if need.dim in contracted:
                yield shape[need.dim]
            elif need.dim not in batch:
                yield math.prod(size for d, size in enumerate(shape) if d not in contracted)
        if step.eqn.primitive.name == "conv_general_dilated":
            out, dims = step.writes[0].aval, params["dimension_numbers"]
            is_batch = side == 0 and need.dim == dims.lhs_spec[0]
            yield out.size // out.shape[dims.out_spec[1]] if is_batch else shape[need.dim]
