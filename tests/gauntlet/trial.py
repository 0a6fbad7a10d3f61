"""One program of the gauntlet in one process: planned, measured, compared with the plain function, stepped.

Two trials stand here, for two processes that share a plan cache. `first` plans the loss for a budget and the whole
train step for a device's memory, each refused at most once: then the least that the refusal names has to do. `again` is
given what `first` found and has only to read. Neither catches anything but a refusal: whatever else is raised ends the
process, and `run.py` reports it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxsub
from gauntlet import Built
from jaxsub.jaxpr.flops import jaxpr_flops

COMPILED = "/jax/core/compile/backend_compile_duration"
SMALL_SHARE = 1e-2
"""Arrays this much smaller than the largest of a tree are compared by its scale: gradients that are zero but for
rounding, as those of a bias before batch normalisation."""


@dataclass
class Cost:
    """What a piece of work took: processor seconds, and programs compiled, by name."""

    seconds: float = 0.0
    names: list[str] = field(default_factory=list)

    @property
    def compiles(self) -> int:
        """How many programs were compiled."""
        return len(self.names)


@contextmanager
def counted(beside: Iterable[str] = ()) -> Iterator[Cost]:
    """Count processor seconds and compiles, from an empty cache of traces; those `beside` ours, by name, do not count.

    Some libraries run operations while they are traced, and JAX compiles each of them.
    """
    cost, beside = Cost(), set(beside)

    def count(event: str, *_: Any, fun_name: str = "", **__: Any) -> None:
        if event == COMPILED and fun_name not in beside:
            cost.names.append(fun_name)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(count)
    start = time.process_time()
    try:
        yield cost
    finally:
        cost.seconds = time.process_time() - start
        jax.monitoring.unregister_event_duration_listener(count)


def gradient(built: Built, loss: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The value and gradient of a loss as a function of the arrays among its arguments, and those arrays."""
    leaves, tree = jax.tree.flatten(built.args)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

    def run(arrays: list[Any]) -> Any:
        whole = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            whole[place] = array
        return built.value_and_grad(loss, has_aux=built.has_aux)(*jax.tree.unflatten(tree, whole))

    return run, [leaves[i] for i in places]


def optax_step(built: Built, loss: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A train step with Adam; its epsilon is large, since a share of almost nothing is compared with the plain one."""
    optimizer = optax.adam(1e-3, eps=1e-3)

    def step(params: Any, opt_state: Any, *rest: Any) -> Any:
        value, grads = built.value_and_grad(loss, has_aux=built.has_aux)(params, *rest)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (built.args[0], optimizer.init(built.args[0]), *built.args[1:])


def step_of(built: Built, loss: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The program's own train step, or that of Optax, and its arguments."""
    return optax_step(built, loss) if built.make_step is None else built.make_step(loss)


def numbers(tree: Any) -> list[np.ndarray]:
    """The arrays of a tree; of keys the words they hold."""
    is_key = lambda x: hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    arrays = (np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree))
    return [a.astype(np.float64) if a.dtype.kind not in "biufc" else a for a in arrays]  # bfloat16


def difference(got: list[np.ndarray], wanted: list[np.ndarray], rtol: float) -> str | None:
    """What differs between two lists of arrays, or `None`.

    Integers have to be equal; others may differ by a share of the largest of their array.
    """
    if len(got) != len(wanted):
        return f"{len(got)} arrays, not {len(wanted)}"
    largest = max((np.abs(a).max(initial=0) for a in wanted if a.dtype.kind in "fc"), default=0)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"array {i} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        if b.dtype.kind not in "fc":
            if not np.array_equal(a, b):
                return f"array {i}, {b.dtype}{list(b.shape)}, is not equal"
            continue
        scale = max(np.abs(b).max(initial=0), SMALL_SHARE * largest)
        far = np.abs(a - b).max(initial=0)
        if not far <= rtol * scale:
            return f"array {i}, {b.dtype}{list(b.shape)}, is off by {far / scale:.1e} of its largest entry"
    return None


def refusable(ask: Callable[[int], Any], n_bytes: int) -> tuple[Any, int]:
    """What is planned for so many bytes, and 0; if that is refused, `None` and the least that the refusal names."""
    try:
        return ask(n_bytes), 0
    except jaxsub.InfeasibleBudgetError as refusal:
        return None, refusal.least_bytes


def within(ask: Callable[[int], Any], n_bytes: int) -> tuple[Any, int, bool]:
    """What is planned for so many bytes; if that is refused, for the least that the refusal names."""
    found, least = refusable(ask, n_bytes)
    return (ask(least), least, True) if least else (found, n_bytes, False)


def taken(compiled: Any) -> tuple[int, int]:
    """What a compiled step takes, and how much of it is temporary."""
    found = compiled.memory_analysis()
    fixed = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return fixed + found.temp_size_in_bytes, found.temp_size_in_bytes


