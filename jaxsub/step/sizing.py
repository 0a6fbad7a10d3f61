"""Plans for a whole step: how much each sublinear function in it may take, so that the step fits.

One level, in bytes, is asked of all functions at once: each gets its best plan within that level, or keeps its own plan
where that needs no more. Where functions run one after the other that is the best there is, since the step's peak is
that of the worst of them. The whole step is compiled and what the compiler allocates moves the level: first by what is
too much, then along the line through what was seen, then between a level that fits and one that does not. In the end
each function is tried at its own plan again, for one that does not stand at the peak need not recompute anything.

Whatever is compiled is remembered, and of all that fits the least recomputation is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxsub.core.disk_cache import Store
from jaxsub.core.plan import Measurement, Plan
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.planners import Planner, get
from jaxsub.planners.memo import Held
from jaxsub.search.budget_search import CLOSE, MARGIN, MOST_COMPILES
from jaxsub.search.call_sites import Site, Trial
from jaxsub.search.candidates import natural, settle
from jaxsub.search.pipeline import once
from jaxsub.search.verify import cut_choices, usual_choices

FLAT = 0.05
"""Where a byte less at a level saves fewer bytes of the step than this, the peak stands elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """A step that was compiled.

    Attributes:
        trial: Its plans, and the functions that were found in it.
        measurement: What the compiler allocates for it.
        run: What can be called: the step under `jax.jit`.
        digest: A digest of what was compiled.
    """

    trial: Trial
    measurement: Measurement
    run: Any
    digest: str = ""

    @property
    def plans(self) -> dict[str, Plan]:
        """Each function's plan, by fingerprint."""
        return {key: self.trial.plans.get(key, site.own) for key, site in self.trial.sites.items()}

    @property
    def extra_flops(self) -> float:
        """What is predicted to be executed again, in all of its functions."""
        found = ((p.prediction, self.trial.calls[key]) for key, p in self.plans.items())
        return sum(prediction.extra_flops * calls for prediction, calls in found if prediction is not None)


def step_bytes(measured: Measurement) -> int:
    """What a step takes of a device: arguments, outputs and temporaries, without outputs that reuse an argument."""
    return measured.argument_bytes + measured.output_bytes + measured.temp_bytes - measured.alias_bytes


@dataclass(slots=True, eq=False)
class Ladder:
    """Plans of one function from its own down to the least."""

    site: Site
    target: Target
    store: Store | None
    progress: Callable[[str], None]
    pricer: Pricer = field(init=False)
    cuts: list[tuple[int, ...]] = field(init=False)
    planner: Planner = field(init=False)
    chosen: tuple[int, ...] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        program, settings = self.site.program, self.site.settings
        is_compiled = settings.verify is not False and not compat.names_axes(program.traced)
        self.pricer = Pricer(program, self.target, is_compiled, self.store, self.progress, offload=settings.offload)
        self.cuts = cut_choices(program)
        self.planner = once(program, Held(get(settings.planner)))

    @property
    def top_bytes(self) -> int:
        """What the function's own plan is predicted to need."""
        with self.site.axes():
            own = self.site.own.prediction or get("plain")(self.pricer.chain(self.cuts[0]), None).prediction
        return own.temp_bytes if own is not None else 0

    def at(self, n_bytes: float) -> Plan:
        """The best plan within so many bytes, or the least."""
        if n_bytes >= self.top_bytes:
            return self.site.own
        if self.chosen is None:
            found = [(self._settled(self.pricer, cuts, n_bytes), cuts) for cuts in self.cuts]
            fitting = (cuts for plan, cuts in found if predicted(plan) <= n_bytes)
            self.chosen = next(fitting, min(found, key=lambda f: predicted(f[0]))[1])
        return self._settled(self.pricer, self.chosen, n_bytes)

    def least(self) -> list[Plan]:
        """The least plan on each way to cut; the same whatever was asked before."""
        return [self._settled(self.pricer.anew(), cuts, 1) for cuts in self.cuts]

    def usual(self) -> Plan:
        """What at most one extra forward pass buys."""
        with self.site.axes():
            return natural(self.pricer.anew(), usual_choices(self.site.program, self.cuts), self.planner)

    def _settled(self, pricer: Pricer, cuts: tuple[int, ...], n_bytes: float) -> Plan:
        with self.site.axes():
            return settle(pricer, cuts, self.planner, max(1, int(n_bytes)))


def predicted(plan: Plan) -> int:
    """What a plan is expected to need."""
    return plan.prediction.temp_bytes if plan.prediction is not None else 0


