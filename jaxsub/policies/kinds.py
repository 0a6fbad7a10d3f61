"""The policies: one class each, which makes the regions of a traced function.

A function goes in as a `Program`, a `Plan` comes out, for `jaxsub.emission.emit`. A policy that can decide for one
equation at a time also follows JAX's protocol: called with an equation, it says whether to save the result.

Sources: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016: §4.2 for `SaveCostly`, §4.3
for `Sqrt`, §4.4 for `Recursive`. `SaveWithin` uses the minimum cut of `jaxsub.partition.min_cut`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.decisions import Segment
from jaxsub.core.errors import PolicyError, UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.flops import COSTLY, bodies_of
from jaxsub.jaxpr.trace import Program
from jaxsub.partition.cuts import find_cuts
from jaxsub.partition.min_cut import Choice, choices
from jaxsub.partition.traced_run import trace_run
from jaxsub.planners import Planner
from jaxsub.planners import get as get_planner


class Policy:
    """Base of all policies: which values a wrapped function saves."""

    __slots__ = ()
    name: ClassVar[str]

    def __str__(self) -> str:
        """The policy's name, as `get` reads it."""
        return self.name

    def __call__(self, primitive: Any, /, *avals: Any, **params: Any) -> bool:
        """Refuse to decide for one equation; policies that can override this."""
        raise UnsupportedError(
            f"The policy {self} decides for a whole function, but jax.checkpoint calls it for one equation at a time. "
            f'Wrap the function with jaxsub.policies.checkpoint(fun, policy="{self}"), jaxsub.flax.linen.remat, '
            "jaxsub.flax.nnx.remat or jaxsub.equinox.filter_checkpoint instead, or use save_nothing, save_all or "
            "save_costly."
        )

    def plan(self, program: Program) -> Plan:
        """Make the regions of a traced function."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SaveNothing(Policy):
    """Save nothing: everything is recomputed from the function's inputs."""

    name: ClassVar[str] = "save_nothing"

    def __call__(self, primitive: Any, /, *avals: Any, **params: Any) -> bool:
        """No result may be saved."""
        return False

    def plan(self, program: Program) -> Plan:
        """Make one region that saves nothing."""
        return _one_region(program, ())


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SaveAll(Policy):
    """Save everything: nothing is recomputed."""

    name: ClassVar[str] = "save_all"

    def __call__(self, primitive: Any, /, *avals: Any, **params: Any) -> bool:
        """Every result may be saved."""
        return True

    def plan(self, program: Program) -> Plan:
        """Make a plan without regions."""
        return _plan(program, ())


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SaveCostly(Policy):
    """Save the results of costly operations and recompute the cheap ones: the paper's "drop the results of low cost".

    Costly are the primitives of `jaxsub.jaxpr.flops.COSTLY`: matrix products, convolutions, sorts, decompositions, and
    loops over these. Elementwise maps, reductions and normalisations are cheap.

    Attributes:
        costly: Names of further primitives to count as costly, such as `"exp"`.
        cheap: Names of primitives to count as cheap, against the cost model.

    Raises:
        PolicyError: If a name is in both, or is no primitive's name.

    Example:
        >>> policy = SaveCostly(costly=["exp"], cheap=["sort"])
        >>> str(policy), policy.costly
        ('save_costly(+exp, -sort)', ('exp',))

    References:
        Chen et al., 2016, §4.2.
    """

    costly: tuple[str, ...] = ()
    cheap: tuple[str, ...] = ()
    name: ClassVar[str] = "save_costly"

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            found = tuple(sorted({given} if isinstance(given, str) else set(given)))
            if wrong := [n for n in found if not isinstance(n, str) or not re.fullmatch(r"[\w.-]+", n)]:
                raise PolicyError(f"save_costly takes names of primitives such as 'exp', got {wrong[0]!r}.")
            object.__setattr__(self, field.name, found)
        if both := sorted(set(self.costly) & set(self.cheap)):
            raise PolicyError(f"save_costly cannot count {both[0]!r} as costly and as cheap.")

    def __str__(self) -> str:
        """The policy's name, with its overrides."""
        changes = ", ".join([*(f"+{n}" for n in self.costly), *(f"-{n}" for n in self.cheap)])
        return f"{self.name}({changes})" if changes else self.name

    def __call__(self, primitive: Any, /, *avals: Any, **params: Any) -> bool:
        """Tell whether the primitive counts as costly."""
        return self.is_costly(primitive.name, _Equation(primitive, params))

    def is_costly(self, name: str, eqn: Any) -> bool:
        """Tell whether an equation of a primitive of this name is costly, itself or in an inner program."""
        if name in self.costly or name in self.cheap:
            return name in self.costly
        if name in COSTLY:
            return True
        return any(self.is_costly(inner.primitive.name, inner) for body in bodies_of(eqn) for inner in body.eqns)

    def plan(self, program: Program) -> Plan:
        """Make one region that saves the costly results."""
        nodes, values = program.graph.nodes, program.graph.values
        keep = [n for n, eqn in zip(nodes, program.eqns, strict=True) if self.is_costly(n.primitive, eqn)]
        return _one_region(program, [v for n in keep for v in n.outputs if values[v].consumers])


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SaveWithin(Policy):
    """Save at most so many bytes, beside the function's inputs and outputs; recompute as little as they allow.

    A minimum cut over the function's backward pass finds the values worth their bytes. There is one region: it bounds
    the saved bytes, not the peak of the function's own backward pass. To bound the peak, give `jaxsub.sublinear` a
    budget.

    Attributes:
        n_bytes: The limit in bytes.
    """

    n_bytes: int
    name: ClassVar[str] = "save_within"

    def __post_init__(self) -> None:
        if isinstance(self.n_bytes, bool) or not isinstance(self.n_bytes, int) or self.n_bytes < 1:
            raise PolicyError(f"save_within takes a positive number of bytes, got {self.n_bytes!r}.")

    def __str__(self) -> str:
        """The policy's name and its limit, exact."""
        text = format_bytes(self.n_bytes).replace(" ", "")
        exact = text if Budget.parse(text).n_bytes == self.n_bytes else f"{self.n_bytes}B"
        return f"{self.name}({exact})"

    def plan(self, program: Program) -> Plan:
        """Make one region that saves the values that fit."""
        found = choices(trace_run(program, 0, len(program.eqns)), least_gain=0.0)
        base = program.graph.first_value(0)
        return _one_region(program, [base + offset for offset in _within(program, found, self.n_bytes)])


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Sqrt(Policy):
    """Cut the function into about √n segments and save the values between them: the paper's O(√n) memory.

    The paper's search over B finds the cuts. A function that returns no scalar loss counts as a part of a network: its
    last segment is recomputed like the others.

    References:
        Chen et al., 2016, §4.3, Algorithm 3 and Appendix A.
    """

    name: ClassVar[str] = "sqrt"

    def plan(self, program: Program) -> Plan:
        """Make the paper's segments."""
        return _planned(program, get_planner("chen"))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Recursive(Policy):
    """Save k results and divide the parts between them in the same way: the paper's O(log n) memory, O(n log n) time.

    Attributes:
        k: How many results to save at every level, at least 1; 1 takes the least memory and the most time.

    References:
        Chen et al., 2016, §4.4.
    """

    k: int = 1
    name: ClassVar[str] = "recursive"

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise PolicyError(f"recursive(k) saves at least 1 result at every level, got k={self.k!r}.")

    def __str__(self) -> str:
        """The policy's name and k."""
        return f"{self.name}({self.k})"

    def plan(self, program: Program) -> Plan:
        """Make nested segments."""
        return _planned(program, get_planner(f"recursive({self.k})"))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Equation:
    """The part of an equation that JAX passes to a policy."""

    primitive: Any
    params: dict[str, Any]


