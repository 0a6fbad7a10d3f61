"""Find the shardings of arguments, so that plans count the bytes of one device.

A program whose arguments are sharded over a mesh is compiled with their shardings (`jaxsub.search.verify`), and the
compiler reports the memory of each device: a budget means these bytes. Shardings come from arrays and
`jax.ShapeDtypeStruct`s, from types (on a mesh with explicit axes), or from the user (`in_shardings=`): with automatic
axes a value inside `jax.jit` has no known sharding.

Stages are priced whole, as on one device, and all bytes are scaled by the share that one device holds of most of them.
Values of which it holds another share count as so much larger or smaller (`Shares`). The shares come from the
compiler's own propagation of shardings (`jaxsub.search.propagated`); compiles of plans correct what is left. Where it
cannot be had, as with named axes, the share is that of the data, whose sharding activations follow. Weights that are
sharded along the data's axes count whole where they are read, since each device gathers them there.

On several hosts each process traces, plans and compiles by itself. Planning has no randomness, so all find the same
plan. Where their compilers might differ, plan on one and send its `Plan.to_json()` to the others, by
`jax.experimental.multihost_utils.broadcast_one_to_all` or a file, for `sublinear(loss, plan=...)`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax.core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxsub.core.chain import Chain
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.graph import Graph
from jaxsub.jaxpr import compat


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """What one device holds of the values of a program.

    Attributes:
        most: The share of most bytes.
        values: The share of each value, in the order of `Graph.values`, over `most`.
        bodies: The same for the bodies of loops and conditionals, by node and number.
    """

    most: float
    values: tuple[float, ...] = ()
    bodies: Mapping[tuple[int, int], Shares] = field(default_factory=dict)

    def held(self, value: int) -> float:
        """The share of a value that one device holds."""
        return self.most * (self.values[value] if self.values else 1.0)


ONE_DEVICE = Shares(1.0)
"""All of every value."""

Shardings = tuple[NamedSharding, ...]
"""One for each flat input of a program; empty for a program on one device."""


def sharding_of(leaf: Any) -> NamedSharding | None:
    """Find the sharding over several devices of an array, tracer, shape or number; `None` if there is none or it is
    unknown.
    """
    if isinstance(leaf, jax.core.Tracer):
        found = getattr(jax.typeof(leaf), "sharding", None)
        return found if found is not None and is_explicit(found.mesh) and found.mesh.size > 1 else None
    found = getattr(leaf, "sharding", None)
    if not isinstance(found, NamedSharding) or found.mesh.size == 1:
        return None
    mesh = found.mesh.abstract_mesh
    if not is_explicit(mesh) and mesh != jax.sharding.get_abstract_mesh():
        # without the kind of its devices, as the plan may be for others; the user's own `jax.set_mesh` has it
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(mesh, found.spec, memory_kind=found.memory_kind)


def all_shardings(leaves: Sequence[Any], given: Sequence[Any] = ()) -> Shardings:
    """Find the shardings of all inputs of a program, those `given` by the user first; unknown ones count as replicated.

    `UnsupportedError` if they are sharded over several meshes.
    """
    named = [sharding_of(s) if s is not None else None for s in map(_Given, given)] if given else [None] * len(leaves)
    found = [n or sharding_of(leaf) for n, leaf in zip(named, leaves, strict=True)]
    meshes = dict.fromkeys(s.mesh for s in found if s is not None)
    if len(meshes) > 1:
        raise UnsupportedError(
            f"The arguments are sharded over {len(meshes)} meshes: {'; '.join(map(str, meshes))}. Put them on one."
        )
    return tuple(s or NamedSharding(mesh, PartitionSpec()) for mesh in meshes for s in found)


def given_shardings(in_shardings: Any, args: Any, n_consts: int, n_keywords: int) -> list[Any]:
    """List the user's sharding for every input of a program: none for its constants and keyword arguments' leaves.

    `in_shardings` is a sharding, or a tuple with one for each positional argument; each may be a tree prefix of its
    argument, or `None`, as for `jax.jit`.
    """
    if not isinstance(in_shardings, jax.sharding.Sharding | Sequence):
        raise TypeError(
            "in_shardings= is a sharding, or a tuple with one for each positional argument, as for jax.jit; got "
            f"{in_shardings!r:.99}."
        )
    is_leaf = lambda s: s is None or isinstance(s, jax.sharding.Sharding)  # noqa: E731
    prefix = in_shardings if isinstance(in_shardings, jax.sharding.Sharding) else list(in_shardings)
    every = jax.tree.broadcast(prefix, list(args), is_leaf=is_leaf)
    found: list[Any] = []  # `None` is no leaf of an argument, and may be one here
    jax.tree.map(lambda _, sharding: found.append(sharding), list(args), every)
    return [None] * n_consts + found + [None] * n_keywords


def placed(avals: Sequence[Any], shardings: Shardings) -> list[jax.ShapeDtypeStruct]:
    """Make shapes with dtypes and shardings."""
    where = shardings or (None,) * len(avals)
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) if s is not None else compat.shape_of(a)
            for a, s in zip(avals, where, strict=True)]  # fmt: skip


def constrain(values: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Put gradients where their arguments lie, as an optimizer wants them; explicit axes have seen to it already."""
    if not shardings:
        return list(values)
    return [
        x if is_explicit(s.mesh) else jax.lax.with_sharding_constraint(x, s)
        for x, s in zip(values, shardings, strict=True)
    ]


