"""Random programs under random plans: every derivative is the plain program's.

`tests/random_steps.py` makes the programs, `tests/random_programs.py` the plans. Most are interpreted, equation by
equation, which takes a fraction of a second; some are compiled as `jaxsub.jit` compiles. More by number, and every
step compiled, with

    python tests/random_programs.py 0 1000 programs.jsonl
    pytest tests/integration/test_random_programs.py -m exhaustive
"""

import json
from datetime import date

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_steps as random_steps_module
from hypothesis import given, settings
from interpreter import evaluate
from jax import random
from jax.extend.core import jaxpr_as_fun
from random_programs import (
    LARGE_N,
    check,
    check_budgets,
    has_tangents,
    kept_out,
    main,
    planned,
    random_plan,
    reader_process,
)
from random_steps import BINARY, JITTED, KEY, STEPS, UNARY, N, convolved_wide, loss_of, random_steps
from zoo import smooth_abs

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Segment
from jaxsub.core.plan import Plan
from jaxsub.jaxpr.compat import cpu_compiler_options, version_of
from jaxsub.jaxpr.trace import trace

FAST_COMPILE = {"xla_backend_optimization_level": 0, **cpu_compiler_options()}  # as jaxsub.jit compiles
TOLERANCE = 2e-5  # of the largest entry: second derivatives of a dozen layers in f32, fused differently
ARGUMENTS = tuple(random.normal(key, (N, N)) * 0.7 for key in random.split(KEY, 3))

steps = st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 50), st.integers(0, 50))
programs = st.lists(steps, min_size=2, max_size=6)


def derivatives(f, is_forward=True):
    """Value, gradients, a batch of gradients, the gradient of a batch, second derivatives; tangents if there are any.

    What has a backward pass of its own has no tangents.
    """

    def run(w, x, t):
        batch = jnp.stack([x, x + 0.25])
        tangents = (jax.jvp(f, (w, x), (t, x)), jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (t,))) if is_forward else ()
        return (
            jax.value_and_grad(f, argnums=(0, 1))(w, x),
            jax.vmap(jax.grad(f), in_axes=(None, 0))(w, batch),
            jax.grad(lambda w: jnp.sum(jax.vmap(f, in_axes=(None, 0))(w, batch)))(w),
            jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x) * t))(w),
            tangents,
        )

    return run


def compiled(f, is_forward=True):
    return jax.jit(derivatives(f, is_forward), compiler_options=FAST_COMPILE)(*ARGUMENTS)


