"""`doctor`: run every check on a loss or a step, and rank what was found.

A check is a function from a `Subject` to findings. Those of `traced` read the traced program; those of `compared`
compile it with one thing changed. What a fault costs less than 1 % of is not told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxsub.devices.targets import get_target
from jaxsub.diagnosis import compared, traced
from jaxsub.diagnosis.findings import Diagnosis, Finding, ranked
from jaxsub.diagnosis.subject import Subject, subject_of
from jaxsub.jaxpr.arguments import AnyArgnums, refuse_collisions
from jaxsub.jaxpr.trace import aval_bytes

LEAST_SHARE = 0.01
"""A fault that costs less than this share of the program's memory is left out."""

LEAST_GAIN = 0.1
"""A plan recomputes: one that saves less than this share of the program's memory is no finding."""

ONLY_LOSS = (
    "checkpoints, rules of custom_vjp and what a plan would save: they are gone from a step, which has its gradients "
    "already. Pass the loss itself, jaxsub.doctor(loss, ...)."
)
ONLY_COMPILED = "checkpoints, donation, whole gradients and what a plan would save: verify=False compiles nothing."


def doctor(fun: Callable[..., Any], /, *args: Any, target: Any = None, argnums: AnyArgnums = None,
           verify: bool = True, cache: Any = True, **kwargs: Any) -> Diagnosis:  # fmt: skip
    """Say what is wrong with the memory of a loss or a step, what mending it saves, and how to.

    Found are `jax.checkpoint` regions that save nothing and offloads that move nothing; arguments that could be
    donated; scans that return their input; float32 copies of narrower residuals; residuals that a `custom_vjp` hides;
    arrays that repeat something smaller; logits and gradients that are live whole; and what a plan would save.

    Args:
        fun: A loss, plain or under `jax.jit`: its gradient is looked at. Or a step as you compile it, under `jax.jit`
            with its donations or under `jaxsub.jit`: any function whose result is no scalar, alone or first of a pair.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`s; nothing is run.
        target: The device to compile for, such as `"h100"`; `None` for the one in use.
        argnums: The arguments a loss's gradient is taken of, as for `jaxsub.sublinear`; given, `fun` is a loss.
        verify: Whether to compile. `False`: only what the traced program shows is told, in bytes of its arrays.
        cache: Where plans and prices are kept, as for `jaxsub.sublinear`.
        **kwargs: Its keyword arguments.

    Returns:
        The findings, those first that cost most; print them. A fault of less than 1 % of the program's memory is left
        out, and so is a plan that saves less than 10 %.

    Raises:
        UnsupportedError: If a loss has nothing to differentiate, or the compiler does not say what it allocates.

    Example:
        >>> import jax, jax.numpy as jnp, jaxsub
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = jax.checkpoint(jnp.tanh, policy=jax.checkpoint_policies.everything_saveable)(x @ w)
        ...     return (x**2).mean()
        >>> found = jaxsub.doctor(loss, [jnp.eye(8)] * 6, jnp.ones((512, 8)))
        >>> [finding.fix for finding in found.findings if finding.kind == "checkpoint saves nothing"]
        ['remove it.']
    """
    refuse_collisions(doctor, locals())
    subject = subject_of(fun, args, kwargs, argnums, get_target(target))
    checks: list[Any] = [traced.opaque_residuals, traced.echoes, traced.wide_copies, traced.broadcasts, traced.logits]
    if verify:
        checks += [compared.regions, compared.donations, compared.whole_gradients]
    found = ranked(finding for check in checks for finding in check(subject))
    whole = subject.measurement.step_bytes if verify else sum(map(aval_bytes, subject.shapes))
    findings = [f for f in found if f.n_bytes >= LEAST_SHARE * whole or _is_void(f)]
    if verify:
        findings += [f for f in compared.plan(subject, cache=cache) if f.n_bytes >= LEAST_GAIN * whole]
    return Diagnosis(
        is_step=subject.program is None,
        findings=tuple(sorted(findings, key=lambda f: -f.n_bytes)),
        measurement=subject.measurement if verify else None,
        not_looked_at=tuple(_left_out(subject, verify)),
    )


def _is_void(finding: Finding) -> bool:
    """Whether something was written that has no effect: that is told whatever it costs."""
    return finding.kind in ("checkpoint saves nothing", "offload moves nothing")


def _left_out(subject: Subject, verify: bool) -> list[str]:
    left_out = [ONLY_LOSS] if subject.program is None else []
    return left_out + ([] if verify else [ONLY_COMPILED])
