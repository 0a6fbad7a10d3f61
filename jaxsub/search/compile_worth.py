"""What another compile is worth: how much it must spare, how probable it is to, and what else there is.

Users wait for compiles, and the plan that they find runs for hours. So each must spare a share of a forward pass, and
beyond a few of them ever more. A program with runs in slices may be expected to spare more than the next plan of this
one; then that comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxsub.core.tuning import TUNING
from jaxsub.devices.targets import Target


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is compiled.

    Once a plan fits, another must be predicted to spare `gain` of a forward pass to be compiled, and of more than
    `compiles` each twice as much as the one before. After `max_seconds` nothing better is looked for; a plan that fits
    is looked for all the same.
    """

    gain: float = TUNING.compile_gain
    compiles: float = TUNING.usual_compiles
    max_seconds: float = math.inf

    def price(self, n_compiled: int) -> float:
        """What another plan must be predicted to spare after so many compiles, as a share of a forward pass.

        Example:
            >>> [Effort().price(n) for n in (0, 3, 4, 5)], EFFORTS["high"].price(9)
            ([0.03, 0.03, 0.06, 0.12], 0.03)
        """
        return self.gain * math.exp2(max(0.0, n_compiled + 1 - self.compiles))

    def gives_up(self, n_compiled: int) -> bool:
        """Whether so many compiles of what does not fit are enough: one that fits is worth `Tuning.fitting`.

        Example:
            >>> Effort().gives_up(9), Effort().gives_up(10), EFFORTS["high"].gives_up(99)
            (False, True, False)
        """
        return TUNING.compile_gain * math.exp2(n_compiled + 1 - self.compiles) > TUNING.fitting


EFFORTS = {"low": Effort(gain=math.inf), "default": Effort(), "high": Effort(compiles=math.inf)}


def _never(error: float, share: float) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What other programs of the function may recompute, as one with runs in slices.

    Attributes:
        share: What the best that is known to fit recomputes, as a share of a forward pass; infinite where nothing is.
        is_refused: Whether one was refused, with what it needs.
        is_better: Whether one is expected to fit and to recompute clearly less than a share, where predictions are too
            low by a factor.
    """

    share: float = math.inf
    is_refused: bool = False
    is_better: Callable[[float, float], bool] = _never

    def beside(self, cost: float) -> Elsewhere:
        """The same for a program that costs so much whatever is recomputed."""
        return Elsewhere(self.share - cost, self.is_refused, lambda error, share: self.is_better(error, share + cost))


NOTHING = Elsewhere()


def by_hand_error(target: Target) -> float:
    """By what predictions of plans by hand err in the median on a target."""
    return TUNING.by_hand_error if target.platform == "cpu" else TUNING.median_error


def fitting_probability(share: float, error: float = TUNING.median_error) -> float:
    """How probable it is that what is predicted to need this share of a limit fits.

    Errors fall off exponentially, half of them at `error`.

    Example:
        >>> [round(fitting_probability(share), 2) for share in (0.97, 1.0, 1.03)]
        [0.75, 0.5, 0.25]
    """
    tail: float = 0.5 ** (1 + abs(share - 1) / error)
    return tail if share > 1 else 1 - tail
