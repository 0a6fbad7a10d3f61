"""Finished plans on disk, by all that decides them: found by another process without tracing or compiling a stage.

In goes a traced program and what was asked for; out comes the plan that was made for that before, or nothing. The key
holds the program's fingerprint, the budget, the planner and its settings, the target, the versions of JAX, and a digest
of this package's own code: what is found is what planning anew would find. A planner of the user's own is asked each
time: nobody knows what it depends on. Source lines are no part of a fingerprint: labels are made anew. Plans are kept
as JSON, compressed.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

from jaxsub.core.disk_cache import Store, code_digest, key_of
from jaxsub.core.plan import Plan
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program
from jaxsub.planners import Planner
from jaxsub.search.verify import finish


def shelf_key(program: Program, planner: Planner, target: Target, asked: str) -> str | None:
    """The key of a plan, or `None` where the planner is not one of this package's; `asked` is what else was asked."""
    if not type(planner).__module__.startswith("jaxsub.planners."):
        return None
    is_mapped = str(compat.names_axes(program.traced))
    return key_of("made", code_digest(), compat.remat_flavour(), target.name, target.spec or "", program.fingerprint,
                  repr(planner), is_mapped, asked)  # fmt: skip


def put_plan(store: Store, key: str, plan: Plan) -> None:
    """Keep a plan."""
    store.put(key, base64.b64encode(zlib.compress(plan.to_json().encode())).decode())


def find_plan(store: Store, key: str, program: Program) -> Plan | None:
    """The plan that was kept under a key, its parts named as the program names them now; `None` where there is none."""
    plan = _read(store.get(key))
    if plan is None or plan.fingerprint != program.fingerprint or plan.n_nodes != len(program.eqns):
        return None
    return finish(program, plan, plan.budget)


def _read(text: Any) -> Plan | None:
    """A plan from what a store holds; what is damaged is as good as nothing."""
    if not isinstance(text, str):
        return None
    try:
        return Plan.from_json(zlib.decompress(base64.b64decode(text)).decode())
    except (binascii.Error, zlib.error, ValueError, TypeError, KeyError):
        return None