def data_share(avals: Sequence[Any], shardings: Shardings, differentiated: Sequence[int]) -> float:
    """Compute the share of the data that one device holds, by the sharding of the largest input that is no weight."""
    sizes = [math.prod(a.shape) for a in avals]
    data = [i for i in range(len(avals)) if i not in differentiated] or list(range(len(avals)))
    if not shardings or not max(sizes[i] for i in data):
        return 1.0
    largest = max(data, key=lambda i: sizes[i])
    return float(math.prod(shardings[largest].shard_shape(tuple(avals[largest].shape))) / sizes[largest])


def gathered_bytes(avals: Sequence[Any], shardings: Shardings, differentiated: Sequence[int]) -> tuple[int, ...]:
    """Compute the bytes of each weight that a device gathers from others where the weight is read; empty if none is.

    A weight that is sharded along the data's axes, as in fully sharded data parallelism, is gathered before a product
    can read it; other axes shard the product.
    """
    data = [i for i in range(len(avals)) if i not in differentiated]
    if not shardings or not data:
        return ()
    largest = max(data, key=lambda i: math.prod(avals[i].shape))
    axes = _axes(shardings[largest])
    sizes = [_gathered(a, s, axes) if i in differentiated else 0
             for i, (a, s) in enumerate(zip(avals, shardings, strict=True))]  # fmt: skip
    return tuple(sizes) if any(sizes) else ()


