"""`Finding` and `Diagnosis`: what was found, how much it costs, and the line that mends it. Plain data; print it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jaxsub.core.budget import format_bytes
from jaxsub.core.measurement import Measurement

COLUMNS = 80


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, and how to mend it.

    Attributes:
        kind: Which check found it, such as `"not donated"`.
        n_bytes: What mending it saves, on one device.
        what: What is wrong.
        fix: What to write, in one line.
        is_measured: Whether `n_bytes` is the difference between two compiled programs. Otherwise it is the size of
            arrays of the traced program: an upper bound, for the compiler may not store them.
        source: The user's source line; empty where it is not known.
        count: How often it is there; `n_bytes` is that of all.
    """

    kind: str
    n_bytes: int
    what: str
    fix: str
    is_measured: bool
    source: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with a loss or a step; print it.

    Attributes:
        is_step: Whether a whole step was looked at; otherwise the gradient of a loss.
        findings: The faults, those first that cost most.
        measurement: What the compiler allocates for the program as it is; `None` where nothing was compiled.
        not_looked_at: Checks that were left out, and why.
    """

    is_step: bool
    findings: tuple[Finding, ...]
    measurement: Measurement | None
    not_looked_at: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text("Diagnosis(...)" if cycle else str(self))  # type: ignore[attr-defined]


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings, those first that cost most; those that differ in nothing but their bytes are one.

    Example:
        >>> found = Finding("broadcast", 8, "a mask is stored in full.", "compute it inside the loop.", False)
        >>> [(f.n_bytes, f.count) for f in ranked([found, found])]
        [(16, 2)]
    """
    same: dict[Finding, list[Finding]] = {}
    for finding in findings:
        same.setdefault(replace(finding, n_bytes=0, count=1), []).append(finding)
    merged = (replace(f, n_bytes=sum(m.n_bytes for m in many), count=len(many)) for f, many in same.items())
    return tuple(sorted(merged, key=lambda f: -f.n_bytes))


def _lines(found: Diagnosis) -> Iterator[str]:
    subject = "step" if found.is_step else "gradient"
    taken = f": {found.measurement}" if found.measurement is not None else ", not compiled"
    yield from textwrap.wrap(f"jaxsub doctor, the {subject}{taken}", COLUMNS)
    if not found.findings:
        yield "No fault was found."
    for number, finding in enumerate(found.findings, 1):
        how = "measured" if finding.is_measured else "at most"
        often = f" ({finding.count} ×)" if finding.count > 1 else ""
        head = f"{number:>2}. {format_bytes(finding.n_bytes):>10} {how:<9} {finding.kind}{often}"
        yield head + (f", {finding.source}" if finding.source else "")
        yield from textwrap.wrap(finding.what, COLUMNS, initial_indent=" " * 4, subsequent_indent=" " * 4)
        yield f"    fix: {finding.fix}"
    for left_out in found.not_looked_at:
        yield from textwrap.wrap(f"not looked at: {left_out}", COLUMNS, subsequent_indent=" " * 4)
