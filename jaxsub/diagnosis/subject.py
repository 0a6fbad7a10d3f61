"""What the doctor looks at: a loss with its gradient, or a whole step, traced flat and compiled as often as needed.

In goes the user's function with its arguments; out comes a `Subject`: the flat equations of the gradient or step, which
inputs are donated, and, of a loss, the `Program` before differentiation. JAX marks in an equation's name stack what
belongs to the backward pass, so residuals are the values that are computed before it and read in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.core
import jax.extend.core as jex_core
from jax.sharding import NamedSharding

from jaxsub.core.measurement import Measurement
from jaxsub.devices.compile import measure_compiled
from jaxsub.devices.targets import Target
from jaxsub.emission.emit import as_traced
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.arguments import AnyArgnums, Statics, trace_call
from jaxsub.jaxpr.inline import flatten_closed, live_eqns
from jaxsub.jaxpr.static_leaves import passing, returning_changes
from jaxsub.jaxpr.trace import Program, check_leaves, loss_position
from jaxsub.search.verify import gradient

Flat = Callable[..., Any]


@dataclass(slots=True, eq=False)
class Subject:
    """A program to look at.

    Attributes:
        call: The gradient or step, a function of its flat inputs.
        shapes: Shapes of those.
        closed: Its jaxpr.
        eqns: Its equations, calls inlined, those dropped that nothing reads.
        outputs: Its output atoms.
        donated: Which inputs are donated.
        target: What it is compiled for.
        arguments: The positional arguments, as trees of shapes; of a step alone.
        out_info: Shapes of the results, as a tree; of a step alone.
        has_statics: Whether some arguments are static, and not among these.
        program: The loss before differentiation; `None` of a step.
        is_planned: Whether jaxsub has planned it already.
    """

    call: Flat
    shapes: tuple[Any, ...]
    closed: Any
    donated: tuple[bool, ...]
    target: Target
    arguments: tuple[Any, ...] = ()
    out_info: Any = None
    has_statics: bool = False
    program: Program | None = None
    is_planned: bool = False
    eqns: tuple[Any, ...] = field(init=False)
    outputs: tuple[Any, ...] = field(init=False)
    inputs: tuple[Any, ...] = field(init=False)
    _measured: Measurement | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        eqns, inputs, outputs = flatten_closed(self.closed)
        self.eqns, self.inputs, self.outputs = tuple(live_eqns(eqns, outputs)), tuple(inputs), tuple(outputs)

    @property
    def measurement(self) -> Measurement:
        """What the compiler allocates for it as it is."""
        if self._measured is None:
            self._measured = self.measure(self.call)
        return self._measured

    def measure(self, call: Flat, donated: Sequence[bool] | None = None) -> Measurement:
        """What the compiler allocates for another form of it, a function of the same flat inputs."""
        given = self.donated if donated is None else donated
        numbers = tuple(i for i, is_donated in enumerate(given) if is_donated)
        return measure_compiled(call, self.shapes, self.target, donate_argnums=numbers)

    def residuals(self) -> Iterator[tuple[Any, Any]]:
        """Values that the backward pass reads and another equation computes, each with that equation."""
        makers = {v: eqn for eqn in self.eqns if not is_backward(eqn) for v in eqn.outvars}
        read = dict.fromkeys(a for eqn in self.eqns if is_backward(eqn) for a in eqn.invars if compat.is_var(a))
        yield from ((v, makers[v]) for v in read if v in makers)


def is_backward(eqn: Any) -> bool:
    """Whether an equation belongs to the backward pass of the outermost gradient.

    Example:
        >>> closed = jax.make_jaxpr(jax.grad(lambda x: jax.numpy.sin(x)))(1.0)
        >>> [(eqn.primitive.name, is_backward(eqn)) for eqn in closed.eqns][-1]
        ('mul', True)
    """
    depth, outer = 0, ""
    for letter in str(eqn.source_info.name_stack):
        depth -= letter == ")"
        outer += letter if depth == 0 else ""
        depth += letter == "("
    return any(part.startswith("transpose(") for part in outer.split("/"))


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation."""
    variables = list(dict.fromkeys(a for a in eqn.invars if compat.is_var(a)))
    given = {a: x for a, x in zip(eqn.invars, values, strict=True) if compat.is_var(a)}
    jaxpr = compat.make_jaxpr_of([eqn], variables, eqn.outvars)
    return list(jax.core.eval_jaxpr(jaxpr, (), *(given[v] for v in variables)))


