"""A step that was compiled under plans of its functions, and what these cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxsub.core.decisions import Form
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.slice_time import has_slow_convolutions
from jaxsub.emission.forms import program_in
from jaxsub.search.call_sites import CallSite, Trial
from jaxsub.search.fewest_slices import cost_of
from jaxsub.step.fused_update import Findings


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """A step that was compiled.

    Attributes:
        trial: Its plans, and the functions that were found in it.
        measurement: What the compiler allocates for it.
        run: What can be called: the step under `jax.jit`.
        digest: A digest of what was compiled.
        updates: Which updates run inside the backward scans.
    """

    trial: Trial
    measurement: Measurement
    run: Any
    digest: str = ""
    updates: Findings = field(default_factory=Findings)

    @property
    def plans(self) -> dict[str, Plan]:
        """Each function's plan, by fingerprint."""
        return {key: self.trial.plans.get(key, site.own) for key, site in self.trial.sites.items()}

    @property
    def cost(self) -> tuple[bool, float]:
        """Whether runs in slices of its functions are slow, and what these recompute in FLOPs."""
        return cost_of_step(self.plans, self.trial)

    @property
    def extra_flops(self) -> float:
        """What its functions recompute in FLOPs."""
        return self.cost[1]

    @property
    def is_slow(self) -> bool:
        """Whether runs in slices of its functions are slow."""
        return self.cost[0]

    @property
    def is_heavy(self) -> bool:
        """Whether so much is recomputed that plans which need less may recompute less too."""
        return self.extra_flops > TUNING.heavy_recompute * forward_flops(self.plans)


def cost_of_step(plans: Mapping[str, Plan], trial: Trial) -> tuple[bool, float]:
    """What the functions of a step cost under plans.

    Returns:
        Whether runs in slices are slow; the FLOPs that are recomputed, in the functions' own regions too, and the time
        in which slices move weights, as FLOPs.
    """
    programs = {key: program_in(trial.sites[key].program, plan) for key, plan in plans.items() if plan.slices}
    is_any_slow = any(
        has_slow_convolutions(program, trial.target, plans[key].slices) for key, program in programs.items()
    )
    return is_any_slow, sum(extra_flops(plan, trial.sites[key]) * trial.calls[key] for key, plan in plans.items())


def extra_flops(plan: Plan, site: CallSite) -> float:
    """What one call of a function recomputes under a plan, in FLOPs."""
    kept = site.added_flops(Form(plan.opened_regions))
    flops = plan.prediction.forward_flops if plan.prediction else sum(n.flops for n in site.program.graph.nodes)
    return kept + cost_of(plan) * max(flops, 1.0)


def forward_flops(plans: Mapping[str, Plan]) -> float:
    """FLOPs of the forward passes of functions under plans."""
    return sum(p.prediction.forward_flops for p in plans.values() if p.prediction is not None)
