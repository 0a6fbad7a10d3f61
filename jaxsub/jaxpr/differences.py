"""Say where a program differs from the one that a plan was made for: a few digits for each equation, kept in plans."""

from __future__ import annotations

import hashlib

from jaxsub.core.plan import DIGITS
from jaxsub.jaxpr.trace import Program


def equation_digests(program: Program) -> str:
    """Make `DIGITS` hexadecimal digits for each equation: what it is, and which values it reads."""
    rows = zip(program.signatures, program.graph.nodes, strict=True)
    return "".join(hashlib.blake2b(s + repr(n.inputs).encode(), digest_size=DIGITS // 2).hexdigest() for s, n in rows)


def first_difference(program: Program, digests: str) -> str:
    """Say which equation of a program is the first that differs from `digests`; empty if there are none."""
    if not digests:
        return ""
    there, here = (
        [text[i : i + DIGITS] for i in range(0, len(text), DIGITS)] for text in (digests, equation_digests(program))
    )
    nodes = program.graph.nodes
    at = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    if at < len(nodes):
        outputs = ", ".join(str(program.graph.values[v]) for v in nodes[at].outputs)
        line = f" at {nodes[at].source}" if nodes[at].source else ""
        return f"The first equation that differs is number {at}, here `{nodes[at].primitive}` -> {outputs}{line}. "
    if at < len(there):
        return f"The first {at} equations agree; the plan's function had {len(there) - at} more. "
    return "Their equations agree; what differs is their arguments, their results or what is differentiated. "
