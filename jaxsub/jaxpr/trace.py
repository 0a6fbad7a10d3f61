"""Trace a function to a `Program`: a flat jaxpr, its trees, names and source lines, and its `Graph`.

Tracing is JAX's own (`jax.make_jaxpr`); `inline` flattens the jaxpr. Constants become inputs, so that closed-over
values, also tracers, are differentiated and counted like arguments.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate

import jax.core
import jax.numpy as jnp

from jaxsub.core.errors import UnsupportedError
from jaxsub.core.graph import Graph, Node, Value
from jaxsub.core.wrapped import P, R, S
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.derivative_rules import is_inexact, with_gradient
from jaxsub.jaxpr.flops import flops_of, is_costly, primitives_in
from jaxsub.jaxpr.identity import dtype_name, signatures_of
from jaxsub.jaxpr.inline import arrays_for_rules, flatten_jaxpr, live_eqns, reports_last, scope_of
from jaxsub.jaxpr.rule_residuals import with_residuals_of_each_pattern
from jaxsub.jaxpr.shardings import Shardings, Shares, all_shardings
from jaxsub.jaxpr.static_leaves import can_trace, passing
from jaxsub.jaxpr.tangents import reached

WIDE = frozenset("float64 complex128 int64 uint64".split())
"""Dtypes that exist only while JAX's x64 is on."""

ONCE = frozenset("io_callback outside_call".split())
"""Primitives whose effect must happen once; equations that read or write a reference are not recomputed either."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Program:
    """A function traced at given shapes.

    Attributes:
        eqns: Flat equations, in order; node `i` of the graph is equation `i`.
        invars: Input variables: constants first, then the leaves of the arguments.
        outvars: Output atoms, in the order of the leaves of the result; literals among them.
        consts: The constants' values, tracers perhaps.
        differentiated: Positions in `invars` of the floating-point leaves of the differentiated arguments, and of
            tracers that the function closes over: a gradient may be taken of them too.
        loss: Position in `outvars` of a scalar floating-point loss, or `None` where the result has no such form.
        out_tree: Tree of the result.
        signatures: For each equation a digest of everything but its position.
        graph: The same program by index.
        traced, origin: The jaxpr it comes from, for its debug information, and that of the function it is part of.
        shardings: The sharding of each input; empty for a program on one device.
        platform: The platform to compile for, such as `cuda`; empty if not known yet.
        is_inside_sharded: Whether it is an inner program, such as the body of a loop, of a program with sharded inputs.
        shares: What one device holds of its values, where the bytes of the graph are counted by that.
        is_repeated: Whether it runs several times, as a slice or a loop's step: its gradients are summed, no outputs.
    """

    eqns: tuple[Any, ...]
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    consts: tuple[Any, ...]
    differentiated: tuple[int, ...]
    loss: int | None
    out_tree: Any
    signatures: tuple[bytes, ...]
    graph: Graph
    traced: Any
    origin: Any
    shardings: Shardings = ()
    platform: str = ""
    is_inside_sharded: bool = False
    shares: Shares | None = None
    is_repeated: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether its values are sharded over several devices."""
        return bool(self.shardings) or self.is_inside_sharded

    @property
    def fingerprint(self) -> str:
        """The graph's fingerprint: equal for equal programs, on every machine."""
        return self.graph.fingerprint

    def avals(self) -> tuple[Any, ...]:
        """List shapes and dtypes of all inputs, constants first."""
        return tuple(v.aval for v in self.invars)

    def variable(self, value: int) -> Any:
        """Find the variable of a value of the graph."""
        producer = self.graph.values[value].producer
        if producer is None:
            return self.invars[value]
        return self.eqns[producer].outvars[value - self.graph.nodes[producer].outputs[0]]

    def with_eqns(self, eqns: Sequence[Any], outvars: Sequence[Any] | None = None) -> Program:
        """Replace the equations by others that make the same outputs, or these."""
        names = [v.name or "" for v in self.graph.values[: len(self.invars)]]
        made = program_of(list(eqns), list(self.invars), list(outvars or self.outvars), list(self.consts),
                          set(self.differentiated), self.loss, self.out_tree, names, self.traced)  # fmt: skip
        return replace(self.part(made), shardings=self.shardings, is_inside_sharded=self.is_inside_sharded)

    def part(self, inner: Program, node: int | None = None, number: int = 0) -> Program:
        """Mark an inner program, such as the body of a loop, as compiled for the same devices."""
        found = replace(inner, platform=self.platform, is_inside_sharded=self.is_sharded, origin=self.origin)
        return found if self.shares is None or node is None else found.sized(self.shares.bodies.get((node, number)))

    def sized(self, shares: Shares | None) -> Program:
        """Count the bytes of values by what one device holds of them, relative to most others.

        Weights that lie whole on each device count no larger: what is hosted in their gradients is predicted better so.
        """
        if shares is None or len(shares.values) != len(self.graph.values):
            return self
        pairs = ((v, min(1.0, s) if v.producer is None and v.is_differentiated else s)
                 for v, s in zip(self.graph.values, shares.values, strict=True))  # fmt: skip
        values = tuple(v if share == 1.0 else replace(v, n_bytes=math.ceil(v.n_bytes * share)) for v, share in pairs)
        return replace(self, graph=replace(self.graph, values=values), shares=shares)