def merged(parts: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """All figures so far, after each part of a trial; faults add up."""
    found: dict[str, Any] = {"faults": []}
    for part in parts:
        found = found | part | {"faults": found["faults"] + part["faults"]}
        yield found


def first(built: Built, share: float, folder: Path) -> Iterator[dict[str, Any]]:
    """Plan the loss for a share of what it takes, then its train step; what is wrong is listed under `faults`."""
    yield loss_trial(built, share, folder)
    yield step_trial(built, share, folder)


def loss_trial(built: Built, share: float, folder: Path) -> dict[str, Any]:
    """The loss alone: its budget on the compiler's word, its values and gradients against the plain function's."""
    plain, arrays = gradient(built, built.loss)
    with counted() as plain_cost:
        plain_compiled = jaxsub.jit(plain).lower(arrays).compile()
    need = jaxsub.measure(built.loss, *built.args).temp_bytes

    def ask(n_bytes: int) -> tuple[Any, jaxsub.Plan]:
        fun = jaxsub.sublinear(built.loss, budget=n_bytes, cache=folder / "cache", progress=False)
        return fun, fun.plan(*built.args)

    with counted() as cost:
        found, least = refusable(ask, budget := int(share * need))
    with counted() as least_cost:
        if least:
            found, budget = ask(least), least
    fun, plan = found
    plan.save(folder / "plan.json")
    measured = jaxsub.measure(fun, *built.args).temp_bytes
    run, _ = gradient(built, fun)
    far = difference(numbers(jaxsub.jit(run)(arrays)), numbers(plain_compiled(arrays)), built.rtol)
    faults = [f"loss takes {measured} bytes of {budget}"] if measured > budget else []
    plain_flops, flops = (jaxpr_flops(jax.make_jaxpr(f)(arrays)).arithmetic_flops for f in (plain, run))
    return {
        "plain_bytes": need,
        "budget_bytes": budget,
        "planned_bytes": measured,
        "loss_refused": bool(least),
        "flops": flops / plain_flops,
        "plain_seconds": plain_cost.seconds,
        "plan_seconds": cost.seconds,
        "least_seconds": least_cost.seconds,
        "compiles": cost.compiles,
        "faults": faults + ([f"wrong values: {far}"] if far else []),
    }


def planned_step(built: Built, memory: int, folder: Path) -> tuple[Any, tuple[Any, ...]]:
    """The train step of the planned loss in so many bytes, and its arguments."""
    loss = jaxsub.sublinear(built.loss, cache=folder / "cache", progress=False)
    step, args = step_of(built, loss)
    return jaxsub.jit(step, memory=memory, cache=folder / "cache", progress=False), args


def step_trial(built: Built, share: float, folder: Path) -> dict[str, Any]:
    """The whole step: what it takes on the compiler's word, and its results against the plain step's."""
    plain, args = step_of(built, built.loss)
    plain_compiled = jaxsub.jit(plain).lower(*args).compile()
    whole, temporary = taken(plain_compiled)
    wanted = numbers(plain_compiled(*args))

    def ask(n_bytes: int) -> Any:
        step, args = planned_step(built, n_bytes, folder)
        step.report(*args)
        return step

    with counted() as cost:
        step, memory, is_refused = within(ask, whole - int((1 - share) * temporary))
    compiled = step.lower(*args).compile()
    takes, _ = taken(compiled)
    far = difference(numbers(compiled(*args)), wanted, built.rtol)
    (folder / "wanted.pickle").write_bytes(pickle.dumps(wanted))
    return {
        "memory_bytes": memory,
        "step_bytes": takes,
        "step_refused": is_refused,
        "step_seconds": cost.seconds,
        "faults": ([f"step takes {takes} bytes of {memory}"] if takes > memory else [])
        + ([f"wrong step: {far}"] if far else []),
    }


def again(built: Built, found: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """The same in another process: plans are read and not made, and the step's results are the same."""
    plain, args = step_of(built, built.loss)
    with counted() as tracing:
        jax.jit(plain).trace(*args)
    fun = jaxsub.sublinear(built.loss, budget=found["budget_bytes"], cache=folder / "cache", progress=False)
    with counted(tracing.names) as plan_cost:
        plan = fun.plan(*built.args)
    same = plan == jaxsub.Plan.load(folder / "plan.json")
    faults = [] if same else ["second process: another plan"]
    yield {
        "faults": faults + ([f"second process: {plan_cost.compiles} compiles for a plan"] if plan_cost.compiles else [])
    }
    step, args = planned_step(built, found["memory_bytes"], folder)
    with counted(tracing.names) as cost:
        step.report(*args)
    faults = [f"second process: {cost.compiles} compiles to fit the step"] if cost.compiles else []
    far = difference(numbers(step(*args)), pickle.loads((folder / "wanted.pickle").read_bytes()), built.rtol)
    yield {
        "again_seconds": plan_cost.seconds + cost.seconds,
        "faults": faults + ([f"second process: wrong step: {far}"] if far else []),
    }
