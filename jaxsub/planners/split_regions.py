"""Split long regions: of plans that save and recompute the same, prefer the one with short regions.

Runs that cover a chain go in; the same come out, with regions of several stages replaced by shorter ones that together
save no more bytes and recompute no more. Inside a region the compiler orders the backward pass freely, and may first
recompute everything that a long region does not save, which its price cannot know. Short regions have gradient barriers
between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxsub.core.chain import Chain, Option, Run
from jaxsub.core.simulate import predict

ROUNDING = 1e-6  # relative; FLOPs of a long region and of its pieces are sums of the same numbers
MOST_CHOICES = 64  # Pareto-optimal splits of one region up to a cut that are kept


def split_regions(chain: Chain, runs: Sequence[Run]) -> tuple[Run, ...]:
    """Replace long regions by short ones predicted to need no more memory and recompute no more."""
    short = tuple(piece for run in runs for piece in _pieces(chain, run))
    if len(short) == len(runs) or predict(chain, short).temp_bytes > predict(chain, runs).temp_bytes:
        return tuple(runs)
    return short


@dataclass(frozen=True, slots=True)
class _Cover:
    """Regions that cover the first stages of a long one: recomputed FLOPs and kept bytes."""

    flops: float = 0.0
    kept_bytes: int = 0
    runs: tuple[Run, ...] = ()

    def is_no_worse(self, than: _Cover) -> bool:
        return self.flops <= than.flops and self.kept_bytes <= than.kept_bytes and len(self.runs) >= len(than.runs)


def _pieces(chain: Chain, run: Run) -> tuple[Run, ...]:
    """Split a region into as many as possible that cost no more; return it alone where there is no such split."""
    if run.option is None or not run.option.is_region or run.stop - run.start < 2:
        return (run,)
    whole = _with(chain, _Cover(), run)
    covers: dict[int, list[_Cover]] = {run.start: [_Cover()]}
    for s in range(run.start, run.stop):
        for piece in _shorter(chain, run, s):
            for before in covers.get(s, ()):
                found, known = _with(chain, before, piece), covers.setdefault(piece.stop, [])
                fits = found.flops <= whole.flops * (1 + ROUNDING) and found.kept_bytes <= whole.kept_bytes
                if fits and len(known) < MOST_CHOICES and not any(k.is_no_worse(found) for k in known):
                    known[:] = [k for k in known if not found.is_no_worse(k)] + [found]
    return max(covers.get(run.stop, []), key=lambda c: len(c.runs), default=whole).runs


def _shorter(chain: Chain, run: Run, start: int) -> Iterator[Run]:
    for item in chain.items:
        if item.start == start and item.stop <= run.stop and item.stop - item.start < run.stop - run.start:
            yield from (Run(start, item.stop, option) for option in item.options if option.is_region)


def _with(chain: Chain, before: _Cover, run: Run) -> _Cover:
    option = run.option or Option()
    kept = int(chain.crossing_bytes[run.start, run.stop]) + option.saved_bytes
    return _Cover(before.flops + option.recompute_flops, before.kept_bytes + kept, (*before.runs, run))
