"""An abstract machine that executes runs on a chain, step by step, and refuses a step that lacks what it needs.

It knows nothing of `jaxsub.core.simulate.predict`: it holds named buffers, adds and drops them as the program would,
and counts. A forward step reads the values that cross into its stage; a backward step reads them too, and what the
stage kept or recomputes; backward steps come once each, from the last stage to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxsub.core.chain import Chain, Crossing, Item, Option, Run, Stage
from jaxsub.core.simulate import may_nest


class MachineError(AssertionError):
    """A step that lacks what it needs."""


@dataclass
class Machine:
    """The state of an execution.

    Attributes:
        chain: What is executed.
        live: Buffers by name: `("value", crossing)`, `("kept", stage)`, `("saved", start)`.
        cotangents: Crossings whose cotangent exists.
        backward: Stages whose backward pass has run.
        again: How often nests recomputed each stage.
        peak_bytes: The most that was live.
        extra_flops: FLOPs that were recomputed.
    """

    chain: Chain
    live: dict[tuple[str, object], int] = field(default_factory=dict)
    cotangents: set[Crossing] = field(default_factory=set)
    backward: list[int] = field(default_factory=list)
    again: dict[int, int] = field(default_factory=dict)
    peak_bytes: int = 0
    extra_flops: float = 0.0

    def execute(self, runs: Sequence[Run]) -> Machine:
        """Execute runs that cover the chain, first forward, then backward."""
        n = len(self.chain.stages)
        if len({id(c) for c in self.chain.crossings}) != len(set(self.chain.crossings)):
            raise MachineError("crossings must differ to be told apart")
        self._scope(runs, n, is_top=True)
        if self.backward != list(reversed(range(n))):
            raise MachineError(f"backward steps ran in the order {self.backward}")
        return self

    def _scope(self, runs: Sequence[Run], stop: int, is_top: bool) -> None:
        before = []
        for run in runs:
            before.append(dict(self.live))
            if run is not runs[-1] or run.children:
                self._forward(run, stop, is_top)
        if is_top:
            self.cotangents = {c for c in self.chain.crossings if c.last == stop}
        for run, live in reversed(list(zip(runs, before, strict=True))):
            kept, self.live = self.live, live
            if run.children:
                self._scope(run.children, run.stop, is_top=False)
            elif run.option is not None:
                self._region(run, stop, kept, run is runs[-1], is_top)
            else:
                self._unwrapped(run, stop, kept, run is runs[-1], is_top)

    def _forward(self, run: Run, stop: int, is_top: bool) -> None:
        made: dict[tuple[str, object], int] = {}
        for s in range(run.start, run.stop):
            self._reads(s, {**self.live, **made})
            crossing = sum(made[name] for name in made if name[1].last >= s)
            self._peak(crossing + self.chain.stages[s].forward_bytes, self.cotangents)
            made |= {("value", c): c.n_bytes for c in self.chain.crossings if c.made == s}
            if not is_top:
                self._again(s, stop)
        is_unwrapped = run.option is None and not run.children
        self.live |= {name: size for name, size in made.items() if is_unwrapped or name[1].last >= run.stop}
        if is_unwrapped:
            self.live |= {("kept", s): self.chain.stages[s].keep_bytes for s in range(run.start, run.stop)}
        if run.option is not None:
            self.live["saved", run.start] = run.option.saved_bytes

    def _region(self, run: Run, stop: int, kept: dict[tuple[str, object], int], is_last: bool, is_top: bool) -> None:
        made = {("value", c): c.n_bytes for c in self.chain.crossings if run.start <= c.made < run.stop}
        for s in range(run.start, run.stop):
            self._reads(s, {**self.live, **made})
            if is_last and not is_top:
                self._again(s, stop)
        if not is_last and ("saved", run.start) not in kept:
            raise MachineError(f"region {run.start}:{run.stop} runs backward before it ran forward")
        self._peak(run.option.transient_bytes, {c for c in self.cotangents if c.made < run.start})
        self.extra_flops += run.option.recompute_flops if is_top or not is_last else run.option.loop_flops
        for s in reversed(range(run.start, run.stop)):
            self._backward(s)

    def _unwrapped(self, run: Run, stop: int, kept: dict[tuple[str, object], int], is_last: bool, is_top: bool) -> None:
        for s in reversed(range(run.start, run.stop)):
            stage = self.chain.stages[s]
            is_at_once = is_last and s == run.stop - 1
            if run.stop - run.start > 1:
                raise MachineError("unwrapped runs of several stages are told stage by stage")
            self._reads(s, self.live)
            if not is_at_once and ("kept", s) not in kept:
                raise MachineError(f"stage {s} runs backward and nothing of it was kept")
            if is_at_once and not is_top:
                self._again(s, stop)
            transient = stage.transient_bytes if is_at_once else stage.keep_transient_bytes
            self._peak(transient, {c for c in self.cotangents if c.made < s})
            self._backward(s)

    def _reads(self, s: int, live: dict[tuple[str, object], int]) -> None:
        lost = [c for c in self.chain.crossings if c.made < s <= c.last and ("value", c) not in live]
        if lost:
            raise MachineError(f"stage {s} needs {lost}, which nothing holds")

    def _again(self, s: int, stop: int) -> None:
        stage = self.chain.stages[s]
        self.again[s] = self.again.get(s, 0) + 1
        self.extra_flops += stage.tail_flops if s == stop - 1 else stage.forward_flops

    def _backward(self, s: int) -> None:
        self.backward.append(s)
        self.cotangents = {c for c in self.cotangents if c.made != s}
        self.cotangents |= {c for c in self.chain.crossings if c.last == s}

    def _peak(self, transient_bytes: int, cotangents: set[Crossing]) -> None:
        around = sum(self.live.values()) + sum(c.cotangent_bytes for c in cotangents)
        self.peak_bytes = max(self.peak_bytes, around + transient_bytes)


def all_runs(chain: Chain) -> Iterator[tuple[Run, ...]]:
    """Every plan that `optimal` chooses from: unwrapped stages, items with each option, nests of any depth.

    What ends a nest saves nothing by name.
    """
    yield from _tops(chain, 0)


def _tops(chain: Chain, s: int) -> Iterator[tuple[Run, ...]]:
    n = len(chain.stages)
    if s == n:
        yield ()
        return
    firsts = [Run(s, s + 1)] + [Run(s, i.stop, o) for i in chain.items if i.start == s for o in i.options]
    firsts += [Run(s, q, None, inside) for q in range(s + 1, n) for inside in _insides(chain, s, q)]
    for first in firsts:
        for rest in _tops(chain, first.stop):
            yield (first, *rest)


def _insides(chain: Chain, s: int, stop: int) -> Iterator[tuple[Run, ...]]:
    found = [(i.stop, o) for i in chain.items if i.start == s and i.stop <= stop for o in i.options]
    whole = [Run(s, end, o) for end, o in found if not o.saved or (end < stop and may_nest(chain, o))]
    firsts = [Run(s, s + 1), *whole]
    firsts += [Run(s, q, None, inside) for q in range(s + 1, stop) for inside in _insides(chain, s, q)]
    for first in firsts:
        if first.stop == stop:
            yield (first,)
        else:
            for rest in _insides(chain, first.stop, stop):
                yield (first, *rest)


def uniform(n: int, *, crossing_bytes: int = 1, keep_bytes: int = 1000, transient_bytes: int = 0) -> Chain:
    """Equal stages that cost one FLOP each, the unit of Griewank and Walther."""
    stage = Stage(0, 1, keep_bytes=keep_bytes, keep_transient_bytes=transient_bytes, transient_bytes=transient_bytes,
                  made_bytes=crossing_bytes)  # fmt: skip
    stages = tuple(_moved(stage, s) for s in range(n))
    return Chain(stages, (), tuple(Crossing(s, s + 1, crossing_bytes, 0) for s in range(n - 1)))


def _moved(stage: Stage, s: int) -> Stage:
    return Stage(**{name: getattr(stage, name) for name in Stage.__slots__} | {"start": s, "stop": s + 1})


def extra_steps(n: int, slots: int) -> int:
    """Forward steps that binomial checkpointing recomputes: Griewank and Walther (2000), Proposition 1.

    Their count t(n, s) = r n - beta(s + 1, r - 1), beta(s, r) = (s + r over s), is of forward steps that are not
    part of a backward step, the first sweep included, with the chain's input in one of the s slots. Ours holds the
    chain's input beside the slots and the state of the last step in one of them, and counts what is executed beyond
    one forward step for each stage. The two count the same.
    """
    r, reach = 0, 1
    while reach < n:
        r += 1
        reach = reach * (slots + r) // r
    return r * n - reach * r // (slots + 1)


def random_chain(draw_int: Callable[[int, int], int], n: int, *, n_items: int = 2, is_long: bool = True) -> Chain:
    """A chain of small random whole numbers; `draw_int(low, high)` draws them, ends included."""
    most_forward, most_cotangent = 4 + 12 * draw_int(0, 1), 4 + 8 * draw_int(0, 1)
    stages = tuple(
        Stage(s, s + 1, forward_flops=float(draw_int(1, 9)), tail_flops=float(draw_int(0, 9)),
              forward_bytes=draw_int(0, most_forward), transient_bytes=draw_int(1, 9), keep_bytes=draw_int(0, 12),
              keep_transient_bytes=draw_int(1, 9), made_bytes=draw_int(1, 9), first_value=s)
        for s in range(n)
    )  # fmt: skip
    crossings = {(s, s + 1): Crossing(s, s + 1, draw_int(1, 6), draw_int(0, most_cotangent)) for s in range(n - 1)}
    for _ in range(draw_int(0, n) if is_long else 0):
        made = draw_int(0, n - 1)
        last = draw_int(made + 1, n)
        crossings[made, last] = Crossing(made, last, draw_int(0, 5) if last < n else 0, draw_int(0, 3))
    items = []
    for _ in range(draw_int(0, n_items)):
        start = draw_int(0, n - 1)
        stop = min(n, start + draw_int(1, 3))
        loop_flops = float(draw_int(0, 1) * draw_int(0, 5))
        options = [Option((), 0, draw_int(1, 12), loop_flops + draw_int(0, 15), loop_flops=loop_flops)]
        if draw_int(0, 1):  # a loop that saves its own steps
            options.append(
                Option((), draw_int(1, 8), draw_int(1, 12), loop_flops, loop_flops=loop_flops, is_region=False)
            )
        for k in range(draw_int(0, 2)):  # its saved values are live in its backward pass
            saved_bytes = draw_int(1, 8)
            options.append(Option((k,), saved_bytes, saved_bytes + draw_int(0, 6), float(draw_int(0, 9))))
        items.append(Item(start, stop, tuple(options)))
    return Chain(stages, tuple(items), tuple(crossings.values()))
