"""Price every stage and option: a `Chain` from a `Program` and its cuts, without any compiler.

Bytes of saved values, crossing values and shared weights are exact. The transient bytes of forward and backward passes
are estimated from live ranges over the stage's own gradient (`jaxsub.costs.live_ranges`), once for each distinct run
and option.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from jaxsub.core.chain import Chain, Item, Option, Stage, Untimed
from jaxsub.core.disk_cache import Store
from jaxsub.core.graph import Graph
from jaxsub.core.output_reuse import (
    gradient_sizes,
    joined_bytes,
    loop_gradient_sizes,
    operand_bytes,
    saved_sizes,
    summed_sizes,
)
from jaxsub.core.passes import Pass, run_passes
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs import live_ranges as analytic
from jaxsub.costs.cond_options import BranchChoice, branch_choices
from jaxsub.costs.dead_inputs import dead_crossings, dead_inputs
from jaxsub.costs.hoisted_constants import TOGETHER, Shape, hoisting, shared_zeros
from jaxsub.costs.roofline import Clock, StageSeconds, by_seconds, eqns_seconds
from jaxsub.costs.scan_options import LoopChoice, loop_choices
from jaxsub.devices.targets import Target
from jaxsub.emission.offload import require_memory, with_offloading
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.shardings import ONE_DEVICE, Shares, gathered_at_once, scaled, with_gathered
from jaxsub.jaxpr.trace import Program
from jaxsub.partition.cuts import block_ends, find_crossings, kind_of, spans_of
from jaxsub.partition.inner_programs import find_nested
from jaxsub.partition.min_cut import Choice, choices
from jaxsub.partition.traced_run import NoBackwardPass, TracedRun, trace_run

Kind = str
Zeros = frozenset[Shape]
Traced = tuple[TracedRun, tuple[Choice, ...]]


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of runs by their kind, for one target; programs with equal runs share them."""

    traced: dict[Kind, Traced | None] = field(default_factory=dict)
    known: dict[tuple[str, Kind, tuple[int, ...], bool, tuple[int, ...]], int] = field(default_factory=dict)
    sizes: dict[tuple[Kind, int], tuple[int, ...]] = field(default_factory=dict)
    loop_choices: dict[Kind, tuple[LoopChoice | BranchChoice, ...]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Pricer:
    """Prices the runs of one program for one target.

    Attributes:
        program: The program.
        target: The device to compile for.
        store: The price cache for measured seconds, or `None`.
        progress: Called with each label as something is timed.
        profile: Where seconds come from: `False` or `"roofline"` for the target's figures, `True` to time the stages
            on the device. Where it is not `False`, stages and options have seconds, and chains are weighed by them.
        shares: What one device holds, where the program is sharded (`jaxsub.jaxpr.shardings`).
        gathered: Bytes of each input that a device gathers from the others where it is read; empty where none is.
        offload: A second memory that values may be saved in, such as the host's; chains are then weighed by seconds.
        prices: Costs that are known already, from other programs with equal runs perhaps.
        splits_loops: Whether loops may run in blocks, keep some of their steps, or be unrolled.
        sized: The program, the bytes of its values counted by what one device holds of them.
    """

    program: Program
    target: Target
    store: Store | None = None
    progress: Callable[[str], None] = lambda label: None
    profile: bool | str = False
    shares: Shares = ONE_DEVICE
    gathered: tuple[int, ...] = ()
    offload: str | None = None
    prices: Prices = field(default_factory=Prices)
    splits_loops: bool = True
    sized: Program = field(init=False)
    _kinds: dict[tuple[int, int], Kind] = field(init=False, default_factory=dict)
    _chains: dict[tuple[tuple[int, ...], tuple[int, ...]], Chain] = field(init=False, default_factory=dict)
    _loops: frozenset[int] = field(init=False)
    _clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        if self.offload:
            require_memory(self.target, self.offload)
        self.program = replace(self.program, platform=self.target.platform)
        self.sized = self.program.sized(self.shares)
        self._loops = frozenset(find_nested(self.sized))
        self._clock = Clock(self.sized, self.target, self.profile is True, self.store, self.progress)

    def chain(self, cuts: Sequence[int], *, sizes: Sequence[int] = TUNING.region_sizes) -> Chain:
        """Price stages and regions.

        Args:
            cuts: The first node of each stage, and the number of nodes last.
            sizes: How many stages the regions of several stages have.
        """
        key = tuple(cuts), tuple(sizes)
        if key not in self._chains:
            self._chains[key] = self._chain(key[0], key[1])
        return self._chains[key]

    def _chain(self, cuts: tuple[int, ...], sizes: tuple[int, ...]) -> Chain:
        runs = list(pairwise(cuts))
        free = [run for run in runs if not self._is_pinned(*run, cuts)]
        zeros = shared_zeros(self._run(*run, cuts)[0] for run in free)
        ends = block_ends(self.sized.graph, cuts)[:-1]
        blocks = [b for b in pairwise(ends) if not self._is_pinned(cuts[b[0]], cuts[b[1]], cuts)]
        traced = {run: self._run(*run, cuts) for run in free}
        dead = dead_inputs(self.sized.graph, runs, traced, gpu=self.target.gpu)
        stages = tuple(self._stage(start, stop, dead.get((start, stop), ()), cuts, zeros) for start, stop in runs)
        spans = spans_of(cuts, ends, sizes, is_last=self.sized.loss is None)
        wanted = dict.fromkeys((*self._worth(spans, cuts), *blocks))
        items = [Item(a, b, self._options(cuts, a, b, stages[a:b], zeros)) for a, b in wanted]
        items += [
            Item(s, s + 1, tuple(self._loop_options(stage))) for s, stage in enumerate(stages) if self._is_loop(stage)
        ]
        dead = {run: found for run, found in dead.items() if self._dead_bytes(*run, found, run == runs[-1])}
        marked = dead_crossings(self.sized.graph, cuts, dead)
        crossings = find_crossings(self.sized.graph, cuts)
        crossings = tuple(replace(c, is_spent=(c.made, c.last) in marked) for c in crossings)
        chain = Chain(stages, tuple(items), crossings, self.sized.fingerprint, "analytic",
                      self._clock.origin if self._minimises_seconds else "",
                      saves_in_nests=compat.saves_in_nests())  # fmt: skip
        return run_passes(chain, self._passes())

    def _passes(self) -> Iterator[Pass]:
        """What turns costs counted for the whole program into those of one device, in the unit that is minimised."""
        if self.share != 1.0:
            yield Pass("one device's share of each byte", partial(scaled, share=self.share))
        if self.gathered:
            program, gathered = self.sized, self.gathered
            at_once = gathered_at_once(program.eqns, program.invars, program.shardings, gathered)
            yield Pass("weights gathered where they are read",
                       partial(with_gathered, graph=program.graph, gathered=gathered, at_once=at_once))  # fmt: skip
        if self._minimises_seconds:
            yield Pass("FLOPs weighed by seconds", by_seconds)

    @property
    def share(self) -> float:
        """The share of most bytes that one device holds."""
        return self.shares.most

    @property
    def _minimises_seconds(self) -> bool:
        return bool(self.profile or self.offload)

    def timed(self, plan: Plan) -> Plan:
        """Add the seconds of a plan, where its chain has none."""
        found = plan.prediction
        if found is None or found.seconds_origin:
            return plan
        again = sum(self._seconds_again(run) for run in found.untimed if not self._is_pinned(run.start, run.stop))
        whole = sum(self._seconds(a, b).forward + self._seconds(a, b).backward for a, b in pairwise(self._cuts()))
        return plan.replace(prediction=replace(found, extra_seconds=again, step_seconds=whole, untimed=(),
                                               seconds_origin=self._clock.origin))  # fmt: skip

    def _seconds_again(self, run: Untimed) -> float:
        if run.saved is None:
            return run.times * self._seconds(run.start, run.stop).forward
        return run.times * self._recompute_seconds(run.start, run.stop, run.saved)

    def _cuts(self) -> tuple[int, ...]:
        """The partition that was priced first."""
        return next(iter(self._chains))[0]

    def _worth(self, spans: Sequence[tuple[int, int]], cuts: Sequence[int]) -> list[tuple[int, int]]:
        """List the regions worth tracing: single stages, and longer ones if few or of kinds that occur repeatedly."""
        count = Counter(self._kind(cuts[a], cuts[b]) for a, b in spans)
        is_short = len(cuts) - 1 <= TUNING.few_stages
        worth = [(a, b) for a, b in spans if b == a + 1 or is_short or count[self._kind(cuts[a], cuts[b])] > 1]
        return [(a, b) for a, b in worth if not self._is_pinned(cuts[a], cuts[b], tuple(cuts))]

    def _is_pinned(self, start: int, stop: int, cuts: tuple[int, ...] = ()) -> bool:
        """Tell whether a run is never wrapped: an equation must run once, or its backward pass cannot be traced."""
        must_run_once = not all(node.can_recompute for node in self.sized.graph.nodes[start:stop])
        return must_run_once or self._found_run(start, stop, cuts) is None

    def _kind(self, start: int, stop: int) -> Kind:
        if (start, stop) not in self._kinds:
            kind = kind_of(self.sized.graph, self.sized.signatures, start, stop)
            self._kinds[start, stop] = f"repeated {kind}" if self.program.is_repeated else kind
        return self._kinds[start, stop]

    def _run(self, start: int, stop: int, cuts: tuple[int, ...] = ()) -> Traced:
        found = self._found_run(start, stop, cuts)
        assert found is not None, "a run is looked at only where its backward pass can be traced"
        return found

    def _found_run(self, start: int, stop: int, cuts: tuple[int, ...]) -> Traced | None:
        kind = self._kind(start, stop)
        if kind not in self.prices.traced:
            try:
                marked = _worth_marking(self.sized.graph, cuts, start, stop, self._choices)
                traced = trace_run(self.sized, start, stop, marked)
                self.prices.traced[kind] = traced, choices(traced)
            except NoBackwardPass:
                self.prices.traced[kind] = None
        return self.prices.traced[kind]

    def _choices(self, start: int, stop: int) -> tuple[Choice, ...]:
        found = self._found_run(start, stop, ())
        return found[1] if found is not None else ()

    @property
    def _is_cpu(self) -> bool:
        return self.target.platform == "cpu"

    def _hoisting(self, start: int, stop: int, zeros: Zeros) -> str:
        if stop == len(self.sized.eqns):
            return ""  # its backward pass starts at once, and both passes are priced together
        return hoisting(self._run(start, stop)[0], zeros, is_cpu=self._is_cpu)

    def _stage(self, start: int, stop: int, dead: tuple[int, ...], cuts: tuple[int, ...], zeros: Zeros) -> Stage:
        graph = self.sized.graph
        nodes = graph.nodes[start:stop]
        is_last = stop == len(graph.nodes)
        passes = self._seconds(start, stop) if self._minimises_seconds else StageSeconds(0.0, 0.0)
        if self._is_pinned(start, stop):
            return analytic.pinned_stage(graph, start, stop, hash(self._kind(start, stop)), passes.forward)
        tail = self._run(start, stop)[1][0].recompute_flops
        transient = self._bytes("last" if is_last else "backward", start, stop, ())
        keep = self._bytes("last" if is_last else "keep", start, stop, ())
        dead_bytes = self._dead_bytes(start, stop, dead, is_last)
        what = self._hoisting(start, stop, zeros)
        hoisted = self._bytes(what, start, stop, ()) if what else 0
        stacked = 0
        if self._is_cpu and self.sized.eqns[start].primitive.name == "scan":
            hoisted = max(hoisted, keep)  # what a loop keeps it stacks in zeros
        elif self._is_cpu and what:
            stacked = self._bytes("stacked", start, stop, ())  # by loops of runs in slices
        ahead = hoisted if what == TOGETHER else 0
        sums = summed_sizes(graph, cuts, start, stop)
        sizes = self._kept_sizes(start, stop, 0 if is_last else keep - dead_bytes)
        made = graph.made_by(start, stop)
        tail_seconds = passes.scale * self._recompute_seconds(start, stop, ()) if self._minimises_seconds else 0.0
        return Stage(
            start, stop, hash(self._kind(start, stop)), sum(n.flops for n in nodes), tail,
            self._bytes("forward", start, stop, ()), transient - dead_bytes * is_last,
            ahead + stacked + max(0, keep - dead_bytes),
            (transient if is_last else max(keep, self._bytes("unwrapped", start, stop, ()))) - dead_bytes,
            sum(graph.values[v].n_bytes for v in made), made.start,
            hoisted,
            passes.forward, passes.backward, tail_seconds,
            sizes,
            () if self.program.is_repeated else gradient_sizes(graph, start, stop),
            joined_bytes(graph, start, stop),
            sum(parts for _, parts in sums),
            tuple(size for size, _ in sums),
            0 if self._is_cpu else operand_bytes(graph, start, stop),
            ahead,
        )  # fmt: skip

    def _kept_sizes(self, start: int, stop: int, most_bytes: int) -> tuple[int, ...]:
        key = self._kind(start, stop), most_bytes
        if key not in self.prices.sizes:
            self.prices.sizes[key] = analytic.kept_sizes(self._run(start, stop)[0], most_bytes, gpu=self.target.gpu)
        return self.prices.sizes[key]

    def _dead_bytes(self, start: int, stop: int, dead: tuple[int, ...], is_last: bool) -> int:
        """Sum the bytes of an unwrapped stage's dead inputs, up to the bytes that it keeps instead."""
        what = "last" if is_last else "keep"
        if not dead:
            return 0
        traced = self._run(start, stop)[0]
        size, keep = sum(traced.bytes_of(traced.inputs[i]) for i in dead), self._bytes(what, start, stop, ())
        held = self._bytes("last" if is_last else "held", start, stop, dead)
        return min(size, max(0, size + keep - held), keep)

    def _seconds(self, start: int, stop: int) -> StageSeconds:
        """Estimate or time the passes of a stage."""
        if self._is_pinned(start, stop):
            eqns = self.sized.eqns[start:stop]
            return StageSeconds(eqns_seconds(eqns, (), eqns[-1].outvars, self.target), 0.0)
        traced, found = self._run(start, stop)
        return self._clock.stage(self._kind(start, stop), (start, stop), traced, found[-1].saved)

    def _recompute_seconds(self, start: int, stop: int, saved: tuple[int, ...]) -> float:
        """Estimate how much longer a backward pass takes than that of the choice of least recompute, by roofline."""
        traced, found = self._run(start, stop)
        return self._clock.recompute(self._kind(start, stop), traced, saved, found[-1].saved)

    def _options(
        self, cuts: tuple[int, ...], first: int, end: int, stages: Sequence[Stage], zeros: Zeros
    ) -> tuple[Option, ...]:
        graph, start, stop = self.sized.graph, cuts[first], cuts[end]
        found = self._run(start, stop, cuts)[1]
        hoisted = sum(s.hoisted_bytes for s in stages)
        pace, options = self._pace(stages) if self._minimises_seconds else 0.0, []
        for c in found:
            transient = self._bytes("backward", start, stop, c.saved)
            seconds = pace * self._recompute_seconds(start, stop, c.saved) if pace else 0.0
            sizes = saved_sizes(graph, start, stop, c.saved)
            options.append(Option(c.saved, c.saved_bytes + hoisted, transient, c.recompute_flops, seconds,
                                  saved_sizes=sizes))  # fmt: skip
        return with_offloading(graph, start, stop, options, self.target) if self.offload else tuple(options)

    def _pace(self, stages: Sequence[Stage]) -> float:
        """What was measured of stages over what roofline says of them."""
        scales = [self._seconds(s.start, s.stop).scale for s in stages if not self._is_pinned(s.start, s.stop)]
        return sum(scales) / max(len(scales), 1)

    def _is_loop(self, stage: Stage) -> bool:
        return stage.stop == stage.start + 1 and stage.start in self._loops

    def _loop_options(self, stage: Stage) -> Iterator[Option]:
        """Yield the options of a stage that is a loop or conditional, unwrapped and in a region that saves nothing."""
        kind, least_bytes = self._kind(stage.start, stage.stop), float("inf")
        if kind not in self.prices.loop_choices:
            try:
                self.prices.loop_choices[kind] = self._choices_of(stage.start)
            except NoBackwardPass:  # of its body as a whole
                self.prices.loop_choices[kind] = ()
        for c in self.prices.loop_choices[kind]:
            if isinstance(c, LoopChoice) and c.loop.is_split and not self.splits_loops:
                continue
            loop, flops = replace(c.loop, node=0), c.recompute_flops
            seconds = flops * stage.forward_seconds / max(stage.forward_flops, 1.0)
            # the zeros that a loop stacks values in are made when a CPU's program starts: no region spares them
            is_hoisted = self._is_cpu and isinstance(c, LoopChoice) and not c.loop.is_unrolled
            if isinstance(c, LoopChoice) or not c.is_region:
                kept = min(c.kept_bytes, c.transient_bytes)
                yield Option((), kept, c.transient_bytes, flops, seconds, (loop,), flops, False, seconds,
                             is_hoisted=is_hoisted)  # fmt: skip
            if c.transient_bytes < least_bytes and stage.stop < len(self.sized.eqns) and not is_hoisted:
                least_bytes = c.transient_bytes
                yield Option((), 0, c.transient_bytes, stage.tail_flops + flops, stage.tail_seconds + seconds, (loop,),
                             flops, loop_seconds=seconds)  # fmt: skip

    def _choices_of(self, node: int) -> tuple[LoopChoice | BranchChoice, ...]:
        if self.sized.eqns[node].primitive.name == "cond":
            return branch_choices(self.sized, node, self._body_chain, gpu=self.target.gpu)
        return loop_choices(self.sized, node, self._body_chain, gpu=self.target.gpu)

    def _body_chain(self, body: Program, cuts: tuple[int, ...]) -> Chain:
        """Price a loop's body or a branch."""
        return Pricer(body, self.target, self.store, self.progress, prices=self.prices).chain(cuts)

    def _bytes(self, what: str, start: int, stop: int, saved: tuple[int, ...]) -> int:
        """Predict the bytes of a pass of a run, once for all runs of a kind (`analytic.counted`)."""
        at_once = what == "last" and self.sized.loss is not None
        spare = loop_gradient_sizes(self.sized.graph, start) if stop == len(self.sized.eqns) else ()
        key = what, self._kind(start, stop), saved, at_once, spare
        if key not in self.prices.known:
            traced, gpu = self._run(start, stop)[0], self.target.gpu
            self.prices.known[key] = analytic.counted(what, traced, saved, at_once=at_once, gpu=gpu, spare=spare)
        return self.prices.known[key]


def _worth_marking(
    graph: Graph, cuts: Sequence[int], start: int, stop: int, found: Callable[[int, int], Sequence[Choice]]
) -> tuple[int, ...]:
    """List the offsets of values that one of several stages saves or returns; none for a single stage.

    Several stages together rarely save a value that no stage saves alone. Beside many others that are as good, up to
    elementwise work, the corners between would be no corners any more.

    Args:
        graph: The program.
        cuts: The first node of each stage, and the number of nodes last.
        start: The first stage's first node.
        stop: The node after the last stage's last.
        found: The choices of a stage, by its first node and the node after its last.
    """
    ends = [cut for cut in cuts if start <= cut <= stop]
    if len(ends) < 3 or (ends[0], ends[-1]) != (start, stop):
        return ()
    first, last, marked = graph.first_value(start), graph.last_uses(), set[int]()
    for a, b in pairwise(ends):
        marked.update(graph.first_value(a) - first + offset for choice in found(a, b) for offset in choice.saved)
        marked.update(v - first for v in graph.made_by(a, b) if last[v] >= b)
    return tuple(sorted(marked))
