"""Checkmate's integer program over a chain: the cheapest schedule that fits.

The forward pass runs once. Then, before the backward pass of stage t, any earlier stages may be recomputed, in order,
and any values may be dropped or held for later: this is phase t, Checkmate's stage with its frontier at t. Going from
the last phase to the first,

* `R[t, i]`: stage i is recomputed in phase t;
* `S[t, c]`: the values c are live when phase t begins; `E[t, c]`: when stage t runs backward, at its end;
* `M[t, c, i]`: c is still to be read in phase t when stage i runs in it: the complement of Checkmate's FREE;
* `K[t, o]`, `RK[t, o]`: the bytes that mode o keeps of its stages are live when phase t begins; are made in it;
* `Z[o]`: mode o is how its stages run backward: with nothing saved, with an option's saved values, or with what the
  compiler keeps of a stage that is not wrapped.

The sum of live bytes at each step is Checkmate's U, and must fit the budget. Bytes, cotangents, transients and FLOPs
are those of `jaxsub.core.simulate.predict`; as there, a stage reads all values that are made before it and used at or
after it. Kept bytes that take the place of an input (`Crossing.is_spent`) are live as long as that input is counted.
Some of these schedules are no plans, so the cheapest is a lower bound for plans, and the linear relaxation a lower one.
`jaxsub.planners.milp_nested` restricts them to plans.

Source: Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez, *Checkmate: breaking the memory wall with
optimal tensor rematerialization* (MLSys 2020), with its partition into frontier-advancing stages. Ours in addition:
options, cotangents that pass over stages, and nested regions as linear constraints. Bytes that the compiler hoists to
the start of the program (`Stage.hoisted_bytes`) count in backward steps only, and output buffers
(`jaxsub.core.output_reuse`) host the most that they could: both can only loosen the bound.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsub.core.chain import Chain, Option
from jaxsub.core.simulate import may_nest

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

Term = tuple[int, float]
Key = tuple[int, ...]
Row = tuple[list[Term], float, float]
"""Variables with their factors, and the least and the most of their sum."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How the backward pass of stages `start .. stop - 1` runs.

    Attributes:
        start: Its first stage.
        stop: The stage after its last.
        option: The option of a region; `None` for no option.
        is_kept: Whether it is an unwrapped stage before others, of which the compiler keeps `Stage.keep_bytes`.
        is_once: Whether it ends a nest, whose forward pass has just been paid for.
        stored_bytes: Bytes that are live from its forward to its backward pass.
        back_bytes: Transient bytes of its backward pass.
        flops: FLOPs that its backward pass recomputes.
        is_nestable: Whether it is allowed inside nests; otherwise the first forward pass saves its values, once.
    """

    start: int
    stop: int
    option: Option | None
    is_kept: bool
    is_once: bool
    stored_bytes: int
    back_bytes: int
    flops: float
    is_nestable: bool = True

    @property
    def is_remade(self) -> bool:
        """Whether a phase can recompute its stored values."""
        return self.is_kept or (self.option is not None and self.stored_bytes > 0 and self.is_nestable)


def modes_of(chain: Chain) -> tuple[Mode, ...]:
    """List the modes of all stages."""
    n = len(chain.stages)
    modes = []
    for s, stage in enumerate(chain.stages):
        around = _around(chain, s, s + 1)
        tail = 0.0 if s == n - 1 else stage.tail_flops
        modes.append(Mode(s, s + 1, None, False, False, 0, stage.transient_bytes + around, tail))
        if s < n - 1:
            modes.append(Mode(s, s + 1, None, True, False, stage.keep_bytes, stage.keep_transient_bytes + around, 0.0))
    for item in chain.items:
        around, is_last = _around(chain, item.start, item.stop), item.stop == n
        inside = sum(s.forward_flops for s in chain.stages[item.start : item.stop - 1])
        for o in item.options:
            stored, back = 0 if is_last else o.saved_bytes, o.transient_bytes + around
            modes.append(
                Mode(item.start, item.stop, o, False, False, stored, back, o.recompute_flops, may_nest(chain, o))
            )
            if not is_last and not o.saved:
                flops = inside + chain.stages[item.stop - 1].tail_flops + o.loop_flops
                modes.append(Mode(item.start, item.stop, o, False, True, 0, back, flops))
    return tuple(modes)


def _around(chain: Chain, start: int, stop: int) -> int:
    return int(chain.passing_bytes[start, stop])


@dataclass(frozen=True, slots=True)
class Solved:
    """The solver's result.

    Attributes:
        values: The variables, or `None` where it found no solution.
        flops: The extra FLOPs of that solution; infinite where there is none.
        bound: A lower bound on the extra FLOPs; infinite where there is provably no solution.
        is_proved: Whether it finished: the solution is optimal, or there is none.
    """

    values: np.ndarray | None
    flops: float
    bound: float
    is_proved: bool


@dataclass(eq=False)
class Schedules:
    """The integer program of one chain and budget.

    Attributes:
        chain: The chain.
        budget_bytes: The most bytes that may be live at any time.
        modes: The modes of all stages.
        room: The most bytes that may be live, as a share of the budget.
        at: The number of each variable, by its kind and indices.
    """

    chain: Chain
    budget_bytes: int
    modes: tuple[Mode, ...] = field(init=False)
    room: float = field(init=False, default=1.0)
    at: dict[tuple[str, Key], int] = field(init=False, default_factory=dict)
    _rows: list[Row] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.modes = modes_of(self.chain)
        self.unit_flops = max(self.chain.forward_flops, 1.0)
        self.crossings = [c for c in self.chain.crossings if c.n_bytes > 0]
        self._stored = tuple((o, w) for o, w in enumerate(self.modes) if w.stored_bytes or w.is_remade)
        self._outputs = [(size, s) for s, stage in enumerate(self.chain.stages) for size in stage.gradient_sizes]
        self._values = list(_hostable(self.chain))
        self._hosted: dict[int, int] = {}
        self._variables()
        self._forward()
        for t in range(len(self.chain.stages)):
            self._phase(t)
        for s in range(len(self.chain.stages)):
            self._add([(self.at["Z", (o,)], 1.0) for o, w in enumerate(self.modes) if w.start <= s < w.stop], 1, 1)

    def var(self, kind: str, *key: int) -> int | None:
        """Find the number of a variable; `None` where there is none."""
        return self.at.get((kind, key))

    def solve(self, *, is_relaxed: bool = False, most: float = np.inf, seconds: float | None = None) -> Solved:
        """Minimise the extra FLOPs, to at most `most`; where relaxed, variables may be fractions."""
        cost = np.array([self._flops(*key) for key in self.at]) / self.unit_flops
        priced = [(int(v), float(cost[v])) for v in np.flatnonzero(cost)]
        rows = [*self._rows, (priced, -np.inf, most / self.unit_flops)]
        whole = np.array([kind in WHOLE and not is_relaxed for kind, _ in self.at], dtype=np.int64)
        options: dict[str, float] = {"mip_rel_gap": GAP}
        if seconds is not None:
            options["time_limit"] = max(seconds, WAIT_SECONDS)
        bounds = self._bounds()
        return self._read(_interruptible(lambda: _solved(cost, whole, bounds, rows, options)))

    def _flops(self, kind: str, key: Key) -> float:
        return {"R": lambda: self.chain.stages[key[1]].forward_flops, "Z": lambda: self.modes[key[0]].flops}.get(
            kind, float
        )()

    def _read(self, result: OptimizeResult) -> Solved:
        if result.status == INFEASIBLE:
            return Solved(None, np.inf, np.inf, True)
        is_optimal = result.status == OPTIMAL
        flops = np.inf if result.x is None else float(result.fun) * self.unit_flops
        bound = result.get("mip_dual_bound")
        if bound is None or not np.isfinite(bound):
            bound = result.fun if is_optimal else 0.0
        return Solved(result.x, flops, max(0.0, float(bound)) * self.unit_flops, is_optimal)

    def _new(self, kind: str, *key: int) -> None:
        self.at[kind, key] = len(self.at)

    def _variables(self) -> None:
        n = len(self.chain.stages)
        for o, _ in enumerate(self.modes):
            self._new("Z", o)
        for t in range(n):
            for i in range(t):
                self._new("R", t, i)
            for c, x in enumerate(self.crossings):
                if x.made < t:
                    self._new("S", t, c)
                    self._new("E", t, c)
                    for i in range(x.made + 1, min(x.last, t - 1) + 1):
                        self._new("M", t, c, i)
            for o, w in enumerate(self.modes):
                if w.is_remade and w.stop - 1 <= t:
                    self._new("K", t, o)
                    if w.stop <= t:
                        self._new("RK", t, o)

    def _add(self, terms: Iterable[tuple[int | None, float]], low: float, high: float) -> None:
        self._rows.append(([(v, a) for v, a in terms if v is not None], low, high))

    def _at_most(self, terms: Iterable[tuple[int | None, float]], high: float = 0.0) -> None:
        self._add(terms, -np.inf, high)

    def _fits(self, terms: Iterable[tuple[int | None, float]], around: float = 0.0) -> None:
        """Add the constraint that live bytes fit the budget."""
        scale = 1.0 / self.budget_bytes
        self._at_most([(v, a * scale) for v, a in terms], self.room - around * scale)

    def _bounds(self) -> np.ndarray:
        """Bound variables by 1, or by 0 where the step alone exceeds the budget."""
        most = np.ones(len(self.at))
        for (kind, key), v in self.at.items():
            if kind == "R":
                t, i = key
                needed = self._read_bytes(i) + self.chain.stages[i].forward_bytes + self.chain.held_bytes(t + 1)
                needed -= self._hosted_bytes(t)
            elif kind == "Z":
                mode = self.modes[key[0]]
                needed = self._read_bytes(mode.start) + mode.back_bytes - self._hosted_bytes(mode.stop - 1)
            else:
                continue
            most[v] = needed <= self.budget_bytes
        return most

    def _hosted_bytes(self, stage: int) -> int:
        """Bound the bytes of earlier stages that output buffers can host: the largest possible value in each buffer.

        See `jaxsub.core.output_reuse`: a value may take the buffer of a gradient that is written after its last use.
        """
        if stage not in self._hosted:
            values = np.array([v[:2] for v in self._values if v[2] < stage], dtype=np.int64).reshape(-1, 2)
            total = 0
            for room, written in self._outputs:
                sizes = values[(values[:, 0] <= room) & (values[:, 1] >= written), 0]
                total += int(sizes.max()) if sizes.size else 0
            self._hosted[stage] = total
        return self._hosted[stage]

    def _read_bytes(self, stage: int) -> int:
        return sum(x.n_bytes for x in self.crossings if x.made < stage <= x.last)

    def _forward(self) -> None:
        """Constrain the first forward pass: values still to be read, values held for later, and kept bytes fit."""
        n, last = len(self.chain.stages), len(self.chain.stages) - 1
        for i in range(last):
            now = self._read_bytes(i) + self.chain.stages[i].forward_bytes
            held: list[tuple[int | None, float]] = [
                (self.var("S", last, c), x.n_bytes) for c, x in enumerate(self.crossings) if x.last < i
            ]
            held += [(self._kept(last, o), w.stored_bytes) for o, w in self._stored if w.stop <= i]
            held += [(self.var("Z", o), -now) for o, w in enumerate(self.modes) if w.stop == n and w.start <= i]
            self._fits(held, now - self._hosted_bytes(i))

    def _kept(self, t: int, o: int) -> int | None:
        """Find the variable that says whether the stored bytes of mode o are live when phase t begins."""
        mode = self.modes[o]
        if mode.is_remade:
            return self.var("K", t, o)
        return self.var("Z", o) if mode.stored_bytes and mode.stop - 1 <= t else None

    def _phase(self, t: int) -> None:
        hosted = self._hosted_bytes(t)
        ending = [o for o, w in enumerate(self.modes) if w.stop - 1 == t]
        for c, x in enumerate(self.crossings):
            if x.made < t:
                self._value(t, c, [o for o in ending if x.made < self.modes[o].start <= x.last])
        for i in range(t):
            self._fits(self._during(t, i), -hosted)
        for o, w in self._stored:
            if w.is_remade and w.stop - 1 <= t:
                self._remade(t, o)
        self._fits(self._backward(t, ending), self._hoisted_bytes(t) - hosted)

    def _value(self, t: int, c: int, readers: Sequence[int]) -> None:
        """Constrain one value in one phase: a value that is read is live, and a live value was held or recomputed."""
        x, last = self.crossings[c], min(self.crossings[c].last, t - 1)
        end, held, made = self.var("E", t, c), self.var("S", t, c), self.var("R", t, x.made)
        self._at_most([(end, 1), (held, -1), (made, -1)])
        self._at_most([(self.var("S", t - 1, c), 1), (end, -1)])
        self._at_most([*((self.var("Z", o), 1.0) for o in readers), (end, -1)])
        for i in range(x.made + 1, last + 1):
            now, run = self.var("M", t, c, i), self.var("R", t, i)
            after = self.var("M", t, c, i + 1) if i < last else end
            self._at_most([(run, 1), (held, -1), (made, -1)])
            self._at_most([(run, 1), (now, -1)])
            self._at_most([(after, 1), (now, -1)])

    def _during(self, t: int, i: int) -> Iterator[tuple[int | None, float]]:
        """Yield the live bytes while stage i runs in phase t."""
        for c, x in enumerate(self.crossings):
            if x.made < t:
                key: tuple[Any, ...] = ("S", t, c) if x.made >= i else ("E", t, c) if x.last < i else ("M", t, c, i)
                yield self.var(*key), x.n_bytes
        for o, w in self._stored:
            yield self._kept(t, o), w.stored_bytes
            if w.stop <= i:
                yield self.var("RK", t, o), w.stored_bytes
        yield self.var("R", t, i), self.chain.stages[i].forward_bytes + self.chain.held_bytes(t + 1)

    def _remade(self, t: int, o: int) -> None:
        mode, now, made = self.modes[o], self.var("K", t, o), self.var("RK", t, o)
        if mode.stop <= t:
            for i in range(mode.start, mode.stop):
                self._at_most([(made, 1), (self.var("R", t, i), -1)])
            self._at_most([(self.var("K", t - 1, o), 1), (now, -1), (made, -1)])
        if mode.stop - 1 == t:
            self._at_most([(self.var("Z", o), 1), (now, -1)])
        for c, x in enumerate(self.crossings):
            if mode.is_kept and x.is_spent and x.last == mode.start:
                self._at_most([(now, 1), (self.var("S", t, c), -1)])

    def _backward(self, t: int, ending: Sequence[int]) -> Iterator[tuple[int | None, float]]:
        """Yield the live bytes while stage t runs backward."""
        for c, x in enumerate(self.crossings):
            yield self.var("E", t, c), x.n_bytes
        for o, w in enumerate(self.modes):
            if w.stop <= t:
                yield self._kept(t - 1, o), w.stored_bytes
                yield self._kept(t - 1, o), -self._hoisted(w, t)
            elif w.start < t and w.stop - 1 == t:
                yield self.var("Z", o), -self._hoisted(w, t)
        for o in ending:
            yield self.var("Z", o), self.modes[o].back_bytes

    def _hoisted(self, mode: Mode, t: int) -> int:
        return sum(stage.hoisted_bytes for stage in self.chain.stages[mode.start : min(mode.stop, t)])

    def _hoisted_bytes(self, t: int) -> int:
        return sum(stage.hoisted_bytes for stage in self.chain.stages[:t])


WHOLE = frozenset("R S Z K RK C".split())
"""Kinds of variables that are 0 or 1; the others follow from them."""

GAP = 1e-6
"""The largest relative gap between the solver's solution and its bound."""

