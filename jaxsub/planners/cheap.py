"""Drop the results of low-cost operations, save those of costly ones: the paper's §4.2.

Each stage becomes a region with the option of least recompute and, among those, of least saved bytes: in convolution,
batch norm, activation, it saves the convolution's output and recomputes the rest. The last stage is not wrapped, so its
backward pass starts at once; nor is a stage without options. There is one such plan: it fits a budget or is refused.

Source: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, §4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxsub.core.chain import Chain, Option, Run
from jaxsub.planners.memo import AllBudgets, Answer
from jaxsub.planners.select import Candidates


def cheap_runs(chain: Chain) -> tuple[Run, ...]:
    """Make a region of each stage but the last, which recomputes what is cheap and saves the rest."""
    options = {item.start: item.options for item in chain.items if item.stop - item.start == 1}
    last = len(chain.stages) - 1
    best = (_cheapest(options.get(s, ())) if s != last else None for s in range(last + 1))
    return tuple(Run(s, s + 1, option) for s, option in enumerate(best))


def _cheapest(options: tuple[Option, ...]) -> Option | None:
    return min(options, key=lambda o: (o.recompute_flops, o.saved_bytes, o.transient_bytes), default=None)


@dataclass(frozen=True, slots=True)
class Cheap(AllBudgets):
    """Plan by dropping the results of low-cost operations.

    References:
        Chen et al., 2016, §4.2.
    """

    def solved(self, chain: Chain) -> Answer:
        """Plan a chain for all budgets: there is one plan."""
        return partial(Candidates(chain, lambda _: cheap_runs(chain), "cheap").cheapest, [0])
