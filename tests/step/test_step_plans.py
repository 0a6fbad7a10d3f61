"""Plans of steps as things: stored, loaded, compared, kept beside a checkpoint, refused on another step; and OOM."""

import json
import logging

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxsub
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.step_plan import StepPlan
from jaxsub.devices.targets import get_target
from jaxsub.step.device import device_bytes, explaining, out_of_memory

WIDTH, BATCH = 16, 512
OPTIMIZER = optax.adam(1e-2)


@jaxsub.sublinear
def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


@jaxsub.sublinear
def other_loss(ws, x):
    for w in ws:
        x = jnp.sin(x @ w)
    return (x**2).mean()


def step_of(loss):
    def step(state, x):
        ws, moments = state
        value, gradients = jax.value_and_grad(loss)(ws, x)
        updates, moments = OPTIMIZER.update(gradients, moments, ws)
        return (optax.apply_updates(ws, updates), moments), value

    return step


def state(layers=8):
    ws = [jnp.eye(WIDTH) for _ in range(layers)]
    return ws, OPTIMIZER.init(ws)


X = jnp.ones((BATCH, WIDTH))
MADE = jaxsub.jit(step_of(loss), memory=0.7, progress=False, donate_argnums=0)


@pytest.fixture(scope="module")
def plan():
    return MADE.plan(state(), X)


def given(plan, loss=loss, **options):
    return jaxsub.jit(step_of(loss), plan=plan, progress=False, donate_argnums=0, **options)


def test_a_plan_is_stored_and_given_back(plan, tmp_path, monkeypatch):
    """What was saved is loaded equal, and the step that is given it searches nothing and takes what was planned."""
    plan.save(str(tmp_path / "plan.json"))
    assert StepPlan.load(str(tmp_path / "plan.json")) == plan
    monkeypatch.setattr("jaxsub.step.sizing.Sizing.run", None)
    step = given(tmp_path / "plan.json")
    assert not step.plan(state(), X).diff(plan)
    assert plan.plans[plan.sites[0].plan.fingerprint].segments
    taken = step.lower(state(), X).compile().memory_analysis()
    assert taken.temp_size_in_bytes == plan.measurement.temp_bytes
    chex.assert_trees_all_close(step(state(), X), jax.jit(step_of(loss))(state(), X), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "layers", "told"),
    [(other_loss, 8, "`other_loss` is not among its functions, `loss`"), (loss, 9, "its arguments have other paths")],
)
def test_a_plan_is_refused_on_another_step(plan, loss, layers, told):
    """Another function or other arguments: the error says what differs, and how to make a new plan."""
    with pytest.raises(jaxsub.PlanMismatchError, match=f"another step: {told}.*jaxsub.jit") as caught:
        given(plan, loss)(state(layers), X)
    assert caught.value.plan_fingerprint != caught.value.function_fingerprint


def test_of_a_changed_function_the_first_difference_is_named(plan):
    """A function of the same name: the first equation that differs is named, with its line."""

    def changed(ws, x):
        for w in ws:
            x = jnp.sin(x @ w)
        return (x**2).mean()

    changed.__name__ = "loss"
    with pytest.raises(
        jaxsub.PlanMismatchError, match=r"`loss` is not the one.*number 1, here `sin`.*test_step_plans.py"
    ):
        given(plan, jaxsub.sublinear(changed))(state(), X)


def test_a_plan_that_no_longer_fits_is_refused(plan):
    """Under the plan a step may take no more than the memory: what is measured is told, and nothing is planned."""
    with pytest.raises(jaxsub.VerificationError, match=r"Under the plan the step takes .* and may take") as caught:
        given(plan, memory=plan.measurement.step_bytes - 1)(state(), X)
    assert caught.value.measurement.step_bytes == plan.measurement.step_bytes


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("memory_bytes", 1, "memory_bytes: 1 is less than the step takes"),
        ("sites", [], ""),
        ("arguments", 3, "Expected `str`, got `int`"),
        ("jaxsub_step_plan", 9, "this is no jaxsub step plan of version 4"),
    ],
)
def test_a_damaged_plan_says_which_field_is_wrong(plan, field, value, told):
    """What cannot be is refused when it is read; a plan of no function is one."""
    text = json.dumps(json.loads(plan.to_json()) | {field: value})
    if not told:
        assert StepPlan.from_json(text).sites == ()
    else:
        with pytest.raises(ValueError, match=told):
            StepPlan.from_json(text)


