"""The exceptions jaxsub raises, each carrying the figures it speaks of.

Every message says what is wrong in the user's words, the value got with its unit, the limit, and what to
do next. All of them derive from `JaxsubError` and from the built-in exception a caller would expect.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

from jaxsub.core.measurement import Measurement


class JaxsubError(Exception):
    """Base of every exception that jaxsub raises on purpose; it can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class BudgetError(JaxsubError, ValueError):
    """A budget that cannot be read, or is not positive."""


class InfeasibleBudgetError(JaxsubError, ValueError):
    """No plan known to jaxsub fits the budget.

    Attributes:
        requested_bytes: The budget asked for, in bytes.
        least_bytes: The least budget that is known to work, in bytes; asking for it succeeds.
        holders: The values that hold the peak, largest first, as lines of text.
        plan: The `jaxsub.Plan` that needs so little; `None` where none was measured, or a whole step was refused.
    """

    def __init__(self, message: str, *, requested_bytes: int, least_bytes: int, holders: tuple[str, ...] = (),
                 plan: Any = None):  # fmt: skip
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.least_bytes = least_bytes
        self.holders = holders
        self.plan = plan

    def with_plan(self, change: Callable[[Any], Any]) -> InfeasibleBudgetError:
        """The same of a function around the one that was refused: `change` makes its plan of this one's."""
        plan = None if self.plan is None else change(self.plan)
        return InfeasibleBudgetError(str(self), requested_bytes=self.requested_bytes, least_bytes=self.least_bytes,
                                     holders=self.holders, plan=plan)  # fmt: skip


class UnsupportedError(JaxsubError, NotImplementedError):
    """Something in the function that jaxsub cannot keep its promises for; all faults are listed at once."""


class PlanMismatchError(JaxsubError, ValueError):
    """A plan was used on a function it was not made for.

    Attributes:
        plan_fingerprint: Fingerprint of the function the plan was made for.
        function_fingerprint: Fingerprint of the function it was used on.
    """

    def __init__(self, message: str, *, plan_fingerprint: str, function_fingerprint: str):
        super().__init__(message)
        self.plan_fingerprint = plan_fingerprint
        self.function_fingerprint = function_fingerprint


class PlannerError(JaxsubError, RuntimeError):
    """A planner that is unknown, or that returned a plan which does not hold together."""


class PolicyError(JaxsubError, ValueError):
    """A policy that is unknown, or a pattern that names no module."""


class VerificationError(JaxsubError, AssertionError):
    """A plan that was compiled and does not do what it promised; `measurement` is what the compiler reported."""

    def __init__(self, message: str, *, measurement: Measurement):
        super().__init__(message)
        self.measurement = measurement
