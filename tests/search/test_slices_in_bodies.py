"""Runs in slices inside the bodies of loops and the branches of conditionals: what one step needs at once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsub
from jaxsub.core.plan import Plan

LAYERS, ROWS, WIDTH = 4, 512, 16
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)
QUERIES = jnp.asarray(RNG.normal(size=(LAYERS, 3, WIDTH, WIDTH)) / 4, jnp.float32)
HIDDEN = [jnp.asarray(RNG.normal(size=(LAYERS, *s)) / s[0] ** 0.5, jnp.float32) for s in ((WIDTH, 2048), (2048, WIDTH))]


def attend(w, x):
    """A step whose scores are far larger than what goes in and out."""
    q, k, v = x @ w[0], x @ w[1], x @ w[2]
    scores = jnp.where(jnp.tril(jnp.ones((len(x), len(x)), bool)), q @ k.T / 4, -1e9)
    return x + jax.nn.softmax(scores) @ v


def expand(w, x):
    """A step whose hidden layer is far wider than what goes in and out."""
    return x + jax.nn.gelu(x @ w[0]) @ w[1]


def scanned(step):
    def loss(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (step(w, x), None), x, ws)[0] ** 2)

    return loss


def branched(ws, x):
    """A conditional with a wide branch of several products."""
    first = jax.tree.map(lambda w: w[0], ws)

    def twice(x):
        return expand(first, jnp.tanh(expand(first, x)))

    return jnp.mean(jax.lax.cond(x[0, 0] > -9, twice, lambda x: x * 2, x) ** 2)


PROGRAMS = {"scores": (scanned(attend), QUERIES), "hidden": (scanned(expand), HIDDEN), "branch": (branched, HIDDEN)}


def step_recomputed(step):
    """What one gets by hand: each step a region."""
    return scanned(jax.checkpoint(step))


def agree(got, wanted, tolerance=3e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.abs(a - b).max() <= tolerance * max(1e-3, np.abs(b).max())


@pytest.mark.parametrize(("name", "step", "within"), [("scores", attend, ((0, 0),)), ("hidden", expand, ())])
def test_what_a_step_needs_is_no_floor(name, step, within):
    """A loop fits a third of what recomputing each of its steps needs, with the plain gradients to rounding.

    Where the whole function has an independent axis nothing is computed again, else what a step runs in slices is.
    """
    loss, ws = PROGRAMS[name]
    budget = jaxsub.measure(step_recomputed(step), ws, X).temp_bytes // 3
    smaller = jaxsub.sublinear(loss, budget=budget)
    plan = smaller.plan(ws, X)
    assert [run.within for run in plan.slices] == [within]
    assert jaxsub.measure(smaller, ws, X).temp_bytes <= budget
    agree(*(jax.jit(jax.value_and_grad(f))(ws, X) for f in (smaller, loss)))


def test_a_branch_in_slices():
    """A branch's wide layers run in slices where that alone meets the budget."""
    loss, ws = PROGRAMS["branch"]
    with pytest.raises(jaxsub.InfeasibleBudgetError):
        jaxsub.plan(loss, ws, X, budget="5MiB", chunks=False)
    smaller = jaxsub.sublinear(loss, budget="5MiB")
    assert {run.within[0][1] for run in smaller.plan(ws, X).slices} == {1}
    assert jaxsub.measure(smaller, ws, X).temp_bytes <= 5 * 2**20
    agree(*(jax.jit(jax.value_and_grad(f))(ws, X) for f in (smaller, loss)))


def named(ws, x):
    """A loop of steps, each in a named scope."""

    def step(x, w):
        with jax.named_scope("mine"):
            return expand(w, x), None

    return jnp.mean(jax.lax.scan(step, x, ws)[0] ** 2)


DERIVATIVES = {
    "tangents": lambda f, ws, x: jax.jvp(f, (ws, x), (ws, x)),
    "gradients of a batch": lambda f, ws, x: jax.vmap(jax.grad(f), (None, 0))(ws, jnp.stack([x, x + 1])),
    "second derivatives": lambda f, ws, x: jax.jvp(jax.grad(f), (ws, x), (ws, x)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_other_transforms_of_steps_in_slices(name):
    """A named scope in a loop's body runs in slices; all derivatives are the plain loop's."""
    ws, x = [w[:2, :16, :16] for w in HIDDEN], X[:12]
    smaller = jaxsub.sublinear(named, verify=False, chunks={"mine": 5})
    (run,) = smaller.plan(ws, x).slices
    assert (run.within, run.count, run.length) == (((0, 0),), 5, 12)
    agree(*(jax.jit(DERIVATIVES[name], static_argnums=0)(f, ws, x) for f in (smaller, named)), 1e-4)


def test_a_plan_with_slices_in_bodies_belongs_to_its_program(tmp_path):
    """Such a plan is saved, loaded and emitted again; one that names a body that is not there is refused."""
    ws, x = HIDDEN, X[:12]
    plan = jaxsub.plan(named, ws, x, verify=False, chunks={"mine": 3})
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    np.testing.assert_allclose(jaxsub.sublinear(named, plan=loaded)(ws, x), named(ws, x), rtol=1e-5)
    for within, words in (((0, 1),), "holds no body 1"), (((1, 0),), "holds no body 0"):
        wrong = plan.replace(slices=(replace(plan.slices[0], within=within),))
        with pytest.raises(jaxsub.PlanMismatchError, match=words):
            jaxsub.sublinear(named, plan=wrong)(ws, x)