WAIT_SECONDS = 0.05
"""How often Ctrl-C is checked while the solver runs."""

OPTIMAL, INFEASIBLE = 0, 2
"""Values of `status` of scipy.optimize.milp."""


def _hostable(chain: Chain) -> Iterator[tuple[int, int, int]]:
    """Yield the bytes of each value that may be saved, the last stage whose output may host it, and its producer."""
    for c in chain.crossings:
        yield from ((size, c.made, c.made) for size in c.sizes)
    for s, stage in enumerate(chain.stages):
        yield from ((size, s - 1, s) for size in stage.keep_sizes)
    for item in chain.items:
        yield from ((size, item.start - 1, item.start) for option in item.options for size in option.saved_sizes)


def _interruptible(call: Callable[[], OptimizeResult]) -> OptimizeResult:
    """Call in a thread: the solver handles no signals, so Ctrl-C would wait for its time limit."""
    found: list[OptimizeResult] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(WAIT_SECONDS)
    return found[0]


def _solved(cost: np.ndarray, whole: np.ndarray, most: np.ndarray, rows: Sequence[Row], options: Any) -> OptimizeResult:
    """Run HiGHS; scipy takes as long to import as all of jaxsub, and few plans need it."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415
    from scipy.sparse import csr_array  # noqa: PLC0415

    columns = np.fromiter((v for terms, _, _ in rows for v, _ in terms), dtype=np.int64)
    values = np.fromiter((a for terms, _, _ in rows for _, a in terms), dtype=np.float64)
    ends = np.cumsum([0] + [len(terms) for terms, _, _ in rows])
    matrix = csr_array((values, columns, ends), shape=(len(rows), len(cost)))
    matrix.sum_duplicates()
    least, largest = (np.array([row[i] for row in rows]) for i in (1, 2))
    # scipy has no types: checkers that guess them from defaults take arrays of bounds for wrong
    within = LinearConstraint(matrix, least, largest)  # pyright: ignore[reportArgumentType]
    bounds = Bounds(0, most)  # pyright: ignore[reportArgumentType]
    return milp(cost, integrality=whole, bounds=bounds, constraints=within, options=options)
