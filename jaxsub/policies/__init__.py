"""Policies: what a wrapped function saves for its backward pass, as data to hand to whatever wraps it.

Two kinds. `save_nothing`, `save_all` and `save_costly` judge one equation at a time, which is what JAX's own protocol
asks of a policy: they can be handed to `jax.checkpoint(policy=)`, `flax.linen.remat`, `flax.nnx.remat` and
`equinox.filter_checkpoint`. `save_within`, `sqrt` and `recursive` judge the whole function, which that protocol cannot:
`jaxsub.policies.checkpoint`, `jaxsub.flax.linen.remat` and `jaxsub.flax.nnx.remat` take both kinds, and every policy by
its name, as a config holds it: `"save_costly"`, `"save_within(2GiB)"`, `"recursive(3)"`.

With `jax_remat3`, JAX asks policies about few results or none and silently recomputes the others. A policy of ours that
is handed to it and would save some of those raises at the call; the three functions above carry policies out by other
means, those of others too.

Sources: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016: §4.2 for keeping only costly
results, §4.3 for `sqrt`, §4.4 for `recursive`. The minimum cut behind `save_within` is that of
`jaxsub.partition.min_cut`.
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
