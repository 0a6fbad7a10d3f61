"""Plans of a step, kept for another process or call: those that fit so many bytes, and those that need least.

Keys hold a digest of what the step is lowered to with every function under its own plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from jaxsub.core.disk_cache import Store, code_digest, key_of
from jaxsub.jaxpr.identity import of_jax
from jaxsub.search.plan_cache import find_plan, of_leasts, put_plan
from jaxsub.step.attempt import Attempt
from jaxsub.step.sizing import Sizing

LEAST = "least"


def keep(store: Store, sizing: Sizing, n_bytes: int, found: Attempt) -> None:
    """Keep the plans with which a step fits so many bytes."""
    _put(store, sizing, str(n_bytes), found)


def keep_least(store: Store, sizing: Sizing, least: Attempt) -> None:
    """Keep the plans with which a step needs least: where just that is asked for they are found without a search."""
    for asked in (LEAST, str(least.measurement.step_bytes)):
        _put(of_leasts(store), sizing, asked, least)


def find(store: Store, sizing: Sizing, n_bytes: int) -> Attempt | None:
    """The step under the plans that were kept for so many bytes."""
    return _find((store, of_leasts(store)), sizing, str(n_bytes), n_bytes)


def find_least(store: Store, sizing: Sizing, n_bytes: int) -> Attempt | None:
    """The step under the plans with which it needs least of all that was found, if that fits so many bytes."""
    return _find((of_leasts(store),), sizing, LEAST, n_bytes)


def _put(store: Store, sizing: Sizing, asked: str, found: Attempt) -> None:
    for fingerprint, plan in found.plans.items():
        put_plan(store, _key(sizing, asked, fingerprint), plan)


def _find(stores: Sequence[Store], sizing: Sizing, asked: str, n_bytes: int) -> Attempt | None:
    for store in stores:
        sites = sizing.first.trial.sites
        plans = {key: find_plan(store, _key(sizing, asked, key), site.program) for key, site in sites.items()}
        known = {key: plan for key, plan in plans.items() if plan is not None}
        if known and len(known) == len(plans):
            attempt = sizing.attempt(known)
            return attempt if attempt.measurement.step_bytes <= n_bytes else None
    return None


def _key(sizing: Sizing, asked: str, fingerprint: str) -> str:
    target, settings = sizing.target, sizing.first.trial.sites[fingerprint].settings
    how = repr(attrgetter("planner", "verify", "profile", "budget")(settings))
    return key_of("step's plan", code_digest(), of_jax(), target.name, target.spec or "", sizing.first.digest, asked,
                  fingerprint, how)  # fmt: skip