def as_wide_as(program: Program) -> contextlib.AbstractContextManager[Any]:
    """Make a context to trace parts of a program in, where 64-bit values keep their dtype even if JAX's x64 is off.

    An array that was made while x64 was on keeps its 64 bits, but a 64-bit `ShapeDtypeStruct` is narrowed.
    """
    values = program.graph.values
    is_wide = any(dtype in WIDE for dtype in {v.dtype for v in values}) and "64" not in str(jnp.result_type(float))
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def with_own_settings(work: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function of a program, its first argument or an attribute of that, in what it needs of JAX's settings.

    These are `as_wide_as` it, loops as equations also under `jax.disable_jit()`, random keys that are read again, and
    no mesh: equations know theirs, which in a slice is not that of the program.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        program: Any = getattr(args[0], "program", args[0])
        with jax.disable_jit(False), jax.debug_key_reuse(False), compat.without_mesh(), as_wide_as(program):
            return work(*args, **kwargs)

    return run


def remembered(make: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Wrap a function of a program, or a jaxpr, and hashable arguments: what it makes lives as long.

    What it makes must not hold that program.
    """
    known: weakref.WeakKeyDictionary[S, dict[Any, R]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def run(program: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        mine, key = known.setdefault(program, {}), (args, *kwargs.items())
        if key not in mine:
            mine[key] = make(program, *args, **kwargs)
        return mine[key]

    return run


def trace(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, argnums: int | Sequence[int] | None = None
) -> Program:
    """Trace a function with its static arguments bound.

    With `argnums=None` the first positional argument with floating-point leaves is differentiated, else all keyword
    arguments, else only closed-over values, else nothing. `UnsupportedError` if `argnums` names nothing that can be
    differentiated, an argument is not an array, or tracing needs cuDNN's version and cuDNN is not installed.

    Example:
        >>> program = trace(lambda x, y: jnp.tanh(x @ y).sum(), [jnp.ones((2, 2))] * 2, {})
        >>> [node.primitive for node in program.graph.nodes]
        ['dot_general', 'tanh', 'reduce_sum']
    """
    paths, _ = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))
    leaves = [leaf for _, leaf in paths]
    check_leaves(paths)

    @functools.wraps(fun, updated=())  # JAX's errors name the user's function and its arguments
    def named(*args: Any, **kwargs: Any) -> Any:
        return passing(fun(*args, **kwargs))

    with _saying_what_cudnn_needs(), _saying_what_is_static(paths):
        closed, out_shape = jax.make_jaxpr(named, return_shape=True)(*args, **kwargs)
    closed = with_residuals_of_each_pattern(closed)
    out_leaves, out_tree = jax.tree.flatten(out_shape)
    eqns, invars, outvars, consts = flatten_jaxpr(closed)
    consts = arrays_for_rules(eqns, invars, consts)
    positions = with_gradient(eqns, invars, consts)
    wanted = _first_floating(args) if argnums is None else argnums
    chosen = {len(consts) + i for i in _argument_positions(args, wanted, len(leaves))}
    names, loss = ["const"] * len(consts) + [_path_name(path) for path, _ in paths], loss_position(out_tree, out_leaves)
    program = program_of(eqns, invars, outvars, consts, positions | chosen, loss, out_tree, names, closed)
    if argnums is not None:
        check_differentiated(program, chosen)
    return replace(program, shardings=all_shardings([*consts, *leaves]))


@contextlib.contextmanager
def _saying_what_cudnn_needs() -> Iterator[None]:
    """Name the missing package where JAX needs cuDNN's version, as tracing its attention does."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("cuDNN"):  # "cuDNN not found." and "cuDNN is not detected."
            raise
        raise UnsupportedError(
            f'{error} JAX needs its version to trace implementation="cudnn"; no GPU is needed for that. Run '
            'pip install "jaxsub[targets-cudnn]", or pass implementation="xla".'
        ) from error


@contextlib.contextmanager
def _saying_what_is_static(paths: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Name the arguments that are Python numbers where the function's control flow needs a value."""
    try:
        yield
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError) as error:
        numbers = [f"`{_path_name(path)}` ({leaf!r})" for path, leaf in paths if isinstance(leaf, (bool, int))]
        if numbers:
            error.add_note(
                f"jaxsub: every argument is traced, Python numbers too: {', '.join(numbers)}. Name those that decide "
                "what the function does in static_argnums= or static_argnames=."
            )
        raise


def program_of(eqns: list[Any], invars: list[Any], outvars: list[Any], consts: list[Any], positions: set[int],
               loss: int | None, out_tree: Any, names: list[str], closed: Any) -> Program:  # fmt: skip
    """Put a program together from its flat parts; `positions` are those of the differentiated inputs."""
    differentiated = tuple(i for i in sorted(positions) if is_inexact(invars[i]))
    eqns = reports_last(live_eqns(eqns, outvars))
    signatures = signatures_of(eqns)
    graph, traced = _graph(eqns, invars, outvars, differentiated, loss, names, signatures), compat.open_jaxpr(closed)
    return Program(tuple(eqns), tuple(invars), tuple(outvars), tuple(consts), differentiated, loss, out_tree,
                   signatures, graph, traced, traced)  # fmt: skip


def check_differentiated(program: Program, positions: Iterable[int] | None = None) -> None:
    """Refuse a program with no floating-point input to differentiate, at these positions or at all."""
    if program.differentiated:
        return
    chosen = range(len(program.consts), len(program.invars)) if positions is None else positions
    subject = "no argument has" if positions is None else "the differentiated argument has no"
    found = sorted({str(program.invars[i].aval.dtype) for i in chosen})
    raise UnsupportedError(
        f"Nothing to differentiate: {subject} floating-point leaves (found {', '.join(found) or 'no arrays at all'}). "
        "Pass argnums= to name the arguments to differentiate, as for jax.grad."
    )


def check_leaves(paths: Sequence[tuple[Any, Any]]) -> None:
    """Refuse leaves of arguments that JAX cannot trace, or whose sizes are not known; all of them at once."""
    faults, symbols = [], []
    for path, leaf in paths:
        if not can_trace(leaf):
            faults.append(f"{_path_name(path)} is a {type(leaf).__name__}")
        elif symbolic := [d for d in getattr(leaf, "shape", ()) if not hasattr(d, "__index__")]:
            symbols.append(f"{_path_name(path)} has the dimension {symbolic[0]}")
    if faults:
        raise UnsupportedError(
            f"Arguments must be arrays: {', '.join(faults)}. Name static arguments, such as a method's "
            "self, in static_argnums= or static_argnames=, or register their types as pytrees."
        )
    if symbols:
        raise UnsupportedError(
            f"A plan needs known sizes: {', '.join(symbols)}. With jax.export, export the function once for each "
            "size, at shapes without symbols; or export the plain function, which needs no plan."
        )


def _first_floating(args: Sequence[Any]) -> tuple[int, ...]:
    """Find the first positional argument with floating-point leaves; empty if there is none."""
    for i, arg in enumerate(args):
        if any(jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(arg)):
            return (i,)
    return ()


def _argument_positions(args: Sequence[Any], argnums: int | Sequence[int], n_leaves: int) -> set[int]:
    """Find the positions of the leaves of the named positional arguments, or of all keyword arguments if none is."""
    wanted = [argnums] if isinstance(argnums, int) else list(argnums)
    if not args or not wanted:
        return set(range(sum(len(jax.tree.leaves(arg)) for arg in args), n_leaves))
    outside = [a for a in wanted if not -len(args) <= a < len(args)]
    if outside:
        raise UnsupportedError(
            f"argnums={argnums} names argument {outside[0]}, but there are {len(args)} positional ones."
        )
    chosen = {a % len(args) for a in wanted}
    positions, at = set(), 0
    for i, arg in enumerate(args):
        size = len(jax.tree.leaves(arg))
        if i in chosen:
            positions |= set(range(at, at + size))
        at += size
    return positions


def loss_position(out_tree: Any, out_leaves: Sequence[Any]) -> int | None:
    """Find the loss: the result itself, or the first of a pair (loss, aux), if it is a floating-point scalar."""
    is_leaf = jax.tree_util.treedef_is_leaf(out_tree)
    is_pair = not is_leaf and out_tree.node_data() is not None and out_tree.node_data()[0] is tuple
    first_is_leaf = is_pair and out_tree.num_nodes > 1 and jax.tree_util.treedef_is_leaf(out_tree.children()[0])
    if not out_leaves or not (is_leaf or (first_is_leaf and len(out_tree.children()) == 2)):
        return None
    first = out_leaves[0]
    return 0 if first.shape == () and jnp.issubdtype(first.dtype, jnp.floating) else None


def _path_name(path: Any) -> str:
    """Format an argument's path without the leading (args, kwargs) pair: `arg0['w']`."""
    rest = jax.tree_util.keystr(path[2:])
    first = getattr(path[1], "idx", getattr(path[1], "key", "")) if len(path) > 1 else ""
    return (f"arg{first}" if isinstance(first, int) else str(first)) + rest


def _graph(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], differentiated: Sequence[int],
           loss: int | None, names: Sequence[str], signatures: Sequence[bytes]) -> Graph:  # fmt: skip
    index = {v: i for i, v in enumerate(invars)}
    nodes: list[Node] = []
    consumers: list[list[int]] = [[] for _ in invars]
    digest = hashlib.sha256()
    for i, eqn in enumerate(eqns):
        ins = tuple(index[a] for a in eqn.invars if compat.is_var(a))
        for v in dict.fromkeys(ins):
            consumers[v].append(i)
        outs = tuple(range(len(index), len(index) + len(eqn.outvars)))
        index.update(zip(eqn.outvars, outs, strict=True))
        consumers += [[] for _ in outs]
        digest.update(signatures[i] + repr(ins).encode())
        nodes.append(_node(i, eqn, ins, outs))
    out_ids = tuple(index[a] for a in outvars if compat.is_var(a))
    digest.update(repr(([str(v.aval) for v in invars], out_ids, tuple(differentiated), loss)).encode())
    avals = [v.aval for v in invars] + [v.aval for eqn in eqns for v in eqn.outvars]
    named = {n.outputs[0]: name for n, eqn in zip(nodes, eqns, strict=True) if (name := compat.given_name(eqn))}
    active = _active(nodes, eqns, avals, differentiated, _loss_values(outvars, index, loss))
    producer = [None] * len(invars) + [n.index for n in nodes for _ in n.outputs]
    values = tuple(
        Value(
            i,
            tuple(aval.shape),
            dtype_name(aval.dtype),
            aval_bytes(aval),
            producer[i],
            tuple(consumers[i]),
            names[i] if i < len(names) else named.get(i),
            active[i],
        )
        for i, aval in ((i, _shaped(aval)) for i, aval in enumerate(avals))
    )
    return Graph(tuple(nodes), values, tuple(range(len(invars))), out_ids, digest.hexdigest()[:24])


def _node(i: int, eqn: Any, ins: tuple[int, ...], outs: tuple[int, ...]) -> Node:
    name = compat.unwrapped(eqn)[0].name
    touches_ref = any(hasattr(getattr(a, "aval", None), "inner_aval") for a in (*eqn.invars, *eqn.outvars))
    can_recompute = not touches_ref and ONCE.isdisjoint(primitives_in(eqn))
    return Node(i, name, ins, outs, flops_of(eqn).weighted, is_costly(eqn), compat.source_of(eqn),
                scope_of(str(eqn.source_info.name_stack)), (), can_recompute)  # fmt: skip


def _loss_values(outvars: Sequence[Any], index: dict[Any, int], loss: int | None) -> set[int]:
    wanted = outvars if loss is None else [outvars[loss]]
    return {index[a] for a in wanted if compat.is_var(a)}


def _active(nodes: Sequence[Node], eqns: Sequence[Any], avals: Sequence[Any], differentiated: Sequence[int],
            losses: set[int]) -> list[bool]:  # fmt: skip
    """Tell which values a gradient flows through: reached from a differentiated input, and reaching the loss."""
    forward = [False] * len(avals)
    for i in differentiated:
        forward[i] = True
    for node, eqn in zip(nodes, eqns, strict=True):
        if any(forward[v] for v in node.inputs):
            ins = iter(node.inputs)
            found = reached(eqn, [compat.is_var(a) and forward[next(ins)] for a in eqn.invars])
            for v, is_reached in zip(node.outputs, found, strict=True):
                forward[v] = is_reached
    backward = [v in losses for v in range(len(avals))]
    for node in reversed(nodes):
        if any(backward[v] and forward[v] for v in node.outputs):
            for v in node.inputs:
                backward[v] = True
    return [f and b for f, b in zip(forward, backward, strict=True)]


def _shaped(aval: Any) -> Any:
    """Make an aval with a shape and dtype: a reference's contents, an empty array for a token."""
    inner = getattr(aval, "inner_aval", aval)
    return inner if hasattr(inner, "shape") and hasattr(inner, "dtype") else jax.ShapeDtypeStruct((0,), jnp.bool_)


def array_bytes(v: Any) -> int:
    """Count the bytes of a variable or literal; 0 where it has no dtype, as a token."""
    return aval_bytes(v.aval) if hasattr(v.aval, "dtype") else 0


def aval_bytes(aval: Any) -> int:
    """Count the bytes of an array of this shape and dtype; typed PRNG keys count as their words.

    Example:
        >>> aval_bytes(jax.ShapeDtypeStruct((3, 4), jnp.bfloat16))
        24
    """
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    itemsize = 8 if is_key else getattr(aval.dtype, "itemsize", 0)
    return int(math.prod(aval.shape) * itemsize)
