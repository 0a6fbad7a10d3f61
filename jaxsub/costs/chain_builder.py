"""What every stage and every option of it costs: a `Chain`, from a `Program` and its cuts.

Bytes of saved values, of what crosses the cuts and of shared weights are exact and need no compiler. What a backward or
forward pass allocates for itself comes from a `Coster`: the `analytic` one counts lives (`jaxsub.costs.live_ranges`),
the `compiled` one asks the compiler (`jaxsub.costs.probes`), once for each distinct run and option, and remembers it.

Runs of several stages with a min-cut, and large blocks, are priced analytically until `Pricer.refine` compiles a probe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from jaxsub.core.chain import Chain, Item, Option, Stage
from jaxsub.core.decisions import Conditional, Loop, Way, walk
from jaxsub.core.disk_cache import Store
from jaxsub.core.output_reuse import gradient_sizes, joined_bytes, saved_sizes, summed_sizes
from jaxsub.core.plan import Plan
from jaxsub.costs import live_ranges as analytic
from jaxsub.costs import probes
from jaxsub.costs.cond_options import branch_choices
from jaxsub.costs.dead_inputs import spent_crossings, spent_inputs
from jaxsub.costs.hoisted_constants import TOGETHER, hoisting, shared_zeros
from jaxsub.costs.loop_costs import Known, WayChoice, to_ask, way_bytes
from jaxsub.costs.probe_compiles import Asker
from jaxsub.costs.roofline import Clock, StageSeconds, by_seconds, eqns_seconds
from jaxsub.costs.scan_options import LoopChoice, loop_choices
from jaxsub.costs.shared_weights import operand_bytes, turning_bytes
from jaxsub.devices.targets import Target
from jaxsub.emission.offload import require_memory, with_offloading
from jaxsub.emission.scans import with_loops
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.shardings import scaled, with_gathered
from jaxsub.jaxpr.trace import Program
from jaxsub.partition import cuts as cutting
from jaxsub.partition.inner_programs import find_nested
from jaxsub.partition.min_cut import Choice, TracedRun, choices, finer, trace_run, worth_marking

REGION_SIZES = (2, 4, 8)
"""Stages in the multi-stage regions that are offered to planners."""

Kind = str
Saved = tuple[int, ...] | Way
"""What of a run is priced: with what it saves, or how the loop runs that it is."""
Job = tuple[str, int, int, Saved]


@dataclass(slots=True, eq=False)
class Pricer:
    """Prices the runs of one program for one target.

    Attributes:
        program: The program.
        target: What to compile for.
        is_compiled: Whether to ask the compiler; otherwise lives are counted.
        store: Where prices are remembered between processes, or `None`.
        progress: Called with each label as something is priced.
        workers: Compiles that run at once.
        profile: Where seconds come from: `False` for the target's figures, `True` to time the stages on the device,
            `"roofline"` for the figures again. Where it is not `False`, chains are weighed by seconds.
        share: What one device holds of a byte, where the program is spread over several (`jaxsub.jaxpr.shardings`).
        gathered: Bytes of each input that a device gathers from the others where it is read; empty where none is.
        offload: The memory that values may be kept in beside the device's; chains are then weighed by seconds.
    """

    program: Program
    target: Target
    is_compiled: bool = True
    store: Store | None = None
    progress: Callable[[str], None] = lambda label: None
    workers: int = 2
    profile: bool | str = False
    share: float = 1.0
    gathered: tuple[int, ...] = ()
    offload: str | None = None
    _asker: Asker = field(init=False)
    _traced: dict[Kind, tuple[TracedRun, tuple[Choice, ...]]] = field(init=False, default_factory=dict)
    _kinds: dict[tuple[int, int], Kind] = field(init=False, default_factory=dict)
    _counted: dict[tuple[Kind, tuple[int, ...]], int] = field(init=False, default_factory=dict)
    _sizes: dict[tuple[Kind, int], tuple[int, ...]] = field(init=False, default_factory=dict)
    _ways: dict[Kind, tuple[WayChoice, ...]] = field(init=False, default_factory=dict)
    _returned: dict[Any, int] = field(init=False, default_factory=dict)
    _cuts: tuple[int, ...] = field(init=False, default=())
    _zeros: frozenset[Any] = field(init=False, default=frozenset())
    _loops: frozenset[int] = field(init=False)
    _clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        if self.offload:
            require_memory(self.target, self.offload)
        self.program = replace(self.program, platform=self.target.platform)
        self._asker = Asker(self.target, self.store, self.progress, self.workers)
        self._loops = frozenset(find_nested(self.program))
        self._clock = Clock(self.program, self.target, self.profile is True, self.store, self.progress)

    def chain(self, cuts: Sequence[int], *, sizes: Sequence[int] = REGION_SIZES) -> Chain:
        """Price stages and regions.

        Args:
            cuts: The first node of each stage, and the number of nodes last.
            sizes: How many stages the regions of several stages have.

        Returns:
            The chain, for planners.
        """
        leaves_products = self._asker.leaves_products
        runs, self._cuts = list(pairwise(cuts)), tuple(cuts)
        ends = cutting.block_ends(self.program.graph, cuts)[:-1]
        blocks = [b for b in pairwise(ends) if not self._is_pinned(cuts[b[0]], cuts[b[1]])]
        self._price_stages(
            runs, [(cuts[a], cuts[b]) for a, b in blocks if cuts[b] - cuts[a] <= cutting.REGION_EQUATIONS]
        )
        spent = self._spent(runs)
        stages = tuple(self._stage(start, stop, spent.get((start, stop), ())) for start, stop in runs)
        spans = cutting.spans_of(cuts, ends, sizes)
        wanted = dict.fromkeys((*self._worth(spans, cuts), *blocks))
        items = [Item(a, b, self._options(cuts[a], cuts[b], stages[a:b], is_fine=len(runs) <= cutting.FEW_STAGES))
                 for a, b in wanted]  # fmt: skip
        items += [
            Item(s, s + 1, tuple(self._loop_options(stage))) for s, stage in enumerate(stages) if self._is_loop(stage)
        ]
        if self._asker.leaves_products != leaves_products:  # some figures are of before
            return self.chain(cuts, sizes=sizes)
        origin = "compiled" if self.is_compiled else "analytic"
        gone = {run: found for run, found in spent.items() if self._gone_bytes(*run, found, run == runs[-1])}
        marked = spent_crossings(self.program.graph, cuts, gone)
        crossings = cutting.find_crossings(self.program.graph, cuts)
        crossings = tuple(replace(c, is_spent=(c.made, c.last) in marked) for c in crossings)
        chain = Chain(stages, tuple(items), crossings, self.program.fingerprint, origin, self._clock.origin,
                      has_timed_options=self._minimises_seconds,
                      saves_in_nests=compat.saves_in_nests())  # fmt: skip
        chain = with_gathered(scaled(chain, self.share), self.program.graph, self.gathered)
        return by_seconds(chain) if self._minimises_seconds else chain

    @property
    def _minimises_seconds(self) -> bool:
        return bool(self.profile or self.offload)

    def timed(self, plan: Plan) -> Plan:
        """The plan with the seconds of its regions, where its chain left out how long options take."""
        if plan.prediction is None or not plan.prediction.untimed:
            return plan
        found = plan.prediction
        spent = sum(self._again_seconds(*region) for region in found.untimed if not self._is_pinned(*region[:2]))
        found = replace(found, extra_seconds=(found.extra_seconds or 0.0) + spent, untimed=())
        return plan.replace(prediction=found)

    def refine(self, plan: Plan) -> bool:
        """Ask the compiler for the regions of several stages that a plan uses; say whether anything new was learnt."""
        if not self.is_compiled:
            return False
        fences = set(plan.barriers)
        leaves = [s for s in walk(plan.segments) if not s.children and not fences & set(range(s.start + 1, s.stop))]
        leaves = [s for s in leaves if not self._is_pinned(s.start, s.stop)]
        firsts = [(s, self.program.graph.first_value(s.start)) for s in leaves]
        jobs: list[Job] = [("backward", s.start, s.stop, tuple(v - f for v in s.saved if v >= f)) for s, f in firsts]
        inside = {node for s in walk(plan.segments) for node in range(s.start, s.stop)}
        jobs += [job for loop in plan.loops for job in self._loop_jobs(loop, loop.node in inside)]
        return self._price(jobs) > 0

    def _loop_jobs(self, loop: Way, is_region: bool) -> Iterator[Job]:
        """What to ask of the compiler for the way a loop or conditional runs."""
        run = (loop.node, loop.node + 1)
        ways = self._ways.get(self._kind(*run), ())
        for what, way in to_ask(ways, replace(loop, node=0), self._said_of(*run), is_region=is_region):
            yield what, *run, way

    def _said_of(self, start: int, stop: int) -> Known:
        """What the compiler said of ways to run a loop or conditional; what it keeps leaves out what it returns."""

        def said(what: str, way: Way) -> int | None:
            key = self._key(what, start, stop, way)
            found = self._asker.said.get(key)
            if found is None or what != "keep":
                return found
            if key not in self._returned:
                run = trace_run(with_loops(self.program, [replace(way, node=start)]), start, stop)
                self._returned[key] = analytic.kept_returned_bytes(run)
            return max(0, found - self._returned[key])

        return said

    def _worth(self, spans: Sequence[tuple[int, int]], cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Single stages, and longer regions of kinds that occur more than once, or of few stages: worth a trace."""
        count = Counter(self._kind(cuts[a], cuts[b]) for a, b in spans)
        is_short = len(cuts) - 1 <= cutting.FEW_STAGES
        worth = [(a, b) for a, b in spans if b == a + 1 or is_short or count[self._kind(cuts[a], cuts[b])] > 1]
        return [(a, b) for a, b in worth if not self._is_pinned(cuts[a], cuts[b])]

    def _is_pinned(self, start: int, stop: int) -> bool:
        """Whether a run holds what must be executed once: it is never wrapped, and not traced by itself."""
        return not all(node.can_recompute for node in self.program.graph.nodes[start:stop])

    def _kind(self, start: int, stop: int) -> Kind:
        if (start, stop) not in self._kinds:
            self._kinds[start, stop] = cutting.kind_of(self.program.graph, self.program.signatures, start, stop)
        return self._kinds[start, stop]

    def _run(self, start: int, stop: int) -> tuple[TracedRun, tuple[Choice, ...]]:
        kind = self._kind(start, stop)
        if kind not in self._traced:
            cuts = self._cuts if len(self.program.eqns) > cutting.MANY_EQUATIONS else ()
            marked = worth_marking(self.program.graph, cuts, start, stop, lambda a, b: self._run(a, b)[1])
            traced = trace_run(self.program, start, stop, marked)
            self._traced[kind] = (traced, choices(traced))
        return self._traced[kind]

    def _price_stages(self, runs: Sequence[tuple[int, int]], blocks: Sequence[tuple[int, int]] = ()) -> None:
        jobs: list[Job] = [("backward", *block, c.saved) for block in blocks for c in self._run(*block)[1]]
        self._zeros = shared_zeros(self._run(*run)[0] for run in runs if not self._is_pinned(*run))
        for start, stop in runs:
            if self._is_pinned(start, stop):
                continue
            is_last = stop == len(self.program.eqns)
            names = ("forward", "last") if is_last else ("forward", "keep", "unwrapped")
            jobs += [(name, start, stop, ()) for name in names]
            if not is_last and (what := self._hoisting(start, stop)):
                jobs.append((what, start, stop, ()))
            if not is_last:
                jobs += [("backward", start, stop, c.saved) for c in self._run(start, stop)[1]]
        last = len(self.program.eqns)
        jobs += [("last" if run[1] == last else "held", *run, s) for run, s in self._spent(runs).items() if s]
        if self.is_compiled:
            self._price(jobs)

    def _spent(self, runs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, ...]]:
        free = [run for run in runs if not self._is_pinned(*run)]
        traced = {run: self._run(*run) for run in free}
        return spent_inputs(self.program.graph, runs, traced, gpu=self.target.gpu)

    @property
    def _is_cpu(self) -> bool:
        return self.target.platform == "cpu"

    def _hoisting(self, start: int, stop: int) -> str:
        if not self.is_compiled and stop == len(self.program.eqns):
            return ""  # its backward pass begins at once, and is counted as a whole
        return hoisting(self._run(start, stop)[0], self._zeros, is_cpu=self._is_cpu)

    def _hoisted_bytes(self, start: int, stop: int) -> int:
        """What the compiler makes for a region ahead of time, and keeps until its backward pass."""
        what = self._hoisting(start, stop)
        return self._bytes(what, start, stop, ()) if what else 0

    def _stage(self, start: int, stop: int, spent_inputs: tuple[int, ...]) -> Stage:
        graph = self.program.graph
        nodes = graph.nodes[start:stop]
        is_last = stop == len(graph.nodes)
        if self._is_pinned(start, stop):
            seconds = eqns_seconds(self.program.eqns[start:stop], (), self.program.eqns[stop - 1].outvars, self.target)
            return analytic.pinned_stage(graph, start, stop, hash(self._kind(start, stop)), seconds)
        tail = self._run(start, stop)[1][0].recompute_flops
        transient = self._bytes("last" if is_last else "backward", start, stop, ())
        keep = self._bytes("last" if is_last else "keep", start, stop, ())
        if self.is_compiled and not is_last:
            keep = max(0, keep - analytic.kept_returned_bytes(self._run(start, stop)[0]))
        gone = self._gone_bytes(start, stop, spent_inputs, is_last)
        hoisted = 0 if is_last else self._hoisted_bytes(start, stop)
        ahead = hoisted if hoisted and self._hoisting(start, stop) == TOGETHER else 0
        sums = summed_sizes(graph, self._cuts, start, stop)
        sizes = self._kept_sizes(start, stop, 0 if is_last else keep - gone)
        is_split = self.is_compiled and not self._is_cpu
        made, spent = graph.made_by(start, stop), self._seconds(start, stop)
        return Stage(
            start, stop, hash(self._kind(start, stop)), sum(n.flops for n in nodes), tail,
            self._bytes("forward", start, stop, ()), transient - gone * is_last, ahead + max(0, keep - gone),
            (transient if is_last else max(keep, self._bytes("unwrapped", start, stop, ()))) - gone,
            sum(graph.values[v].n_bytes for v in made), made.start,
            hoisted,
            spent.forward, spent.backward, spent.scale * self._again_seconds(start, stop, ()),
            sizes,
            gradient_sizes(graph, start, stop),
            joined_bytes(graph, start, stop),
            sum(parts for _, parts in sums),
            tuple(size for size, _ in sums),
            0 if self._is_cpu or is_last else max(0, keep - gone - sum(sizes)),
            0 if self._is_cpu else operand_bytes(graph, start, stop),
            turning_bytes(graph, self._cuts, self._bytes, transient) if is_split and is_last else 0,
            ahead,
        )  # fmt: skip

    def _kept_sizes(self, start: int, stop: int, most_bytes: int) -> tuple[int, ...]:
        key = self._kind(start, stop), most_bytes
        if key not in self._sizes:
            self._sizes[key] = analytic.kept_sizes(self._run(start, stop)[0], most_bytes, gpu=self.target.gpu)
        return self._sizes[key]

    def _gone_bytes(self, start: int, stop: int, spent_inputs: tuple[int, ...], is_last: bool) -> int:
        """Bytes of inputs that are gone when an unwrapped stage has read them, no more than it keeps instead."""
        what = "last" if is_last else "keep"
        if not spent_inputs:
            return 0
        values = (self.program.graph.values[self._run(start, stop)[0].function.reads[i]] for i in spent_inputs)
        size, keep = sum(v.n_bytes for v in values), self._bytes(what, start, stop, ())
        held = self._bytes("last" if is_last else "held", start, stop, spent_inputs)
        return min(size, max(0, size + keep - held), keep)

    def _seconds(self, start: int, stop: int) -> StageSeconds:
        """How long the passes of a stage take."""
        traced, found = self._run(start, stop)
        return self._clock.stage(self._kind(start, stop), (start, stop), traced, found[-1].saved)

    def _again_seconds(self, start: int, stop: int, saved: tuple[int, ...]) -> float:
        """By roofline, how much longer a backward pass takes than that of the choice that executes least again."""
        traced, found = self._run(start, stop)
        return self._clock.again(self._kind(start, stop), traced, saved, found[-1].saved)

    def _options(self, start: int, stop: int, stages: Sequence[Stage], is_fine: bool) -> tuple[Option, ...]:
        traced, found = self._run(start, stop)
        found, scale = finer(traced, found) if is_fine else found, 1.0
        if self.is_compiled:
            scale = max(self._scale(s.start, s.stop) for s in stages)
        last = len(self.program.eqns)
        hoisted = sum(self._hoisted_bytes(s.start, s.stop) if s.stop == last else s.hoisted_bytes for s in stages)
        pace = sum(self._seconds(s.start, s.stop).scale for s in stages) / len(stages)
        options = []
        for c in found:
            key = self._key("backward", start, stop, c.saved)
            known = self._asker.said.get(key)
            transient = known if known is not None else int(scale * self._backward_bytes(start, stop, c.saved))
            spent = pace * self._again_seconds(start, stop, c.saved) if self._minimises_seconds else 0.0
            sizes = saved_sizes(self.program.graph, start, stop, c.saved)
            options.append(Option(c.saved, c.saved_bytes + hoisted, transient, c.recompute_flops, spent,
                                  saved_sizes=sizes))  # fmt: skip
        graph = self.program.graph
        return with_offloading(graph, start, stop, options, self.target) if self.offload else tuple(options)

    def _is_loop(self, stage: Stage) -> bool:
        return stage.stop == stage.start + 1 and stage.start in self._loops

    def _loop_options(self, stage: Stage) -> Iterator[Option]:
        """The ways to run the loop or conditional that a stage is, as it stands or in a region that keeps nothing."""
        kind, least_bytes = self._kind(stage.start, stage.stop), float("inf")
        if kind not in self._ways:
            self._ways[kind] = self._found_ways(stage.start)
        for way in self._ways[kind]:
            loop = replace(way.loop, node=0)
            need = way_bytes(self._ways[kind], way, self._said_of(stage.start, stage.stop))
            spent = way.again_flops * stage.forward_seconds / max(stage.forward_flops, 1.0)
            if isinstance(way, LoopChoice) or not way.is_region:
                yield Option((), need.kept, need.transient, way.again_flops, spent, (loop,), way.again_flops, False,
                             spent)  # fmt: skip
            if need.transient < least_bytes and stage.stop < len(self.program.eqns):
                least_bytes, flops = need.transient, stage.tail_flops + way.again_flops
                seconds = stage.tail_seconds + spent
                yield Option((), need.hoisted, need.transient, flops, seconds, (loop,), way.again_flops,
                             loop_seconds=spent)  # fmt: skip

    def _found_ways(self, node: int) -> tuple[WayChoice, ...]:
        if self.program.eqns[node].primitive.name == "cond":
            return branch_choices(self.program, node, self._body_chain)
        step_bytes = self._step_bytes if self.is_compiled else None
        return loop_choices(self.program, node, step_bytes, self._body_chain, gpu=self.target.gpu)

    def _body_chain(self, body: Program, cuts: tuple[int, ...]) -> Chain:
        """A loop's body or a branch, priced."""
        pricer = Pricer(body, self._asker.target, self.is_compiled, self.store, self.progress, self.workers)
        chain = pricer.chain(cuts)
        if pricer._asker.leaves_products and not self._asker.leaves_products:
            self._asker.leave_products()
        return chain

    def _step_bytes(self, body: Program) -> int:
        """What the backward pass of one step of a loop allocates."""
        kind = cutting.kind_of(body.graph, body.signatures, 0, len(body.eqns))
        key = ("backward", kind, ())
        self._asker.ask({key: partial(probes.backward_probe, body, 0, len(body.eqns), ())})
        return self._asker.said[key]

    def _backward_bytes(self, start: int, stop: int, saved: tuple[int, ...]) -> int:
        """What a backward pass allocates by counting, once for all runs of a kind."""
        key = self._kind(start, stop), saved
        if key not in self._counted:
            self._counted[key] = analytic.backward_bytes(self._run(start, stop)[0], saved, gpu=self.target.gpu)
        return self._counted[key]

    def _scale(self, start: int, stop: int) -> float:
        counted = self._backward_bytes(start, stop, ())
        return max(1.0, self._bytes("backward", start, stop, ()) / max(counted, 1))

    def _bytes(self, what: str, start: int, stop: int, saved: tuple[int, ...]) -> int:
        key = self._key(what, start, stop, saved)
        if key not in self._asker.said:
            if self.is_compiled:
                self._price([(what, start, stop, saved)])
            else:
                self._asker.said[key] = self._count(what, start, stop, saved)
        return self._asker.said[key]

    def _count(self, what: str, start: int, stop: int, saved: tuple[int, ...]) -> int:
        if what == "backward":
            return self._backward_bytes(start, stop, saved)
        at_once = what == "last" and self.program.loss is not None
        return analytic.counted(what, self._run(start, stop)[0], saved, at_once=at_once, gpu=self.target.gpu)

    def _key(self, what: str, start: int, stop: int, saved: Saved) -> Any:
        return what, self._kind(start, stop), saved

    def _price(self, jobs: Iterable[Job]) -> int:
        """Recall or compile what is not known yet; return how many were new."""
        return self._asker.ask({self._key(*job): partial(self._probe, *job) for job in jobs})

    def anew(self, *, is_counted: bool = False) -> Pricer:
        """A pricer that has learnt nothing, maybe without a compiler: plans depend on none that were made before."""
        fresh = replace(self, is_compiled=self.is_compiled and not is_counted)
        fresh._traced, fresh._kinds, fresh._counted = self._traced, self._kinds, self._counted
        fresh._ways, fresh._returned = dict(self._ways) if is_counted else self._ways, self._returned
        return fresh

    def _probe(self, what: str, start: int, stop: int, saved: Saved) -> probes.Probe:
        program, doubles = self.program, self.target.platform == "cpu"
        if isinstance(saved, Loop | Conditional):
            what = "unwrapped" if what == "loop" else what
            program, saved = with_loops(program, [replace(saved, node=start)]), ()
        return probes.probe(what, program, start, stop, saved, doubles=doubles)
