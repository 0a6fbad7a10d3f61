"""`Finding` and `Diagnosis`: what was found, how much it costs, and the line that mends it. Plain data; print it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxsub.core.measurement import Measurement
from jaxsub.core.shown import Shown


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
class Diagnosis(Shown):
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
