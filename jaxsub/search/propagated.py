"""Find what one device holds of each value of a sharded program, by the compiler's own propagation of shardings.

The plain gradient is lowered, each equation in a scope of its own, and goes through the passes of Shardy with which XLA
begins to compile it; nothing is compiled. Then the values of the forward pass are looked up by their scopes. Shardings
of arguments alone would not do: XLA may split activations along the features that weights are split along, and others
not at all.

Source: Shardy, `sdy-propagation-pipeline` (OpenXLA).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.core
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy

from jaxsub.core.disk_cache import Store
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.compile import lower_for
from jaxsub.devices.targets import Target
from jaxsub.emission.bodies import bodies_of_node, with_bodies
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.shardings import ONE_DEVICE, Shares, data_share, gathered_bytes
from jaxsub.jaxpr.trace import Program, remembered
from jaxsub.partition.inner_programs import find_nested
from jaxsub.search.verify import gradient

SCOPE = re.compile(r"jaxsub_equation_([\d.]+)\b")
PROPAGATION = "builtin.module(sdy-propagation-pipeline)"

UNEVEN = 0.05
"""Shares that differ by no more are of axes that devices do not divide evenly."""

Shape = tuple[int, ...]
Found = Mapping[str, Sequence[tuple[Shape, float]]]
"""Shapes of the results in each scope, with the shares of them that one device holds."""


@remembered
def shares_of(program: Program, target: Target) -> Shares:
    """What one device holds of each value of a program.

    Where a program is not lowered, all is split as the data is: with named axes, as inside of `jax.shard_map`, with a
    primitive that has no lowering, or with Shardy turned off.
    """
    if not program.shardings:
        return ONE_DEVICE
    as_data = Shares(data_share(program.avals(), program.shardings, program.differentiated))
    if compat.names_axes(program.traced) or not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return as_data
    flat = partial(jax.core.eval_jaxpr, _jaxpr_of(program, ""), ())
    try:
        module = lower_for(*gradient(program, flat), target).compiler_ir("stablehlo")
    except NotImplementedError:
        return as_data
    with module.context:
        passmanager.PassManager.parse(PROPAGATION).run(module.operation)
        found: dict[str, list[tuple[Shape, float]]] = {}
        for scope, shape, share in _results(module.operation, dict(program.shardings[0].mesh.shape)):
            found.setdefault(scope, []).append((shape, share))
    inputs = [math.prod(s.shard_shape(tuple(a.shape))) / max(math.prod(a.shape), 1)
              for s, a in zip(program.shardings, program.avals(), strict=True)]  # fmt: skip
    held = _Held.of(program, inputs, found)
    return held.shares(held.most())


def pricer_of(program: Program, target: Target, store: Store | None = None, **more: Any) -> Pricer:
    """Make the pricer of a program: each value counts by what one device holds of it. More options as for `Pricer`."""
    gathered = gathered_bytes(program.avals(), program.shardings, program.differentiated)
    return Pricer(program, target, store, shares=shares_of(program, target), gathered=gathered, **more)


def carried(pricer: Pricer, changed: Program) -> Pricer:
    """Make the pricer of a changed program: some of its equations are replaced by others, or it is one slice."""
    gathered = gathered_bytes(changed.avals(), changed.shardings, changed.differentiated)
    shares = carried_shares(pricer.shares, pricer.program, changed)
    return replace(pricer, program=changed, shares=shares, gathered=gathered)


def carried_shares(shares: Shares, program: Program, changed: Program) -> Shares:
    """The shares of a program for another in which some of its equations are replaced by others; unknown ones are 1.

    Of a slice only the share of most values is known.
    """
    if not (changed.shardings and shares.values):
        return Shares(shares.most)
    known = dict(zip(map(program.variable, range(len(program.graph.values))), shares.values, strict=True))
    values = tuple(known.get(changed.variable(v), 1.0) for v in range(len(changed.graph.values)))
    nodes = {id(eqn.outvars[0]): i for i, eqn in enumerate(changed.eqns) if eqn.outvars}
    bodies = {(nodes[at], number): body for (node, number), body in shares.bodies.items()
              if (at := id(program.eqns[node].outvars[0])) in nodes}  # fmt: skip
    return Shares(shares.most, values, bodies)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """The share of each value of a program that one device holds, `None` where it is not known; bodies likewise.

    `weights` are bytes of the values, `times` how often the program runs.
    """

    values: tuple[float | None, ...]
    weights: tuple[int, ...]
    times: int
    bodies: dict[tuple[int, int], _Held]

    @classmethod
    def of(cls, program: Program, inputs: Sequence[float | None], found: Found, prefix: str = "",
           times: int = 1) -> _Held:  # fmt: skip
        """Look up the values of a program by the scopes of their equations."""
        graph, shares = program.graph, list(inputs)
        for node in graph.nodes:
            made = found.get(f"{prefix}{node.index}", ())
            read = [(graph.values[v].shape, shares[v]) for v in node.inputs]  # names are lowered to nothing
            shares += [next((share for shape, share in (*made, *read) if shape == graph.values[v].shape), None)
                       for v in node.outputs]  # fmt: skip
        by_variable = dict(zip(map(program.variable, range(len(shares))), shares, strict=True))
        bodies = {}
        for at in find_nested(program):
            eqn = program.eqns[at]
            length = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
            for number, body in enumerate(bodies_of_node(program, at)):
                n_consts = len(body.consts)
                operands = eqn.invars[len(eqn.invars) - len(body.invars) + n_consts :]  # without a conditional's index
                given = [by_variable.get(a) if compat.is_var(a) else None for a in operands]
                bodies[at, number] = cls.of(body, [*[None] * n_consts, *given], found, f"{prefix}{at}.{number}.",
                                            times * length)  # fmt: skip
        return cls(tuple(shares), tuple(v.n_bytes for v in graph.values), times, bodies)

    def weighed(self) -> Iterator[tuple[float, int]]:
        """The known shares, each with the bytes that it is of."""
        yield from ((share, size * self.times) for share, size in zip(self.values, self.weights, strict=True)
                    if share is not None)  # fmt: skip
        for body in self.bodies.values():
            yield from body.weighed()

    def most(self) -> float:
        """The share that most bytes have: the median."""
        found = sorted(self.weighed())
        half, total = sum(size for _, size in found) / 2, 0
        for share, size in found:
            total += size
            if total >= half:
                return share
        return 1.0

    def shares(self, most: float) -> Shares:
        """Each share relative to that of most values; one that is not known, or about the same, is that."""
        relative = (1.0 if share is None else share / most for share in self.values)
        values = tuple(1.0 if abs(share - 1) <= UNEVEN else share for share in relative)
        return Shares(most, values, {at: body.shares(most) for at, body in self.bodies.items()})


def _jaxpr_of(program: Program, prefix: str) -> Any:
    """A program's jaxpr with each equation in a scope of its own, also in the bodies of loops and conditionals."""
    eqns = list(program.eqns)
    for node in find_nested(program):
        eqns[node] = with_bodies(program, node, lambda body, at: _jaxpr_of(body, f"{prefix}{at[0]}.{at[1]}."))
    for i, eqn in enumerate(eqns):
        stack = eqn.source_info.name_stack.extend(f"jaxsub_equation_{prefix}{i}")
        eqns[i] = eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))
    return compat.make_jaxpr_of(eqns, program.invars, program.outvars, program.traced)


