"""Mirror counts by name: named values are saved or recomputed as the user says, whatever the planner."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jaxprs import equations

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.chain import Run
from jaxsub.core.decisions import Segment
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.jaxpr.trace import trace
from jaxsub.planners import names
from jaxsub.search.name_overrides import Overrides, overridden, read_overrides

LAYERS = 6


def loss(params, x):
    """Layers that widen and narrow, both values named."""
    for up, down in params:
        wide = checkpoint_name(jnp.tanh(x @ up), "wide")
        x = checkpoint_name(x + jnp.sin(wide @ down), "narrow")
    return jnp.mean(x**2)


@functools.cache
def arguments() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    params = [(jax.random.normal(a, (8, 24)) / 3, jax.random.normal(b, (24, 8)) / 5)
              for a, b in zip(keys[::2], keys[1::2], strict=True)]  # fmt: skip
    return params, jnp.linspace(-1, 1, 32 * 8).reshape(32, 8)


@functools.cache
def plain_gradient() -> Any:
    """What every plan has to give."""
    return jax.jit(jax.grad(loss))(*arguments())


def executions(f: Any, name: str) -> int:
    """How often values of a name are made in the gradient of a function, forward and backward."""
    jaxpr = jax.make_jaxpr(jax.grad(f))(*arguments())
    return sum(eqn.primitive.name == "name" and eqn.params["name"] == name for eqn in equations(jaxpr))


by_remat2 = pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False),
    reason="jax_remat3 leaves names out of recomputation: nothing to count",
)


class Halves:
    """A planner of one's own: two regions and the last stage."""

    def __call__(self, chain, budget_bytes):
        """Plan a chain."""
        n = len(chain.stages)
        runs = [chain.nest(0, n // 2), chain.nest(n // 2, n - 1), Run(n - 1, n)]
        return plan_from_runs(chain, runs, budget=Budget(budget_bytes), planner="halves")


PLANNERS = [*names(), "recursive(1)", "revolve(2)", Halves()]


@by_remat2
@pytest.mark.parametrize("planner", PLANNERS, ids=lambda p: p if isinstance(p, str) else type(p).__name__)
@pytest.mark.parametrize(
    "counts", [{"wide": 0}, {"wide": 1}, {"narrow": 0, "wide": 2}, {"wide": 0, "narrow": 0}], ids=str
)
def test_every_planner_follows_overrides(planner, counts):
    """Values to save are made once, values to recompute are recomputed, and gradients do not change."""
    f = jaxsub.sublinear(loss, planner=planner, mirror=counts, verify=False, cache=False)
    for name, count in counts.items():
        made = executions(f, name)
        assert made == LAYERS if count == 0 else made >= 2 * LAYERS
    chex.assert_trees_all_close(jax.jit(jax.grad(f))(*arguments()), plain_gradient(), rtol=1e-5, atol=1e-6)


@by_remat2
@pytest.mark.parametrize("planner", ["recursive(1)", "optimal"])
def test_without_overrides_planners_do_otherwise(planner):
    """The check can fail: left alone, planners recompute the values."""
    assert executions(jaxsub.sublinear(loss, planner=planner, verify=False, cache=False), "wide") > LAYERS


@by_remat2
def test_overrides_are_measured_with_the_plan():
    """With a budget the plan that keeps the override is compiled and fits; with all memory the override still holds."""
    for budget in (0.6, 1.0):
        f = jaxsub.sublinear(loss, budget=budget, mirror={"wide": 1}, cache=False)
        plan = f.plan(*arguments())
        assert plan.measurement.temp_bytes <= budget * plan.plain_measurement.temp_bytes
        assert executions(f, "wide") >= 2 * LAYERS


def test_unknown_names_are_refused_in_words():
    """A name that no value bears is refused with those that there are; one inside a loop is told apart."""
    words = r"names 'wild', and no value of the function has that name: there are 'narrow', 'wide'\. Name values with"
    with pytest.raises(ValueError, match=words):
        jaxsub.plan(loss, *arguments(), mirror={"wild": 1})

    def looped(w):
        return lax.scan(lambda x, _: (checkpoint_name(jnp.tanh(x @ w), "h"), None), w, None, length=3)[0].sum()

    with pytest.raises(ValueError, match=r"it names none\. 'h' is inside a loop"):
        jaxsub.plan(looped, jnp.eye(2), mirror={"h": 0})


@pytest.mark.parametrize("count", [-1, 0.5, True, "save"])
def test_counts_that_are_none_are_refused(count):
    """A count is a whole number of at least 0."""
    with pytest.raises(ValueError, match=r"integers of at least 0, got 'wide': "):
        jaxsub.plan(loss, *arguments(), mirror={"wide": count})


def test_what_runs_once_is_not_recomputed():
    """An override that would recompute a side effect is refused, with the effect's line."""

    def told(w, x):
        y = checkpoint_name(jnp.tanh(x @ w), "y")
        io_callback(lambda v: None, None, y[0, 0])
        return jnp.sum(jnp.sin(y @ w))

    with pytest.raises(UnsupportedError, match=r"recomputes `y`.*`io_callback` at .*test_name_overrides.py"):
        jaxsub.plan(told, jnp.eye(4), jnp.ones((3, 4)), mirror={"y": 1}, verify=False)


def test_changes_are_small():
    """By hand: a saved value joins its region, or ends it where it holds others; a merged region keeps the rest."""
    program = trace(loss, arguments(), {})
    wide, narrow = (read_overrides(program, {name: 0}).saved for name in ("wide", "narrow"))
    made, n = program.graph.values[wide[0]].producer, len(program.eqns)

    def segments(plan: Plan, overrides: Overrides) -> tuple[Segment, ...]:
        return overridden(program, plan, overrides).segments

    flat = Plan(program.fingerprint, Budget(), n, (Segment(0, 10),))
    assert segments(flat, Overrides(saved=wide[:1])) == (Segment(0, 10, wide[:1]),)
    assert segments(flat, Overrides(saved=wide[-1:])) == flat.segments
    nested = flat.replace(segments=(Segment(0, 10, (), (Segment(0, 8),)),))
    first, second = segments(nested, Overrides(saved=wide[:1]))
    assert (first, second) == (
        Segment(0, made + 1, (), (Segment(0, made + 1),)),
        Segment(made + 1, 10, (), (Segment(made + 1, 8),)),
    )
    saving = flat.replace(segments=(Segment(0, 10, (*wide[:1], *narrow[:1])),))
    assert segments(saving, Overrides(recomputed=wide[:1])) == (Segment(0, 10, narrow[:1]),)
    assert overridden(program, saving, Overrides(saved=wide[:1])) is saving
