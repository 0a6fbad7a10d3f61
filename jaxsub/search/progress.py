"""What a user sees of planning: on a terminal what is being compiled, in a log what was decided.

Nothing is written to a stderr that is no terminal. Both end where the user says `progress=False`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from jaxsub.core.budget import format_bytes
from jaxsub.core.figures import recomputed_share
from jaxsub.core.plan import Plan

LOGGER = logging.getLogger("jaxsub")
LONG_SECONDS = 2.0
"""Of planning that takes less than this a terminal is not told what was decided."""


class Progress:
    """A line on a terminal that says what is being compiled; it is gone in the end."""

    def __init__(self, is_shown: bool):
        from tqdm import tqdm  # noqa: PLC0415 - not needed to import jaxsub

        self.bar = tqdm(desc="jaxsub: planning", bar_format="{desc}{postfix} [{elapsed}]", leave=False, delay=1e-9,
                        disable=None if is_shown else True)  # fmt: skip

    def __enter__(self) -> Callable[[str], None]:
        return self.step

    def step(self, label: str) -> None:
        """Say what is begun."""
        self.bar.set_postfix_str(label)

    def __exit__(self, *exc: object) -> None:
        self.bar.close()


def tell(plan: Plan, seconds: float) -> None:
    """Say what was decided for a function."""
    say(summary(plan), seconds)


def say(line: str, seconds: float) -> None:
    """Say in a line what was decided: through `logging`, and on a terminal where it took long."""
    LOGGER.info(line)
    if seconds > LONG_SECONDS and sys.stderr.isatty():
        sys.stderr.write(f"jaxsub: {line}\n")


def summary(plan: Plan) -> str:
    """What was decided, in a line.

    Example:
        >>> from jaxsub.core.budget import Budget
        >>> summary(Plan("f", Budget(), 9, planner="plain"))
        'planned by plain: 0 regions, 0.00 of a forward pass recomputed'
    """
    was = f" instead of {format_bytes(plan.plain_measurement.temp_bytes)}" if plan.plain_measurement else ""
    peak = ""
    if plan.measurement is not None:
        peak = f", {format_bytes(plan.measurement.temp_bytes)} measured{was}"
    elif plan.prediction is not None:
        peak = f", {format_bytes(plan.prediction.temp_bytes)} predicted"
    again = f"{recomputed_share(plan):.2f} of a forward pass recomputed"
    return f"planned by {plan.planner}: {plan.n_regions} regions, {again}{peak}"