def test_plans_of_steps_are_compared(plan):
    """`diff` names the figures and functions in which two plans differ, and is false of a plan and itself."""
    roomy = jaxsub.jit(step_of(loss), memory=1.0, progress=False, donate_argnums=0).plan(state(), X)
    found = plan.diff(roomy)
    assert not plan.diff(plan)
    assert str(plan.diff(plan)) == "The plans decide the same."
    assert found.is_same_program
    assert {"memory_bytes", "step_bytes"} <= {row.name for row in found.rows}
    (name, part) = found.parts[0]
    assert (name, part.recomputed[1]) == ("loss", ())
    assert part.recomputed[0]
    assert "recomputed by this alone" in str(found).replace("  ", " ")


def test_plans_of_functions_are_compared():
    """Which values only one saves is said in bytes; plans of different programs are said to be such."""
    ws = state()[0]
    tight, roomy = (jaxsub.plan(loss.fun, ws, X, budget=b, progress=False, chunks=False) for b in (0.6, 0.8))
    found = tight.diff(roomy)
    measured = next(row for row in found.rows if row.name == "measured_bytes")
    assert (measured.this, measured.other) == (tight.measurement.temp_bytes, roomy.measurement.temp_bytes)
    assert found.recomputed[0]
    assert found.saved == (("1 x 32.0 KiB  " + tight.holdings[0].label,), ())
    assert "32.0 KiB" in str(found)
    assert not tight.diff(jaxsub.plan(other_loss.fun, ws, X, verify=False)).is_same_program


def test_plans_of_steps_and_their_differences_are_cards(plan):
    """HTML names every figure that differs, and every function with its plan."""
    roomy = jaxsub.jit(step_of(loss), memory=1.0, progress=False, donate_argnums=0).plan(state(), X)
    found = plan.diff(roomy)
    card = found._repr_html_()
    assert all(word in card for row in (*found.rows, *found.parts[0][1].rows) for word in row.words)
    assert "regions, " in plan._repr_html_()
    assert found.to_html().startswith("<!DOCTYPE html>")
    assert "decide the same" in plan.diff(plan)._repr_html_()


def test_a_plan_is_kept_beside_a_checkpoint(plan, tmp_path):
    """Orbax keeps a plan as JSON in the same step as the state; what is restored is the plan."""
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.CheckpointManager(tmp_path) as manager:
        kept = ocp.args.Composite(
            state=ocp.args.StandardSave(state()), plan=ocp.args.JsonSave(json.loads(plan.to_json()))
        )
        manager.save(0, args=kept)
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.Composite(plan=ocp.args.JsonRestore()))
    assert StepPlan.from_json(json.dumps(restored["plan"])) == plan


def test_metrics_are_scalars(plan):
    """Figures by name, all floats: the step's own, and those of each function under its name."""
    found = plan.metrics()
    assert found["jaxsub/step_bytes"] == plan.measurement.step_bytes
    assert found["jaxsub/loss/recomputed_share"] > 0
    assert {type(x) for x in found.values()} == {float}


def test_one_line_is_logged_for_a_step(caplog):
    """`INFO`: one line a decision, of the function or the step, and none for a call that finds it ready."""
    with caplog.at_level(logging.INFO, "jaxsub"):
        step = jaxsub.jit(step_of(loss), memory=0.8, donate_argnums=0)
        for _ in range(2):
            step.report(state(), X)
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxsub"]
    assert len(lines) == 1
    assert lines[0].startswith("planned the step: ")