def _plan(program: Program, segments: Sequence[Segment]) -> Plan:
    return Plan(program.fingerprint, Budget(), len(program.eqns), tuple(segments), planner="policy")


def _one_region(program: Program, saved: Sequence[int]) -> Plan:
    n = len(program.eqns)
    return _plan(program, [Segment(0, n, tuple(sorted(saved)))] if n else [])


def _within(program: Program, found: Sequence[Choice], n_bytes: int) -> set[int]:
    """Choose the largest choice that fits, and more values of the next one while they fit: offsets of values."""
    best = max((c for c in found if c.saved_bytes <= n_bytes), key=lambda c: c.saved_bytes)
    saved, left = set(best.saved), n_bytes - best.saved_bytes
    larger = [c for c in found if c.saved_bytes > n_bytes]
    base = program.graph.first_value(0)
    outputs = set(program.graph.outputs)
    for offset in min(larger, key=lambda c: c.saved_bytes).saved if larger else ():
        size = 0 if base + offset in outputs else program.graph.values[base + offset].n_bytes
        if offset not in saved and size <= left:
            saved.add(offset)
            left -= size
    return saved


def _planned(program: Program, planner: Planner) -> Plan:
    """Make a planner's natural plan; in a part of a network, wrap the stages that it leaves unwrapped too."""
    if not program.eqns:  # dropout at inference
        return _plan(program, [])
    pricer = Pricer(program, get_target(None))
    plan = planner(pricer.chain(find_cuts(program.graph), sizes=()), None)
    if program.loss is not None:
        return plan
    return plan.replace(segments=tuple(_covering(plan.segments, plan.n_nodes)))


def _covering(segments: Sequence[Segment], n_nodes: int) -> list[Segment]:
    """Add a segment for each run of nodes between the segments."""
    covered, at = [], 0
    for segment in [*segments, Segment(n_nodes, n_nodes + 1)]:
        if segment.start > at:
            covered.append(Segment(at, segment.start))
        covered.append(segment)
        at = segment.stop
    return covered[:-1]