@dataclass(slots=True, eq=False)
class Sizing:
    """The search for the plans of one step.

    Attributes:
        first: The step with every function under its own plan.
        compile_trial: Compiles the step under a trial's plans.
        target: What it is planned for.
        store: Where prices are remembered.
        progress: Told of what is compiled.
        attempts: All that was compiled.
        ladders: The plans of every function that may be planned.
    """

    first: Attempt
    compile_trial: Callable[[Trial], Attempt]
    target: Target
    store: Store | None
    progress: Callable[[str], None]
    attempts: dict[Any, Attempt] = field(init=False)
    ladders: dict[str, Ladder] = field(init=False)

    def __post_init__(self) -> None:
        self.attempts = {_shape(self.first.plans): self.first}
        sized = {key: site for key, site in self.first.trial.sites.items() if site.is_sized}
        self.ladders = {key: Ladder(site, self.target, self.store, self.progress) for key, site in sized.items()}

    def attempt(self, plans: Mapping[str, Plan]) -> Attempt:
        """Compile the step under plans, unless that was done before."""
        key = _shape({**self.first.plans, **plans})
        if key not in self.attempts:
            self.attempts[key] = self.compile_trial(Trial(self.target, plans))
        return self.attempts[key]

    def run(self, n_bytes: int) -> Attempt | None:
        """Find the plans with which the step fits and recomputes least, or `None`.

        Args:
            n_bytes: What the step may take of a device.
        """
        if self._fits(self.first, n_bytes):
            return self.first
        if not self.ladders:
            return None
        self._search(n_bytes)
        best = self._best(n_bytes)
        if best is None:
            for plans in self._least_plans():
                self.attempt(plans)
            return self._best(n_bytes)
        self._relax(best, n_bytes)
        return self._best(n_bytes)

    def least(self) -> Attempt:
        """What needs least of all that is tried whatever the budget is."""
        tried = [self.first, *(self.attempt(plans) for plans in self._least_plans())]
        return min(tried, key=lambda a: step_bytes(a.measurement))

    def _fits(self, attempt: Attempt, n_bytes: int) -> bool:
        return step_bytes(attempt.measurement) <= n_bytes

    def _best(self, n_bytes: int) -> Attempt | None:
        fitting = [a for a in self.attempts.values() if self._fits(a, n_bytes)]
        return min(fitting, key=lambda a: (a.extra_flops, step_bytes(a.measurement)), default=None)

    def _search(self, n_bytes: int) -> None:
        """Move the level until the step fits and leaves little."""
        given = step_bytes(self.first.measurement) - self.first.measurement.temp_bytes
        budget = n_bytes - given
        top = float(max(ladder.top_bytes for ladder in self.ladders.values()))
        if budget <= 0 or top <= 0:
            return
        line = _Line(budget * (1 - MARGIN), top, self.first.measurement.temp_bytes)
        level, seen = line.start(), {id(self.first)}
        while len(self.attempts) < MOST_COMPILES:
            plans = {key: ladder.at(level) for key, ladder in self.ladders.items()}
            level = max(level, *(predicted(p) for key, p in plans.items() if p is not self.ladders[key].site.own), 1.0)
            found = self.attempt(plans)
            if id(found) in seen:
                break
            seen.add(id(found))
            needed = found.measurement.temp_bytes
            forward = sum(p.prediction.forward_flops for p in plans.values() if p.prediction is not None)
            if needed <= budget and (needed >= CLOSE * budget or found.extra_flops <= 1e-3 * forward):
                break
            following = line.after(level, needed, budget)
            if abs(following - level) < 1e-3 * top:
                break
            level = following

    def _least_plans(self) -> Iterator[dict[str, Plan]]:
        """Every function at its least, on each way to cut, and at what is usual: weights' gradients may hold more."""
        ladders = self.ladders.items()
        least = {key: ladder.least() for key, ladder in ladders}
        for number in range(max((len(plans) for plans in least.values()), default=0)):
            yield {key: plans[min(number, len(plans) - 1)] for key, plans in least.items()}
        if ladders:
            yield {key: ladder.usual() for key, ladder in ladders}

    def _relax(self, best: Attempt, n_bytes: int) -> None:
        """Give each function its own plan back where the step still fits, the costliest first."""
        if len(self.ladders) == 1:
            return
        plans = dict(best.plans)
        cost = {key: p.prediction.extra_flops if p.prediction is not None else 0.0 for key, p in plans.items()}
        for key in sorted(self.ladders, key=lambda key: -cost[key]):
            relaxed = {**plans, key: self.ladders[key].site.own}
            if cost[key] > 0 and self._fits(self.attempt(relaxed), n_bytes):
                plans = relaxed


def _shape(plans: Mapping[str, Plan]) -> Any:
    """What of plans decides what is compiled."""
    return tuple((key, p.segments, p.barriers, p.loops) for key, p in sorted(plans.items()))


@dataclass(slots=True, eq=False)
class _Line:
    """The next level, from levels and what the step needed at them.

    Attributes:
        aim: What the step's temporaries should come to.
        top: The level at which every function has its own plan.
        at_top: What the step's temporaries come to there.
    """

    aim: float
    top: float
    at_top: float
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None

    def start(self) -> float:
        """The first level: less by what is too much; in proportion where functions are spread over devices."""
        excess = self.at_top - self.aim
        proportional = self.top * max(0.0, 1 - excess / max(self.at_top, 1.0))
        direct = self.top - excess
        return max(1.0, direct if direct > 0 and self.at_top >= 0.8 * self.top else proportional)

    def after(self, level: float, needed: float, budget: float) -> float:
        """The level to try next, once the step needed so much at a level."""
        if needed <= budget:
            self.low = max(self.low or (level, needed), (level, needed))
        else:
            self.high = min(self.high or (level, needed), (level, needed))
        if self.low is None:
            slope = (self.at_top - needed) / max(self.top - level, 1.0)
            return max(1.0, level - (needed - self.aim) / slope if slope > FLAT else level / 2)
        (a, at_a), (b, at_b) = self.low, self.high or (self.top, self.at_top)
        if b <= a:
            return level
        share = (self.aim - at_a) / (at_b - at_a) if at_b > at_a else 0.5
        return a + min(0.9, max(0.1, share)) * (b - a)
