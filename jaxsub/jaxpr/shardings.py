"""Where arguments lie on a mesh, so that plans count the bytes of one device.

A program whose arguments are spread over a mesh is compiled with their shardings (`jaxsub.search.verify`), and the
compiler then says what each device allocates: that is what a budget means. They are known where arrays or
`jax.ShapeDtypeStruct`s carry them, in types (a mesh with explicit axes tells a trace where values lie), or where the
user says so (`in_shardings=`): with automatic axes a value inside `jax.jit` does not know where it will lie.

Stages are priced whole, on one device. What one byte of them is on each device is learnt from one figure, the plain
gradient's bytes compiled over the mesh against those predicted; what that gets wrong the compiler's word on the plans
puts right. Without a compile the split of the data, which activations follow, is taken for it, and weights that are
split as the data is are counted whole where they are read: there each device gathers them.

On several hosts each process traces, plans and compiles by itself. Planning has no randomness, so that all find the
same plan; where their compilers might differ, let one plan and send its `Plan.to_json()` to the others, by
`jax.experimental.multihost_utils.broadcast_one_to_all` or a file, to be used as `sublinear(loss, plan=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import jax.core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxsub.core.chain import Chain
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.graph import Graph

Shardings = tuple[NamedSharding, ...]
"""One for each flat input of a program; empty where all lies on one device."""


def sharding_of(leaf: Any) -> NamedSharding | None:
    """Where a value lies, if it is spread over several devices and that is known.

    Args:
        leaf: An array, a tracer, a `jax.ShapeDtypeStruct` or a Python number.

    Example:
        >>> mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
        >>> spread = NamedSharding(mesh, PartitionSpec("data"))
        >>> sharding_of(jax.ShapeDtypeStruct((64,), "float32", sharding=spread)).spec == PartitionSpec("data")
        True
        >>> sharding_of(3.0) is None
        True
    """
    if isinstance(leaf, jax.core.Tracer):
        found = getattr(jax.typeof(leaf), "sharding", None)
        return found if found is not None and _is_explicit(found.mesh) and found.mesh.size > 1 else None
    found = getattr(leaf, "sharding", None)
    if not isinstance(found, NamedSharding) or found.mesh.size == 1:
        return None
    mesh = found.mesh.abstract_mesh
    if not _is_explicit(mesh):  # without the kind of its devices: one may plan for others
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(mesh, found.spec, memory_kind=found.memory_kind)


def spread_over(leaves: Sequence[Any], given: Sequence[Any] = ()) -> Shardings:
    """Where all inputs of a program lie; those of which nothing is known lie whole on every device.

    Args:
        leaves: The inputs.
        given: What the user says of them, in the same order, `None` where nothing; empty if nothing is said.

    Raises:
        UnsupportedError: If they are spread over several meshes.
    """
    told = [sharding_of(s) if s is not None else None for s in map(_Told, given)] if given else [None] * len(leaves)
    found = [t or sharding_of(leaf) for t, leaf in zip(told, leaves, strict=True)]
    meshes = dict.fromkeys(s.mesh for s in found if s is not None)
    if len(meshes) > 1:
        raise UnsupportedError(
            f"The arguments are spread over {len(meshes)} meshes: {'; '.join(map(str, meshes))}. Put them on one."
        )
    return tuple(s or NamedSharding(mesh, PartitionSpec()) for mesh in meshes for s in found)


def told(in_shardings: Any, args: Any, n_consts: int, n_keywords: int) -> list[Any]:
    """What the user says of every input of a program: nothing of constants and keyword arguments.

    Args:
        in_shardings: A sharding, or a tuple with one for each positional argument; trees of them, or `None`, stand for
            the trees of the arguments, as for `jax.jit`.
        args: The positional arguments that are arrays.
        n_consts: How many constants come first.
        n_keywords: How many leaves the keyword arguments have.
    """
    is_leaf = lambda s: s is None or isinstance(s, jax.sharding.Sharding)  # noqa: E731
    prefix = in_shardings if isinstance(in_shardings, jax.sharding.Sharding) else list(in_shardings)
    every = jax.tree.broadcast(prefix, list(args), is_leaf=is_leaf)
    return [None] * n_consts + jax.tree.leaves(every, is_leaf=is_leaf) + [None] * n_keywords


def placed(avals: Sequence[Any], shardings: Shardings) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes, and where they lie."""
    where = shardings or (None,) * len(avals)
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(avals, where, strict=True)]


