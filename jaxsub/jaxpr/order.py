"""Match a program to a plan that was made for another order of its equations.

A library that iterates over a `set` traces one model in a different order in every process (Python salts the hashes of
strings). Such programs are equal, but a plan, which names equations by index, belongs to one of them. The digest of an
equation here contains the digests of its operands instead of their indices: it is the same in any order. So is
`unordered_fingerprint`, by which plans are looked up; `ordered_as` then puts the equations into the order of the plan.
Equations with effects keep their order among each other.

It does not undo another order of the arrays that a function closes over, or of equations in the body of a loop.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from typing import Any

from jaxsub.core.plan import DIGITS, Plan
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program

ABOVE = 4
"""Digits of an equation that do not depend on its readers: they find the first equation that differs."""

_NUMBER = re.compile(r"%\w+(:\d+)?(#\d+)?|(?<=\w)_\d+\b")
"""Names of results, and numbers of functions, in JAX's lowered text."""


def digests_of(program: Program) -> list[tuple[bytes, bytes]]:
    """Digest each equation with all that it depends on, and a second time with all that depends on it.

    The second digest tells apart equal equations with different readers, so that a plan names one of them.
    """
    known: dict[Any, bytes] = {v: b"input %d" % i for i, v in enumerate(program.invars)}
    made, n_effects = [], 0
    for eqn, signature in zip(program.eqns, program.signatures, strict=True):
        n_effects += bool(eqn.effects)
        made.append(_digest(signature, b"%d" % n_effects if eqn.effects else b"", *(known[v] for v in _read(eqn))))
        known.update((v, made[-1] + b"%d" % i) for i, v in enumerate(eqn.outvars))
    readers: dict[Any, list[bytes]] = defaultdict(list)
    for i, a in enumerate(program.outvars):
        if compat.is_var(a):
            readers[a].append(b"output %d" % i)
    found = []
    for eqn, above in zip(reversed(program.eqns), reversed(made), strict=True):
        found.append(_digest(above, *(b"%d" % i + reader for i, v in enumerate(eqn.outvars)
                                      for reader in sorted(readers[v]))))  # fmt: skip
        for i, v in enumerate(_read(eqn)):
            readers[v].append(found[-1] + b"%d" % i)
    return list(zip(made, found[::-1], strict=True))


def _read(eqn: Any) -> list[Any]:
    return [a for a in eqn.invars if compat.is_var(a)]


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"|".join(parts), digest_size=16).digest()


def unordered_fingerprint(program: Program) -> str:
    """Make a fingerprint that does not depend on the order of equations.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxsub.jaxpr.trace import trace
        >>> def waves(x, is_turned):
        ...     first, second = (f(x) for f in ((jnp.cos, jnp.sin) if is_turned else (jnp.sin, jnp.cos)))
        ...     return second / first if is_turned else first / second
        >>> one, other = (trace(lambda x: waves(x, is_turned), (1.0,), {}) for is_turned in (False, True))
        >>> one.fingerprint == other.fingerprint, unordered_fingerprint(one) == unordered_fingerprint(other)
        (False, True)
    """
    inputs = {v: i for i, v in enumerate(program.invars)}
    outputs = [inputs.get(a) if compat.is_var(a) else str(a) for a in program.outvars]
    rest = ([str(a) for a in program.avals()], outputs, program.differentiated, program.loss)
    return hashlib.sha256(repr((sorted(digests_of(program)), rest)).encode()).hexdigest()[:24]


def equation_digests(program: Program) -> str:
    """Make `DIGITS` hexadecimal digits for each equation: `ABOVE` of its first digest, the rest of its second."""
    return "".join(above.hex()[:ABOVE] + whole.hex()[: DIGITS - ABOVE] for above, whole in digests_of(program))


def ordered_as(program: Program, plan: Plan) -> Program:
    """Put a program's equations into the order that a plan was made for; return it unchanged if there is none."""
    if plan.fingerprint == program.fingerprint or len(plan.equations) != DIGITS * len(program.eqns):
        return program
    places: dict[str, list[int]] = defaultdict(list)
    for i, digest in enumerate(_split(equation_digests(program))):
        places[digest].append(i)
    order = [places[digest].pop(0) if places[digest] else -1 for digest in _split(plan.equations)]
    if -1 in order:
        return program
    eqns, made = [program.eqns[i] for i in order], set(program.invars)
    for eqn in eqns:
        if not made.issuperset(_read(eqn)):
            return program
        made.update(eqn.outvars)
    found = program.with_eqns(eqns)
    return found if found.fingerprint == plan.fingerprint else program


def unordered_digest(text: str) -> str:
    r"""Digest the lines of a lowered program, without their order and without numbers that depend on it.

    Example:
        >>> unordered_digest("%0 = sine %a\n%1 = cosine %a") == unordered_digest("%0 = cosine %a\n%1 = sine %a")
        True
    """
    lines = sorted(_NUMBER.sub("", text).splitlines())
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def first_difference(program: Program, digests: str) -> str:
    """Say which equation of a program is the first that differs from `digests`; empty if there are none."""
    if not digests:
        return ""
    there, here, nodes = _split(digests), _split(equation_digests(program)), program.graph.nodes
    at = next(
        (i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a[:ABOVE] != b[:ABOVE]),
        min(len(there), len(here)),
    )
    if at < len(nodes):
        outputs = ", ".join(str(program.graph.values[v]) for v in nodes[at].outputs)
        line = f" at {nodes[at].source}" if nodes[at].source else ""
        return f"The first equation that differs is number {at}, here `{nodes[at].primitive}` -> {outputs}{line}. "
    if at < len(there):
        return f"The first {at} equations agree; the plan's function had {len(there) - at} more. "
    return "Their equations agree; what differs is their arguments, their results or what is differentiated. "


def _split(digests: str) -> list[str]:
    return [digests[i : i + DIGITS] for i in range(0, len(digests), DIGITS)]
