"""Rewrite a program's loops and conditionals as a plan says.

A scan becomes an outer scan over blocks of steps, each block a `jax.checkpoint` around an inner scan, as deep as the
`Loop` says; steps that no block size divides follow as one shorter block. A step may be a region that saves named
values of its body, and there may be regions and barriers inside the body. All of it goes through `jax.lax.scan` with
the body evaluated from its jaxpr, a conditional likewise through `jax.lax.switch`. Each rewritten equation becomes one
`jit` equation, so nodes keep their numbers; where that is traced it is inlined, since XLA makes no constant inside a
loop, such as the cotangent of a mean, that a call hands to it.

The last steps may stay outside all blocks without recompute: their backward pass comes first.

**Copies.** Every level of nested scans copies the slices of xs that its blocks read, and the gradients of xs that they
make. The first kind is avoided: recomputed steps read the whole xs at their own index, and only the tangent comes
through the slices (`_at`), which are then dead code. The second kind remains: a region's gradients are results of its
own, whole slices for a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxsub.core.decisions import Conditional, ControlFlow, Inside, Loop, depth_of, is_saving
from jaxsub.emission.regions import with_regions
from jaxsub.emission.scan_unrolling import unrolled
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.inline import flatten_jaxpr
from jaxsub.jaxpr.new_equations import call_eqn
from jaxsub.jaxpr.tangents import carried
from jaxsub.jaxpr.trace import Program, program_of
from jaxsub.partition.run_function import run_function

Values = tuple[Any, ...]
Step = Callable[[Values, Values, Values], tuple[Values, Values]]
"""(constants, carry, slice of xs) -> (carry, slice of ys)."""


def with_loops(
    program: Program, loops: Sequence[ControlFlow], name: str = "", *, holds_weights: bool = True
) -> Program:
    """Rewrite some scans and conditionals of a program; everything else, its graph too, stays as it is.

    Args:
        program: The program.
        loops: How they run.
        name: The name by which the innermost region around the program saves; empty for no region that saves.
        holds_weights: Whether gradient barriers hold weights in loops that are written out (`with_regions`).
    """
    if not loops:
        return program
    eqns, signatures = list(program.eqns), list(program.signatures)
    for loop in loops:
        run: Callable[[Sequence[Any]], Sequence[Any]] = (
            _Scan.of(program, loop, name, holds_weights=holds_weights)
            if isinstance(loop, Loop)
            else _switch(program, loop, name)
        )
        eqns[loop.node] = _rewritten(program.eqns[loop.node], run)
        signatures[loop.node] = _signature(signatures[loop.node], loop)
    return replace(program, eqns=tuple(eqns), signatures=tuple(signatures))


def body_program(program: Program, node: int) -> Program:
    """Make a program of a scan's body: a function of constants, carry and slices of xs, in this order.

    A gradient may flow to its differentiated inputs; what is carried is among them if it has a tangent at some step.
    """
    eqn, graph = program.eqns[node], program.graph
    eqns, invars, outvars, consts = flatten_jaxpr(eqn.params["jaxpr"], keeps_slices=True)
    index = iter(graph.nodes[node].inputs)
    active = [compat.is_var(a) and graph.values[next(index)].is_differentiated for a in eqn.invars]
    positions = {len(consts) + i for i, is_active in enumerate(carried(eqn, active)) if is_active}
    names = ["const"] * len(invars)
    body = program_of(eqns, invars, outvars, consts, positions, None, None, names, eqn.params["jaxpr"])
    return program.part(body, node)


def branch_programs(program: Program, node: int) -> tuple[Program, ...]:
    """Make programs of a conditional's branches: functions of its operands without the index."""
    eqn, graph = program.eqns[node], program.graph
    index = iter(graph.nodes[node].inputs)
    active = [compat.is_var(a) and graph.values[next(index)].is_differentiated for a in eqn.invars][1:]
    branches = (_branch_program(branch, active) for branch in eqn.params["branches"])
    return tuple(program.part(branch, node, number) for number, branch in enumerate(branches))