def subject_of(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], argnums: AnyArgnums,
               target: Target) -> Subject:  # fmt: skip
    """Trace a function: a loss with its gradient, or a step that has its gradients in it.

    A scalar result is that of a loss. A pair of a scalar and more is too, unless the function has a backward pass and
    returns one of its arguments updated.
    """
    is_planned = isinstance(getattr(type(fun), "statics", None), property) or hasattr(fun, "report")
    if argnums is None:
        traced = _traced(fun, args, kwargs)
        if not _is_loss(traced):
            infos = jax.tree.leaves(traced.args_info)
            leaves = [leaf for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "sharding")]
            where = map(_spread, leaves) if len(leaves) == len(infos) else [None] * len(infos)
            shapes = [
                jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)
                for info, sharding in zip(infos, where, strict=True)
            ]
            return Subject(jex_core.jaxpr_as_fun(traced.jaxpr), tuple(shapes), traced.jaxpr,
                           tuple(info.donated for info in infos), target, traced.args_info[0], traced.out_info,
                           len(traced.args_info[0]) < len(args),
                           is_planned=is_planned)  # fmt: skip
        if len(traced.args_info[0]) < len(args):  # it is under `jax.jit`, with static arguments
            fun, (args, kwargs) = _of_the_rest(traced)
    program = trace_call(fun, args, kwargs, argnums)
    return of_loss(program, as_traced(program), target, is_planned=is_planned)


def of_loss(program: Program, flat: Flat, target: Target, *, is_planned: bool = False) -> Subject:
    """The gradient of a loss, a function of its program's flat inputs."""
    function, structured = gradient(program, flat)
    shapes, tree = jax.tree.flatten(structured)

    def call(*inputs: Any) -> Any:
        return function(*jax.tree.unflatten(tree, inputs))

    closed = jax.make_jaxpr(call)(*shapes)
    return Subject(call, tuple(shapes), closed, (False,) * len(shapes), target, program=program, is_planned=is_planned)


def _traced(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function under `jax.jit`, traced: what it changes in place is returned, static leaves of results are not."""
    if hasattr(fun, "trace") and hasattr(traced := fun.trace(*args, **kwargs), "args_info"):
        return traced
    if hasattr(fun, "lower"):  # the `jit` of another library
        fun = getattr(fun, "__wrapped__", fun)
    statics = Statics.of(returning_changes(fun), (), ())
    fixed, dynamic_args, dynamic_kwargs = statics.split(args, kwargs)
    check_leaves(jax.tree_util.tree_flatten_with_path((dynamic_args, dynamic_kwargs))[0])
    bound = statics.bind(fixed, len(args))
    return jax.jit(lambda *a, **k: passing(bound(*a, **k))).trace(*dynamic_args, **dynamic_kwargs)


def _of_the_rest(traced: Any) -> tuple[Callable[..., Any], Any]:
    """A function under `jax.jit` as one of the arguments that are not static, and shapes of these."""
    flat, tree = jex_core.jaxpr_as_fun(traced.jaxpr), jax.tree.structure(traced.out_info)

    def call(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.unflatten(tree, flat(*jax.tree.leaves((args, kwargs))))

    return call, jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), traced.args_info)


def _is_loss(traced: Any) -> bool:
    leaves, tree = jax.tree.flatten(traced.out_info)
    if loss_position(tree, leaves) is None:
        return False
    has_backward = any(is_backward(eqn) for eqn in flatten_closed(traced.jaxpr)[0])
    return not (has_backward and any(returned_anew(arg, traced.out_info) for arg in traced.args_info[0]))


def returned_anew(arg: Any, out_info: Any) -> bool:
    """Whether a result, or a branch of its tree, has an argument's tree, shapes and dtypes; not of scalars alone.

    Example:
        >>> w = jax.ShapeDtypeStruct((2, 3), "float32")
        >>> returned_anew({"w": w}, ({"w": w}, jax.ShapeDtypeStruct((), "float32"))), returned_anew(w, {"v": 1.0})
        (True, False)
    """
    wanted = _form(arg)
    if not any(shape for shape, _ in wanted[1]):
        return False
    return wanted == _form(out_info) or any(
        branch is not out_info and returned_anew(arg, branch)
        for branch in jax.tree.leaves(out_info, is_leaf=lambda x: x is not out_info)
    )


def _form(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(x, "shape", ()), str(getattr(x, "dtype", type(x)))) for x in leaves]


def _spread(leaf: Any) -> Any:
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
