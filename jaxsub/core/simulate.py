"""Predict what a planner's runs cost: the peak in exact bytes, and the FLOPs that they recompute.

A chain and runs that cover its stages go in; out comes the peak of what the compiler will allocate beside arguments and
outputs (the largest of `jaxsub.core.timeline`'s steps), and the FLOPs of what is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxsub.core.chain import Chain, Option, Prediction, Run, Untimed
from jaxsub.core.decisions import Inside, saving_in_nests
from jaxsub.core.errors import PlannerError
from jaxsub.core.timeline import own_recompute, stage_timeline


def check_runs(chain: Chain, runs: Sequence[Run]) -> None:
    """Refuse runs that do not cover the stages, or save inside a nest what cannot be saved there, with every fault."""
    faults = list(_faults(chain, runs, 0, len(chain.stages), depth=0))
    if faults:
        raise PlannerError("the planner's runs do not hold together: " + "; ".join(faults))


def may_nest(chain: Chain, option: Option) -> bool:
    """Tell whether a region with this option is allowed inside a nest."""
    if not chain.saves_in_nests and any(saving_in_nests(Inside(ways=option.loops), depth=1)):
        return False
    return not option.saved or (chain.saves_in_nests and not option.offloaded)


def _faults(chain: Chain, runs: Sequence[Run], start: int, stop: int, depth: int) -> Iterator[str]:
    at = start
    for run in runs:
        if run.start != at or run.stop <= run.start:
            yield f"run {run.start}:{run.stop} does not follow on stage {at}"
        at = run.stop
        if run.children and run.option is not None:
            yield f"run {run.start}:{run.stop} is both a region with an option and a nest"
        if depth and run.option is not None and not may_nest(chain, run.option):
            where = "off the device " if run.option.offloaded else ""
            yield f"run {run.start}:{run.stop} saves values {where}inside a nest"
        if run.children:
            yield from _faults(chain, run.children, run.start, run.stop, depth + 1)
    if at != stop:
        yield f"the runs end at stage {at}, not {stop}"


def predict(chain: Chain, runs: Sequence[Run]) -> Prediction:
    """Replay runs in exact bytes; `PlannerError` if they do not hold together."""
    check_runs(chain, runs)
    replay = stage_timeline(chain, runs)
    live, at = replay.live_bytes, replay.steps[replay.peak_step].start
    found = Prediction(max(live), extra_flops(chain, runs), chain.forward_flops, at, chain.origin)
    if not chain.seconds_origin:
        return replace(found, untimed=tuple(_untimed(chain, runs)))
    step = sum(s.forward_seconds + s.backward_seconds for s in chain.stages)
    return replace(found, extra_seconds=_recomputed(chain, runs, "seconds"), step_seconds=step,
                   seconds_origin=chain.seconds_origin, minimises=chain.minimises)  # fmt: skip


def extra_flops(chain: Chain, runs: Sequence[Run]) -> float:
    """Sum the FLOPs that runs recompute."""
    return _recomputed(chain, runs, "flops")


def _recomputed(chain: Chain, runs: Sequence[Run], unit: str) -> float:
    return sum(own_recompute(chain, run, is_paid, unit) for run, is_paid in _each(runs))


def _each(runs: Sequence[Run], is_nested: bool = False) -> Iterator[tuple[Run, bool]]:
    """Yield runs and those inside them, each with whether the nest round it pays for its forward pass."""
    for run in runs:
        yield run, is_nested and run is runs[-1]
        yield from _each(run.children, is_nested=True)


def _untimed(chain: Chain, runs: Sequence[Run]) -> Iterator[Untimed]:
    """Yield what runs recompute, as `own_recompute` counts it."""
    for run, is_paid in _each(runs):
        stages, option = chain.stages[run.start : run.stop], run.option
        if run.children:
            yield from (Untimed(stage.start, stage.stop, None) for stage in stages[:-1])
            yield Untimed(stages[-1].start, stages[-1].stop, ())
        elif option is not None:
            start, stop, flops = stages[0].start, stages[-1].stop, stages[0].forward_flops
            if option.recompute_flops > option.loop_flops and not is_paid:
                yield Untimed(start, stop, option.saved)
            if option.loop_flops and flops:
                yield Untimed(start, stop, None, option.loop_flops / flops)