def _branch_program(branch: Any, active: Sequence[bool]) -> Program:
    eqns, invars, outvars, consts = flatten_jaxpr(branch, keeps_slices=True)
    positions = {len(consts) + i for i, is_active in enumerate(active) if is_active}
    return program_of(eqns, invars, outvars, consts, positions, None, None, ["const"] * len(invars), branch)


def _signature(signature: bytes, loop: ControlFlow) -> bytes:
    return hashlib.blake2b(signature + repr(replace(loop, node=0)).encode(), digest_size=12).digest()


def _rewritten(eqn: Any, function: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    def run(*args: Any) -> list[Any]:
        # an output that is an input would be left out of the equation's outputs
        with jax.named_scope(f"jaxsub_{eqn.primitive.name}"):  # what a profile shows of it
            return [jax.lax.optimization_barrier(o) if any(o is a for a in args) else o for o in function(args)]

    call = call_eqn(run, [a.aval for a in eqn.invars])
    if [v.aval.shape for v in call.outvars] != [v.aval.shape for v in eqn.outvars]:
        raise AssertionError(f"rewritten, `{eqn.primitive.name}` returns {call.outvars}, as it was {eqn.outvars}")
    params = {**call.params, **compat.INLINE}
    return call.replace(invars=list(eqn.invars), outvars=list(eqn.outvars), params=params, source_info=eqn.source_info)


def _switch(program: Program, way: Conditional, name: str) -> Callable[[Sequence[Any]], Sequence[Any]]:
    inner = _name_inside(way, name)
    branches = [
        _planned(branch, inside, inner)
        for branch, inside in zip(branch_programs(program, way.node), way.branches, strict=True)
    ]

    def switch(*args: Any) -> list[Any]:
        found: list[Any] = jax.lax.switch(args[0], branches, *args[1:])
        return found

    region = _region(switch, way, prevent_cse=True) if way.is_recomputed else switch
    return lambda args: region(*args)


def _name_inside(way: ControlFlow, name: str) -> str:
    """The name by which the innermost region around the programs of a loop or conditional saves.

    In regions inside one another names differ: an outer one sees those of an inner one too.
    """
    if way.is_recomputed:
        return f"jaxsub_inside_{depth_of(way)}"
    return "" if isinstance(way, Loop) and way.blocks else name


def _region(run: Any, way: ControlFlow, *, prevent_cse: bool) -> Any:
    """Make a region of a step or conditional that saves what is saved inside it."""
    policy = jax.checkpoint_policies.save_only_these_names(_name_inside(way, "")) if is_saving(way) else None
    return compat.checkpoint(run, prevent_cse=prevent_cse, policy=policy)


def _planned(body: Program, inside: Inside, name: str = "", *, holds_weights: bool = True) -> Callable[..., list[Any]]:
    """Make a function of a body or branch under a plan."""
    body = with_loops(body, inside.ways, name, holds_weights=holds_weights)
    if inside.saved and name:
        function = _named(body, inside.saved, name)
        return compat.checkpoint(function) if inside.segments else function
    function = with_regions(body, inside.segments, inside.barriers, scope="", holds_weights=holds_weights)
    dtypes = [a.aval.dtype for a in body.outvars]
    return lambda *args: [o if isinstance(o, jax.Array) else jnp.asarray(o, d)
                          for o, d in zip(function(*body.consts, *args), dtypes, strict=True)]  # fmt: skip


@jax.custom_jvp
def _at(whole: Any, index: Any, part: Any) -> Any:
    """Read `whole[index]` with the tangent of `part`, which is the same value.

    Where JAX drops the rule, as for second derivatives, the tangent is that of `whole[index]`, which is equal, so
    nothing may stop `whole`'s gradient.
    """
    return jax.lax.dynamic_index_in_dim(whole, index, keepdims=False)


@_at.defjvp
def _at_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _at(*primals), tangents[2]


def body_of(program: Program, loop: Loop) -> tuple[Program, int]:
    """The body of a loop, or all its steps where they are unrolled, and how many values it carries."""
    eqn, body = program.eqns[loop.node], body_program(program, loop.node)
    n_consts, n_carry = compat.scan_sizes(eqn)
    if loop.is_unrolled:
        params = eqn.params
        steps = unrolled(body, len(body.consts) + n_consts, n_carry, params["length"], reverse=params["reverse"])
        body = replace(steps, is_repeated=program.is_repeated)  # their gradients are summed among them
    return body, n_carry


def step_of(program: Program, loop: Loop) -> tuple[Program, Callable[..., Values], tuple[int, int]]:
    """The body of a loop, a step of it as a function of all its inputs, and how many are constants and carries."""
    body, n_carry = body_of(program, loop)
    n_consts = len(body.consts) + compat.scan_sizes(program.eqns[loop.node])[0]
    step = _step(body, n_carry, loop.inside, _name_inside(loop, ""))
    step = _region(step, loop, prevent_cse=False) if loop.is_recomputed else step
    n, end = len(body.consts), n_consts + n_carry

    def run(*args: Any) -> Values:
        carry, ys = step(args[n:n_consts], args[n_consts:end], args[end:])
        return (*carry, *ys)

    return body, run, (n_consts, n_carry)


@dataclass(frozen=True, slots=True, eq=False)
class _Scan:
    """A scan that runs as a `Loop` says."""

    eqn: Any
    loop: Loop
    step: Step
    kept_step: Step

    @classmethod
    def of(cls, program: Program, loop: Loop, name: str, *, holds_weights: bool) -> _Scan:
        eqn, (body, n_carry) = program.eqns[loop.node], body_of(program, loop)
        n_consts = compat.scan_sizes(eqn)[0]
        is_split = bool(loop.blocks or loop.kept_steps)
        holds_weights = loop.is_recomputed or (loop.is_unrolled and holds_weights)
        step = _step(body, n_carry, loop.inside, _name_inside(loop, name), holds_weights=holds_weights)
        step = _indexed(step, n_consts) if is_split else step
        if loop.is_recomputed:  # in a loop CSE finds nothing equal
            step = _region(step, loop, prevent_cse=False)
        last = Loop(loop.node, is_recomputed=loop.kept_saved is not None, inside=Inside(saved=loop.kept_saved or ()))
        kept = _step(body, n_carry, last.inside, _name_inside(last, ""))
        if last.is_recomputed:  # a loop of one step is none to the compiler
            kept = _region(_indexed(kept, n_consts), last, prevent_cse=loop.kept_steps == 1)
        return cls(eqn, loop, step, kept)

    def __call__(self, args: Sequence[Any]) -> Values:
        n_consts, n_carry = compat.scan_sizes(self.eqn)
        consts, rest = tuple(args[:n_consts]), tuple(args[n_consts:])
        carry, xs = rest[:n_carry], rest[n_carry:]
        if self.loop.is_unrolled:
            carry, ys = self.step(consts, carry, xs)
        else:
            carry, ys = self._run(consts, carry, xs)
        return (*carry, *ys)

    def _run(self, consts: Values, carry: Values, xs: Values) -> tuple[Values, Values]:
        """Run all steps."""
        loop, length = self.loop, self.eqn.params["length"]
        if not loop.blocks and not loop.kept_steps:
            return self._scan(self.step, consts, carry, xs, length)
        n_head = length - loop.kept_steps
        known = (*consts, *xs)
        head, tail = self._parts((jnp.arange(length), *xs), n_head, length)
        carry, ys = self._blocks(known, carry, head, n_head, loop.blocks)
        if n_head < length:
            known, tail = (consts, tail[1:]) if loop.kept_saved is None else (known, tail)
            carry, more = self._scan(self.kept_step, known, carry, tail, length - n_head)
            ys = self._joined(ys, more)
        return carry, ys

    def _blocks(
        self, consts: Values, carry: Values, xs: Values, length: int, sizes: Sequence[int]
    ) -> tuple[Values, Values]:
        """Run steps in blocks of `sizes[0]`, each in blocks of `sizes[1]`, and so on."""
        sizes = [s for s in sizes if s < length]
        if not sizes:
            return self._scan(self.step, consts, carry, xs, length)
        size, n = sizes[0], length // sizes[0]

        def block(consts: Values, carry: Values, xs: Values) -> tuple[Values, Values]:
            return self._blocks(consts, carry, xs, size, sizes[1:])

        def rest(consts: Values, carry: Values, xs: Values) -> tuple[Values, Values]:
            return self._blocks(consts, carry, xs, length - n * size, sizes[1:])

        head, tail = self._parts(xs, n * size, length)
        grouped = tuple(x.reshape((n, size, *x.shape[1:])) for x in head)
        carry, ys = self._scan(compat.checkpoint(block, prevent_cse=False), consts, carry, grouped, n)
        ys = tuple(y.reshape((n * size, *y.shape[2:])) for y in ys)
        if n * size < length:
            carry, more = compat.checkpoint(rest)(consts, carry, tail)
            ys = self._joined(ys, more)
        return carry, ys

    def _scan(self, step: Step, consts: Values, carry: Values, xs: Values, length: int) -> tuple[Values, Values]:
        params = self.eqn.params
        more = {"_split_transpose": True} if params.get("_split_transpose") else {}
        return jax.lax.scan(lambda c, x: step(consts, c, x), carry, xs, length, reverse=params["reverse"],
                            unroll=max(1, min(params["unroll"], length)), **more)  # fmt: skip

    def _parts(self, xs: Values, n_head: int, length: int) -> tuple[Values, Values]:
        """Split xs into those of the first `n_head` steps to run and those of the others."""
        if n_head == length:
            return xs, ()
        cut = length - n_head if self.eqn.params["reverse"] else n_head
        low, high = tuple(x[:cut] for x in xs), tuple(x[cut:] for x in xs)
        return (high, low) if self.eqn.params["reverse"] else (low, high)

    def _joined(self, head: Values, tail: Values) -> Values:
        pairs = zip(tail, head, strict=True) if self.eqn.params["reverse"] else zip(head, tail, strict=True)
        return tuple(jnp.concatenate(pair) for pair in pairs)


def _step(body: Program, n_carry: int, inside: Inside, name: str, *, holds_weights: bool = True) -> Step:
    """Make a step from the body under a plan."""
    function = _planned(body, inside, name, holds_weights=holds_weights)

    def step(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
        outs = tuple(function(*consts, *carry, *x))
        return outs[:n_carry], outs[n_carry:]

    return step


def _named(body: Program, saved: Sequence[int], name: str) -> Callable[..., list[Any]]:
    """Make a function of a body or branch in which some values have a name."""
    base, graph, last = len(body.invars), body.graph, body.graph.last_uses()
    function = run_function(body, 0, len(body.eqns), tag=lambda x, _: compat.checkpoint_name(x, name), saved=saved)
    index = {v: i for i, v in enumerate([*body.invars, *(v for eqn in body.eqns for v in eqn.outvars)])}
    outputs = [index[a] if compat.is_var(a) else a for a in body.outvars]
    made = [v for v in range(base, len(graph.values)) if last[v] >= len(body.eqns)]
    results = sorted(made, key=lambda v: not graph.values[v].is_differentiated)

    def named(*args: Any) -> list[Any]:
        env = dict(enumerate((*body.consts, *args)))
        active, rest = function.call(*[env[v] for v in function.reads])
        env.update(zip(results, (*active, *rest), strict=True))
        return [env[o] if isinstance(o, int) else jnp.asarray(o.val, o.aval.dtype) for o in outputs]

    return named


def _indexed(step: Step, n_consts: int) -> Step:
    """Make a step take its index with its slices and read there the whole xs, which come after the constants."""

    def at_index(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
        parts = zip(consts[n_consts:], x[1:], strict=True)
        return step(consts[:n_consts], carry, tuple(_at(whole, x[0], part) for whole, part in parts))

    return at_index