def test_a_cleared_step_compiles_anew():
    """`clear_cache` forgets what was compiled in this process; the next call prepares the step again."""
    step = jaxsub.jit(step_of(loss), memory=0.7, progress=False, donate_argnums=0)
    first = step.report(state(), X)
    step.clear_cache()
    assert not step._ready
    assert step.report(state(), X) is not first


def test_a_cpu_has_what_the_targets_list():
    """memory="device" on a CPU is what `jaxsub targets` says it has."""
    step = jaxsub.jit(step_of(loss), memory="device", progress=False, donate_argnums=0)
    assert step.report(state(), X).memory_bytes == get_target("cpu").memory_bytes == device_bytes(get_target(None))


def test_a_device_without_room_says_what_was_planned_and_what_to_try():
    """The runtime's own RESOURCE_EXHAUSTED, of an output larger than any address space: raised once, explained."""
    calls = []

    def too_large(x):
        calls.append(1)
        return jnp.broadcast_to(x, (2**45,))

    step = jaxsub.jit(too_large, memory=2**50, progress=False)
    with pytest.raises(
        jaxsub.OutOfMemoryError, match=r"planned to take .* The device said: .* Try jaxsub.jit"
    ) as caught:
        step(jnp.float32(1))
    error, traced = caught.value, len(calls)
    assert isinstance(error, jax.errors.JaxRuntimeError)
    assert "RESOURCE_EXHAUSTED" in str(error.__cause__)
    assert error.refused_bytes == 4 * 2**45
    assert error.try_bytes < error.planned_bytes == step.report(jnp.float32(1)).step_bytes
    assert "Nothing was retried" in str(error)
    assert len(calls) == traced


STEP = Measurement(600, 300, 100, 0, None, 1.0, "h100")
SAID = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 600 bytes.\nmore"


@pytest.mark.parametrize(
    ("stats", "budget", "told"),
    [
        ({"bytes_limit": 1000, "bytes_in_use": 450}, 850, "Other arrays hold 150 B of the 1000 B it has."),
        (
            {"bytes_limit": 2000, "bytes_in_use": 300, "largest_free_block_bytes": 500},
            900,
            "Its free memory is in pieces: the largest is 500 B.",
        ),
        ({}, 900, "The device said: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 600 bytes"),
    ],
)
def test_the_budget_to_try_follows_from_what_the_device_says(stats, budget, told):
    """Room that others leave; else the block that was refused less the largest there is; else a tenth less."""
    error = out_of_memory(STEP, 1000, SAID, stats)
    assert (error.try_bytes, error.refused_bytes) == (budget, 600)
    assert told in str(error)


def test_other_errors_of_the_runtime_are_left_alone():
    """Only a refused allocation is explained."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught, explaining(STEP, 1000, dict):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
    assert type(caught.value) is jax.errors.JaxRuntimeError


def test_a_plan_of_a_function_is_no_plan_of_a_step():
    """Each kind of plan says what the other is not."""
    with pytest.raises(ValueError, match="this is a jaxsub plan, and no jaxsub step plan"):
        StepPlan.from_json(Plan("f", jaxsub.Budget(), 2).to_json())


def test_a_plan_of_the_other_kind_is_refused_as_it_is_from_a_file(plan):
    """So it is where a plan is given, and where two are compared."""
    single = Plan("f", jaxsub.Budget(), 2)
    for use in (lambda: jaxsub.jit(step_of(loss), plan=single), lambda: plan.diff(single)):
        with pytest.raises(TypeError, match="this is a jaxsub plan, and no jaxsub step plan; make a new one with"):
            use()
    for use in (lambda: jaxsub.sublinear(loss.fun, plan=plan), lambda: single.diff(plan)):
        with pytest.raises(TypeError, match="this is a jaxsub step plan, and no jaxsub plan; make a new one with"):
            use()
