"""Memory budgets in the forms a user may give them, and bytes in the form a person may read.

In goes `"8GiB"`, a number of bytes, a fraction or nothing; out comes a `Budget`, or a `BudgetError` that names the
forms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from jaxsub.core.errors import BudgetError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
FORMS = (
    'Pass bytes as "8GiB", "512MB" or an int; a float in (0, 1] or "50%", the fraction of what the function needs now; '
    "or None."
)


def unit_of(n_bytes: float) -> tuple[str, int]:
    """The binary unit that suits some bytes, and its size."""
    binary = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((found for found in binary if n_bytes >= found[1]), ("B", 1))


def format_bytes(n_bytes: float) -> str:
    """Format bytes for a person, in binary units: `3.1 GiB`.

    Example:
        >>> format_bytes(3 * 2**30)
        '3.00 GiB'
    """
    unit, size = unit_of(abs(n_bytes))
    return f"{n_bytes / size:.{0 if size == 1 else 2 if n_bytes < 10 * size else 1}f} {unit}"


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory budget: bytes, a fraction of what the function needs without rematerialisation, or neither.

    Attributes:
        n_bytes: The budget in bytes, or `None`.
        fraction: The fraction in (0, 1], or `None`. With neither, the budget is the paper's default: the least memory
            that at most one extra forward pass can buy.
    """

    n_bytes: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, budget: str | int | float | Budget | None) -> Budget:
        """Read a budget in any of its forms.

        Raises:
            BudgetError: If it has no such form, or is not positive.

        Example:
            >>> Budget.parse("1.5KiB").n_bytes
            1536
            >>> Budget.parse(0.25).fraction, Budget.parse("25%").fraction
            (0.25, 0.25)
        """
        if isinstance(budget, Budget):
            return budget
        if budget is None:
            return cls()
        if isinstance(budget, str):
            return _parse_text(budget)
        if (shape := getattr(budget, "shape", ())) != ():
            raise BudgetError(f"A budget is one number, got an array of shape {shape}. {FORMS}")
        if isinstance(budget, bool) or str(getattr(budget, "dtype", "")) == "bool":
            raise BudgetError(f"A budget cannot be a bool, got {budget}. {FORMS}")
        number: Any = budget  # a scalar of NumPy or JAX is the number that it holds
        if hasattr(number, "dtype") and hasattr(number, "item"):
            number = number.item()
        if hasattr(number, "__index__"):
            if (n_bytes := int(number)) <= 0:
                raise BudgetError(f"A budget must be positive, got {number} bytes. {FORMS}")
            return cls(n_bytes=n_bytes)
        if isinstance(number, float) or hasattr(number, "__float__"):
            return cls(fraction=_fraction(float(number), number))
        raise BudgetError(f"Cannot read the budget {budget!r} of type {type(budget).__name__}. {FORMS}")

    def faults(self) -> list[str]:
        """What `parse` never makes, by field."""
        found = []
        if self.n_bytes is not None and (self.n_bytes < 1 or self.fraction is not None):
            found.append(f"n_bytes: {self.n_bytes} is not positive, or a fraction is given too")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            found.append(f"fraction: {self.fraction} is not in (0, 1]")
        return found

    def __str__(self) -> str:
        if self.n_bytes is not None:
            return format_bytes(self.n_bytes)
        return "none given" if self.fraction is None else f"{self.fraction:.0%} of plain"


def _fraction(value: float, given: object) -> float:
    if not 0 < value <= 1:
        hint = f" For bytes pass int({given!r})." if value > 1 and value.is_integer() else ""
        raise BudgetError(f"A float budget is a fraction in (0, 1], got {given!r}.{hint} {FORMS}")
    return value


def _parse_text(text: str) -> Budget:
    """A budget as it is written: bytes, or a fraction as `50%` or `0.5`."""
    match = re.fullmatch(r"\s*([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*|%)\s*", text)
    if match is None or match[2].upper() not in (*UNITS, "%"):
        raise BudgetError(f"Cannot read the budget {text!r}. {FORMS}")
    number, unit = float(match[1]), match[2].upper()
    if unit == "%":
        return Budget(fraction=_fraction(number / 100, text))
    if not unit and not match[1].isdigit() and 0 < number < math.inf and (number <= 1 or not number.is_integer()):
        return Budget(fraction=_fraction(number, text))
    n_bytes = number * UNITS[unit]
    if not math.isfinite(n_bytes) or n_bytes < 1:
        raise BudgetError(f"A budget must be positive and finite, got {text!r}. {FORMS}")
    return Budget(n_bytes=int(n_bytes))
