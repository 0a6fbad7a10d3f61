"""One search for all budgets: the largest of a quantity whose measured bytes stay within a limit.

The quantity is what a planner is asked for, the level of a step's functions, or a batch; what is measured grows about
linearly with it. Seen are the largest that fits and the smallest that does not. While there is only one of the two, the
next is where a line of known slope through what was seen meets the limit; then it lies on the line between both, and in
the middle where that has led to the same side twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxsub.core.budget import format_bytes
from jaxsub.core.tuning import TUNING


@dataclass(slots=True)
class Bracket:
    """What was seen of a quantity: the largest that fits and the smallest that does not, each with its bytes.

    `slope` is the bytes that one more of it is expected to take; `None` for in proportion, until two were seen.
    """

    limit: float
    slope: float | None = None
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    _last: tuple[float, float] | None = field(init=False, default=None)
    _worst: float = field(init=False, default=0.0)
    _same: int = field(init=False, default=0)
    _is_halved: bool = field(init=False, default=False)

    def add(self, quantity: float, n_bytes: float) -> None:
        """Remember that so much of the quantity takes so many bytes."""
        fits, was_both = n_bytes <= self.limit, self.low is not None and self.high is not None
        self._last = (self.low if fits else self.high) or self._last
        if fits:
            self.low = max(self.low or (quantity, n_bytes), (quantity, n_bytes))
        else:
            self.high = min(self.high or (quantity, n_bytes), (quantity, n_bytes))
        self._worst = max(self._worst, n_bytes - quantity * (self.slope or 0.0))
        self._same = (max(self._same, 0) + 1 if fits else min(self._same, 0) - 1) if was_both else 0

    def following(self) -> float | None:
        """The next to try; `None` where nothing lies between what fits and what does not."""
        if self.low is None and self.high is None:
            return None
        if self.low is None or self.high is None:
            return self._beyond(self.low or self.high or (0.0, 0.0))
        (a, at_a), (b, at_b) = self.low, self.high
        if b <= a:
            return None
        share = (self.limit - at_a) / (at_b - at_a) if at_b > at_a and abs(self._same) < 2 else 0.5
        return a + min(1 - TUNING.bracket_share, max(TUNING.bracket_share, share)) * (b - a)

    def _beyond(self, end: tuple[float, float]) -> float:
        """Where the line through one end meets the limit; of several misses the worst is taken to repeat itself.

        A flat line may meet it far below what would fit: half of the quantity comes first, once.
        """
        quantity, n_bytes = end
        if self.slope is not None:
            if self.high:
                return min((self.limit - self._worst) / self.slope, quantity)
            return quantity + (self.limit - n_bytes) / self.slope
        if self._last is not None and self._last[0] != quantity:
            slope = (n_bytes - self._last[1]) / (quantity - self._last[0])
            met = quantity + (self.limit - n_bytes) / slope if slope > 0 else 2 * quantity
            if self.high and met < quantity / 2 and not self._is_halved:
                self._is_halved, met = True, quantity / 2
        else:
            met = quantity * self.limit / max(n_bytes, 1)
        return min(met, TUNING.bracket_leap * quantity) if self.low else met


FLAT = 1024
"""Of a batch so many times as large that takes the same bytes, no batch will ever take more."""


def largest(bytes_of: Callable[[int], int], limit: int, unit: int, known: int = 0) -> int:
    """Find the largest multiple of `unit` whose bytes, about linear in it, are within a limit; 0 if none is.

    A batch that is known to fit may be given. `ValueError` if bytes do not grow with it.

    Example:
        >>> largest(lambda n: 100 + 7 * n, 1000, unit=4)
        128
    """
    seen, firsts = Bracket(limit), dict[int, int]()
    batch = known or unit
    while True:
        n_bytes = bytes_of(batch)
        seen.add(batch, n_bytes)
        if batch >= FLAT * (first := firsts.setdefault(n_bytes, batch)):
            raise ValueError(
                f"A batch of {batch} takes no more memory than one of {first}: {format_bytes(n_bytes)}. There is no "
                "largest. The step, or its arguments, must depend on the batch that step_for_batch is given."
            )
        low = int(seen.low[0]) if seen.low else 0
        if seen.high is not None and seen.high[0] - low <= unit:
            return low
        most = int(seen.high[0]) - unit if seen.high else TUNING.bracket_leap * low
        wanted = int(seen.following() or 0) // unit * unit
        batch = min(max(wanted, low + unit), most)
