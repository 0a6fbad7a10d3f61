"""`recursive(k)`: store k results and apply the same division to each part between them, when it is recomputed.

The stages are divided into k + 1 parts that make about equal bytes, and the ends of parts are stored. The backward pass
recomputes each part and divides it in the same way, so n equal stages need g(n) = k + g(n / (k + 1)) stored results,
k log_{k+1} n in all, and are recomputed at most log_{k+1} n times. The last part is divided without recompute. A part
of at most k + 1 stages is divided no further: it stores the results of its stages, and a stage of it is a region only
if the compiler would keep more bytes of it beside its result than the result takes.

Source: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, §4.4, with any k >= 1.
Ours in addition: parts have equal bytes, not equally many stages, which is the same where stages are equal; with a
budget but no k, the k of least recompute that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxsub.core.chain import Chain, Run
from jaxsub.planners.memo import AllBudgets, Answer
from jaxsub.planners.select import Candidates, numbers_to_try

GROWTH = 1.25  # from one k to try to the next, once they are large


def recursive_runs(chain: Chain, k: int) -> tuple[Run, ...]:
    """Make the runs of the recursion that stores `k` results, at least one, at every level."""
    return tuple(_divided(chain, _before(chain), 0, len(chain.stages), k))


def _before(chain: Chain) -> np.ndarray:
    made = np.array([stage.made_bytes for stage in chain.stages], dtype=np.float64)
    weights = made if made.any() else np.ones(len(made))
    return np.concatenate([[0.0], np.cumsum(weights)])


def _divided(chain: Chain, before: np.ndarray, start: int, stop: int, k: int) -> Iterator[Run]:
    """Yield runs over stages `start .. stop - 1`; `before[s]` is the weight of the stages before `s`."""
    while stop - start > 1:
        *ends, _ = _ends(before, start, stop, min(k, stop - start - 1))
        for end in ends:
            if end - start == 1:
                yield Run(start, end) if _is_small(chain, start) else chain.recompute(start)
            else:
                yield Run(start, end, None, tuple(_divided(chain, before, start, end, k)))
            start = end
    yield Run(start, stop)


def _is_small(chain: Chain, stage: int) -> bool:
    return chain.stages[stage].keep_bytes <= int(chain.crossing_bytes[stage, stage + 1])


def _ends(before: np.ndarray, start: int, stop: int, k: int) -> list[int]:
    """Find where k + 1 parts of about equal weight end; none is empty."""
    ends: list[int] = []
    for j in range(1, k + 1):
        goal = before[start] + (before[stop] - before[start]) * j / (k + 1)
        least, most = (ends[-1] if ends else start) + 1, stop - (k + 1 - j)
        nearest = least + int(np.abs(before[least : most + 1] - goal).argmin())
        ends.append(nearest)
    return [*ends, stop]


@dataclass(frozen=True, slots=True)
class Recursive(AllBudgets):
    """Plan by recursion.

    Attributes:
        k: How many results to store at every level, at least 1; `None` for the k of least recompute that fits the
            budget, or 1, the least memory, without a budget.

    Raises:
        ValueError: If `k` is below 1.

    Example:
        >>> from jaxsub.core.chain import Crossing, Stage
        >>> stages = tuple(Stage(s, s + 1, transient_bytes=1, made_bytes=1) for s in range(64))
        >>> chain = Chain(stages, (), tuple(Crossing(s, s + 1, 1, 0) for s in range(63)))
        >>> [Recursive(k)(chain).prediction.temp_bytes for k in (1, 2, 3)]
        [7, 8, 10]

    References:
        Chen et al., 2016, §4.4.
    """

    k: int | None = None

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise ValueError(f"the recursion stores at least 1 result at every level, got k={self.k}")

    def solved(self, chain: Chain) -> Answer:
        """Plan a chain for all budgets."""
        found = Candidates(chain, lambda k: recursive_runs(chain, int(k)), "recursive")
        natural = [1 if self.k is None else self.k]
        every = numbers_to_try(1, len(chain.stages) - 1, GROWTH) if self.k is None else natural
        return lambda budget_bytes: found.cheapest(natural if budget_bytes is None else every, budget_bytes)