def constrain(values: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Put gradients where their arguments lie, as an optimizer wants them; explicit axes have seen to it already."""
    if not shardings:
        return list(values)
    return [
        x if _is_explicit(s.mesh) else jax.lax.with_sharding_constraint(x, s)
        for x, s in zip(values, shardings, strict=True)
    ]


def data_share(avals: Sequence[Any], shardings: Shardings, differentiated: Sequence[int]) -> float:
    """The share of the data that one device holds: activations are taken to follow the largest undifferentiated input.

    Example:
        >>> mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
        >>> where = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), ("data",))]
        >>> data_share([jax.ShapeDtypeStruct((16, 16), "float32")] * 2, where, [0])
        0.125
    """
    sizes = [math.prod(a.shape) for a in avals]
    data = [i for i in range(len(avals)) if i not in differentiated] or list(range(len(avals)))
    if not shardings or not max(sizes[i] for i in data):
        return 1.0
    largest = max(data, key=lambda i: sizes[i])
    return float(math.prod(shardings[largest].shard_shape(tuple(avals[largest].shape))) / sizes[largest])


def gathered_bytes(avals: Sequence[Any], shardings: Shardings, differentiated: Sequence[int]) -> tuple[int, ...]:
    """What a device allocates of each input where it is read: all that devices with other parts of the data hold of it.

    An input that is split along the axes that the data is split along is gathered before a product can read it; other
    axes split the product. This is how fully sharded data parallelism lays out weights.

    Args:
        avals: Shapes and dtypes of a program's inputs.
        shardings: Where they lie.
        differentiated: Which of them are weights.

    Returns:
        Bytes for each input; 0 where it is read as it lies. Empty where nothing is gathered.

    Example:
        >>> mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
        >>> where = tuple(NamedSharding(mesh, PartitionSpec("data")) for _ in range(2))
        >>> gathered_bytes([jax.ShapeDtypeStruct((16, 16), "float32")] * 2, where, [0])
        (1024, 0)
    """
    data = [i for i in range(len(avals)) if i not in differentiated]
    if not shardings or not data:
        return ()
    largest = max(data, key=lambda i: math.prod(avals[i].shape))
    axes = _axes(shardings[largest])
    sizes = [_gathered(a, s, axes) if i in differentiated else 0
             for i, (a, s) in enumerate(zip(avals, shardings, strict=True))]  # fmt: skip
    return tuple(sizes) if any(sizes) else ()


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


def with_gathered(chain: Chain, graph: Graph, gathered: Sequence[int]) -> Chain:
    """A chain whose stages gather weights: what a stage keeps holds them, a region's passes hold them and a gradient.

    Args:
        chain: What everything costs on one device, but for these.
        graph: The program.
        gathered: Bytes of each input, from `gathered_bytes`.

    Example:
        >>> from jaxsub.core.chain import Stage
        >>> from jaxsub.jaxpr.trace import trace
        >>> graph = trace(lambda w, x: (x @ w).sum(), (jax.numpy.ones((2, 2)), jax.numpy.ones((2, 2))), {}).graph
        >>> stages = with_gathered(Chain((Stage(0, 1, keep_bytes=4), Stage(1, 2)), (), ()), graph, (16, 0)).stages
        >>> stages[0].keep_bytes, stages[0].transient_bytes, stages[1].keep_bytes
        (20, 32, 0)
    """
    read = ({v for node in graph.nodes[s.start : s.stop] for v in node.inputs} for s in chain.stages)
    sizes = [sum(gathered[v] for v in values if v < len(gathered)) for values in read]
    stages = tuple(
        replace(s, forward_bytes=s.forward_bytes + n, transient_bytes=s.transient_bytes + 2 * n,
                keep_bytes=s.keep_bytes + n, keep_transient_bytes=s.keep_transient_bytes + 2 * n)
        for s, n in zip(chain.stages, sizes, strict=True)
    )  # fmt: skip
    more = [2 * sum(sizes[i.start : i.stop]) for i in chain.items]
    items = tuple(replace(i, options=tuple(replace(o, transient_bytes=o.transient_bytes + n) for o in i.options))
                  for i, n in zip(chain.items, more, strict=True))  # fmt: skip
    return replace(chain, stages=stages, items=items)


def scaled(chain: Chain, share: float) -> Chain:
    """A chain whose every byte is the share of it that one device holds.

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


def _is_explicit(mesh: Any) -> bool:
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


class _Told:
    """A sharding that stands for its argument."""

    def __init__(self, sharding: Any):
        self.sharding = sharding
