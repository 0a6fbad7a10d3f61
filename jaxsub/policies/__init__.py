"""Policies: which values a wrapped function saves for its backward pass, as data.

There are two kinds. `save_nothing`, `save_all` and `save_costly` decide for one equation at a time, as JAX's protocol
for policies does: pass them to `jax.checkpoint(policy=)`, `flax.linen.remat`, `flax.nnx.remat` or
`equinox.filter_checkpoint`. `save_within`, `sqrt` and `recursive` decide for the whole function, which that protocol
cannot: `jaxsub.policies.checkpoint`, `jaxsub.flax.linen.remat`, `jaxsub.flax.nnx.remat` and
`jaxsub.equinox.filter_checkpoint` take both kinds, and every policy by its name in a config: `"save_costly"`,
`"save_within(2GiB)"`, `"recursive(3)"`.

With `jax_remat3`, JAX calls policies for few primitives or none and silently recomputes all other results. A policy of
ours that JAX would ignore in this way raises at the call; the four functions above apply any policy by other means.

Sources: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016: §4.2 for saving only costly
results, §4.3 for `sqrt`, §4.4 for `recursive`. `save_within` uses the minimum cut of `jaxsub.partition.min_cut`.
"""

from __future__ import annotations

from jaxsub.policies.kinds import Policy, Recursive, SaveAll, SaveCostly, SaveNothing, SaveWithin, Sqrt
from jaxsub.policies.names import (
    JaxPolicy,
    get,
    label,
    names,
    recursive,
    save_all,
    save_costly,
    save_nothing,
    save_within,
    sqrt,
)
from jaxsub.policies.wrap import checkpoint

__all__ = [
    "JaxPolicy",
    "Policy",
    "Recursive",
    "SaveAll",
    "SaveCostly",
    "SaveNothing",
    "SaveWithin",
    "Sqrt",
    "checkpoint",
    "get",
    "label",
    "names",
    "recursive",
    "save_all",
    "save_costly",
    "save_nothing",
    "save_within",
    "sqrt",
]