def _results(operation: Any, axes: Mapping[str, int]) -> Iterator[tuple[str, Shape, float]]:
    """Results of the forward pass, by scope, in order."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                name = str(op.location).split('"(')[0]
                scopes = list(SCOPE.finditer(name))
                if scopes and "transpose(" not in name[: scopes[-1].start()]:
                    yield from ((scopes[-1][1], *found) for found in _held(op, axes))
                yield from _results(op.operation, axes)


def _held(op: Any, axes: Mapping[str, int]) -> Iterator[tuple[Shape, float]]:
    if "sdy.sharding" in op.attributes:
        shardings = list(sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings)
    else:  # a constraint of the user's has another attribute
        shardings = [op.attributes.get("sharding", None)] * len(op.results)
    for result, sharding in zip(op.results, shardings, strict=True):
        if isinstance(result.type, ir.RankedTensorType):
            shape = tuple(result.type.shape)
            dims = sdy.TensorShardingAttr(sharding).dimension_shardings if sharding is not None else ()
            yield shape, _share(shape, dims, axes)


def _share(shape: Shape, dims: Sequence[Any], axes: Mapping[str, int]) -> float:
    """The share of an array that one device holds; whole without dimensions' shardings."""
    share = 1.0
    for size, dim in zip(shape, dims, strict=False):
        names = map(sdy.AxisRefAttr, sdy.DimensionShardingAttr(dim).axes)
        parts = math.prod(sdy.SubAxisInfoAttr(name.sub_axis_info).size if name.sub_axis_info else axes[name.name]
                          for name in names)  # fmt: skip
        share *= -(-size // parts) / max(size, 1)
    return share