def assert_alike(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.abs(a - b).max() <= TOLERANCE * max(1.0, np.abs(b).max())


def compare(loss, program, plan):
    """Under a plan, from which what must run once is kept out, all derivatives are the plain ones."""
    is_forward = has_tangents(program)
    assert_alike(compiled(jaxsub.sublinear(loss, plan=kept_out(program, plan)), is_forward), compiled(loss, is_forward))


@settings(max_examples=4)
@given(programs, st.integers(0, 2**32 - 1))
def test_random_programs_compiled(steps_of_program, seed):
    """Values, gradients, tangents, batches, second derivatives are the plain program's."""
    loss = loss_of(steps_of_program)
    program = trace(loss, ARGUMENTS[:2], {})
    compare(loss, program, (random_plan if seed % 2 else planned)(program, seed // 2))


def first_of_today():
    """The number of the first program: it moves on every day, and each version of JAX has its own."""
    is_oldest = version_of(jax.__version__) < (0, 11)
    return 1000 * (2 * date.today().toordinal() + is_oldest)


def numbers(count):
    """So many programs of today's; a failure names its number: `python tests/random_programs.py N N+1` repeats it."""
    return range(first_of_today(), first_of_today() + count)


@pytest.mark.parametrize("part", range(4))
def test_random_programs_interpreted(part):
    """Results and gradients, in turn tangents, batches, gradients of batches and of gradients, in 64 and 32 bits."""
    for number in numbers(24)[part::4]:
        check(number)


def test_plans_for_budgets_are_read_back_by_another_process():
    """Three budgets for each program: planned here, read and checked there; large arrays are only traced."""
    with reader_process() as reader:
        for number in numbers(2):
            check_budgets(number, reader)


def test_a_reader_says_what_fails():
    """What fails in the process that reads plans back fails here."""
    with reader_process() as reader, pytest.raises(AssertionError, match="PlanMismatchError"):
        reader(1, [Plan("other", Budget(), 1).to_json()])


@pytest.mark.exhaustive
def test_a_thousand_random_programs(tmp_path):
    """A thousand programs of each version, under random plans and for three budgets."""
    first = 1000 * (version_of(jax.__version__) >= (0, 11))
    assert main(first, first + 1000, tmp_path / "programs.jsonl") == 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("op", range(len(JITTED)))
def test_every_step_alone(op):
    """Each step of the generator, repeated, under a plan with a nest, barriers and saved values."""
    loss = loss_of([(op, 0, 1), (op, 1, 0), (op, 0, 2)])
    program = trace(loss, ARGUMENTS[:2], {})
    n = len(program.eqns)
    a, b, c = n // 4, n // 2, 3 * n // 4
    saved = Segment(0, a, tuple(program.graph.made_by(0, a)))
    nest = Segment(a, n - 1, (), (Segment(a, b), Segment(b, c)))
    compare(loss, program, Plan(program.fingerprint, Budget(), n, (saved, nest), tuple(sorted({a, b}))))


def test_the_compiled_check_can_fail():
    """A derivative rule that inlining would lose is seen: without it the gradient differs."""
    smooth, rough = UNARY.index(smooth_abs), UNARY.index(jnp.abs)
    with pytest.raises(AssertionError):
        assert_alike(compiled(loss_of([(smooth, 0, 0)] * 3)), compiled(loss_of([(rough, 0, 0)] * 3)))


@pytest.mark.parametrize("number", [1, 8, 9, 21])
def test_interpreting_computes_what_xla_does(number):
    """The interpreter's value and gradients of a program are those of the compiled program, to rounding."""
    rng = np.random.default_rng(number)
    loss = loss_of(random_steps(rng))
    with jax.enable_x64(True):
        arguments = tuple(rng.normal(size=(2, N, N)))
        gradient = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(*arguments)
        interpreted = evaluate(gradient, arguments)
        wanted = jax.jit(jaxpr_as_fun(gradient), compiler_options=FAST_COMPILE)(*arguments)
        chex.assert_trees_all_close(interpreted, wanted, rtol=0, atol=1e-12)


def test_every_step_keeps_the_shape_of_its_arrays_at_any_size(monkeypatch):
    """Each step of the random programs makes an array of its inputs' shape, of four rows and of 1,024."""
    for n in (N, LARGE_N):
        monkeypatch.setattr(random_steps_module, "N", n)
        like = jax.ShapeDtypeStruct((n, n), np.float32)
        for step in UNARY:
            chex.assert_shape(jax.eval_shape(lambda x, step=step: step(x), like), (n, n))
        for step in BINARY:
            chex.assert_shape(jax.eval_shape(lambda x, y, step=step: step(x, y), like, like), (n, n))


def test_interpreting_a_batch_computes_what_xla_does():
    """`vmap` makes of a batch of kernels more channels, by reshapes that transpose first: they are interpreted too."""
    loss = loss_of([(len(UNARY) + BINARY.index(convolved_wide), 0, 1)] * 2)
    with jax.enable_x64(True):
        w, *batch = np.random.default_rng(1).normal(size=(3, N, N))
        arguments = w, np.stack(batch)
        gradients = jax.make_jaxpr(jax.vmap(jax.grad(loss), (None, 0)))(*arguments)
        wanted = jax.jit(jaxpr_as_fun(gradients), compiler_options=FAST_COMPILE)(*arguments)
        chex.assert_trees_all_close(evaluate(gradients, arguments), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("number", [1, 8, 9])
def test_the_interpreted_check_can_fail(monkeypatch, number):
    """Barriers through which no gradient comes are seen."""
    monkeypatch.setattr("jaxsub.emission.barriers.fence", lambda values: list(map(jax.lax.stop_gradient, values)))
    with pytest.raises(AssertionError, match="off"):
        check(number)


def test_programs_by_number_add_up(monkeypatch, tmp_path, capsys):
    """Each hundred is kept with its failures and the code that ran; the same code does not run it again."""
    path, ran = tmp_path / "programs.jsonl", []

    def checked(number, reader):
        ran.append(number)
        if number == 130:
            raise ValueError("off")

    monkeypatch.setattr("random_programs.check_budgets", checked)
    monkeypatch.setattr("random_programs.check", lambda number: None)
    assert main(0, 250, path) == 1
    assert ran == list(range(250))
    assert main(0, 300, path) == 1
    assert ran[250:] == list(range(200, 300))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["first"], row["stop"]) for row in rows] == [(0, 100), (100, 200), (200, 250), (200, 300)]
    assert rows[1]["failed"] == {"130": "ValueError: off"}
    assert capsys.readouterr().out.splitlines()[-1].startswith("300 programs by this code, 1 failed")
    monkeypatch.setattr("random_programs.code_digest", lambda: "other")
    assert main(0, 100, path) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("100 programs by this code, 0 failed")
