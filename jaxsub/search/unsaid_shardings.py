"""Plan for one device where arguments are split over several and nothing says how: then nothing runs in slices.

Slices along an axis that is split would gather all of it on every device. Planned whole, a function needs no more than
one device that holds all arguments does.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from jaxsub.core.budget import Budget
from jaxsub.jaxpr.shardings import unsaid_devices
from jaxsub.jaxpr.trace import Program
from jaxsub.search.pipeline import Settings


def as_said(program: Program, settings: Settings) -> Settings:
    """Settings for what is known of a program's shardings; warns where its budget is one of all devices together."""
    n_devices = 1 if program.is_sharded else unsaid_devices(program.avals())
    if n_devices == 1 or settings.is_fixed or settings.budget == Budget():
        return settings
    warnings.warn(
        f"The arguments of this function are on {n_devices} devices, and nothing says how they are split over them: it "
        "is planned as for one device that holds all of them, and nothing in it runs in slices. Pass in_shardings= to "
        "jaxsub.sublinear, or let jaxsub.jit(step, memory=...) plan it.",
        stacklevel=3,
    )
    return replace(settings, chunks=False) if settings.chunks == "auto" else settings