def gathered_at_once(eqns: Sequence[Any], invars: Sequence[Any], shardings: Shardings,
                     gathered: Sequence[int]) -> tuple[int, ...]:  # fmt: skip
    """Compute the bytes of each gathered weight that are live at the same time while it is read.

    A loop gathers the slice that a step reads, so of a stacked weight one slice is whole at a time. Where the stack is
    what is split, each step's slice is another device's: XLA gathers all of it before the loop.
    """
    index = {var: i for i, var in enumerate(invars)}
    steps: list[set[int]] = [set() for _ in gathered]
    for eqn in eqns:
        is_scan = eqn.primitive.name == "scan"
        first = sum(compat.scan_sizes(eqn)) if is_scan else len(eqn.invars)
        for position, var in enumerate(eqn.invars):
            if compat.is_var(var) and var in index:
                steps[index[var]].add(eqn.params["length"] if position >= first else 1)
    found = []
    for n_bytes, lengths, sharding in zip(gathered, steps, shardings, strict=True):
        is_split_along_steps = bool(sharding.spec) and bool(_names(sharding.spec[0]))
        found.append(n_bytes // (1 if is_split_along_steps else max(1, min(lengths, default=1))))
    return tuple(found)


def _gathered(aval: Any, sharding: NamedSharding, axes: frozenset[str]) -> int:
    if not axes & _axes(sharding):
        return 0
    kept = (tuple(a for a in _names(dim) if a not in axes) for dim in sharding.spec)
    whole = NamedSharding(sharding.mesh, PartitionSpec(*(names or None for names in kept)))
    return int(math.prod(whole.shard_shape(tuple(aval.shape))) * aval.dtype.itemsize)


def _axes(sharding: NamedSharding) -> frozenset[str]:
    return frozenset(name for dim in sharding.spec for name in _names(dim))


def _names(dim: Any) -> tuple[str, ...]:
    return (dim,) if isinstance(dim, str) else tuple(dim or ())


def with_gathered(chain: Chain, graph: Graph, gathered: Sequence[int], at_once: Sequence[int]) -> Chain:
    """Add gathered weights to a chain of one device's costs: to kept bytes once, to a region's passes with their
    gradients.

    `gathered` is from `gathered_bytes`, `at_once` from `gathered_at_once`.
    """
    read = [{v for node in graph.nodes[s.start : s.stop] for v in node.inputs if v < len(gathered)}
            for s in chain.stages]  # fmt: skip
    kept, live = ([sum(sizes[v] for v in values) for values in read] for sizes in (gathered, at_once))
    stages = tuple(
        replace(s, forward_bytes=s.forward_bytes + n, transient_bytes=s.transient_bytes + 2 * n,
                keep_bytes=s.keep_bytes + k, keep_transient_bytes=s.keep_transient_bytes + 2 * n)
        for s, k, n in zip(chain.stages, kept, live, strict=True)
    )  # fmt: skip
    more = [2 * sum(live[i.start : i.stop]) for i in chain.items]
    items = tuple(replace(i, options=tuple(replace(o, transient_bytes=o.transient_bytes + n) for o in i.options))
                  for i, n in zip(chain.items, more, strict=True))  # fmt: skip
    return replace(chain, stages=stages, items=items)


def scaled(chain: Chain, share: float) -> Chain:
    """Scale all bytes of a chain by the share that one device holds.

    Example:
        >>> from jaxsub.core.chain import Crossing, Stage
        >>> whole = Chain((Stage(0, 1, transient_bytes=80), Stage(1, 2)), (), (Crossing(0, 1, 16, 16),))
        >>> scaled(whole, 0.125).stages[0].transient_bytes
        10
    """
    items = tuple(replace(i, options=tuple(_shrunk(o, share) for o in i.options)) for i in chain.items)
    stages = tuple(_shrunk(s, share) for s in chain.stages)
    return replace(chain, stages=stages, items=items, crossings=tuple(_shrunk(c, share) for c in chain.crossings))


def _shrunk(part: Any, share: float) -> Any:
    sizes = {f.name: getattr(part, f.name) for f in fields(part) if f.name.endswith("_bytes")}
    return replace(part, **{name: math.ceil(size * share) for name, size in sizes.items()})


def unsaid_devices(avals: Sequence[Any]) -> int:
    """On how many devices values are whose types do not say how they are split: on a mesh with automatic axes."""
    meshes = (getattr(getattr(aval, "sharding", None), "mesh", None) for aval in avals)
    sizes = (zip(mesh.axis_sizes, mesh.axis_types, strict=True) for mesh in meshes if mesh is not None)
    return max((math.prod(n for n, kind in axes if kind == AxisType.Auto) for axes in sizes), default=1)


def is_explicit(mesh: Any) -> bool:
    """Whether shardings over a mesh are part of types."""
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def has_explicit_axes(atoms: Sequence[Any]) -> bool:
    """Whether any of some atoms has a type that says how it is sharded."""
    return any(is_explicit(a.aval.sharding.mesh) for a in atoms if hasattr(a.aval, "sharding"))


def over_automatic_axes(function: Callable[..., Any], reads: Sequence[Any], makes: Sequence[Any]) -> Callable[..., Any]:
    """Let a function that reads and makes variables run with explicit axes of their mesh as automatic ones.

    JAX gives slices no types: it would not know how to split them. What is made has its type again.
    """
    if not has_explicit_axes((*reads, *makes)):
        return function
    automatic: Callable[..., Any] = jax.sharding.auto_axes(function, out_sharding=tuple(v.aval.sharding for v in makes))
    return automatic


def automatic_axes(atoms: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Trace with the explicit axes of some atoms' mesh as automatic ones, as inside `over_automatic_axes`."""
    typed = [a.aval.sharding.mesh for a in atoms if has_explicit_axes([a])]
    if not typed:
        return contextlib.nullcontext()
    types = dict.fromkeys(typed[0].explicit_axes, AxisType.Auto)
    found: contextlib.AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(typed[0].update_axis_types(types))
    return found


def varying_as(x: Any, aval: Any) -> Any:
    """Let an array vary over the axes of `shard_map` over which a value does."""
    own = compat.varying(jax.typeof(x))
    axes = tuple(axis for axis in compat.varying(aval) if axis not in own)
    return jax.lax.pcast(x, axes, to="varying") if axes else x


class _Given:
    """An object that has only a sharding."""

    def __init__(self, sharding: Any):
        self.sharding = sharding


def spans_devices(tree: Any) -> bool:
    """Whether any array, or sharding, of a tree spans several devices."""
    found = (getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(tree))
    return any(isinstance(s, jax.sharding.Sharding) and s.num_devices > 1 for s in found)
