"""The recursion and revolve: their laws on equal stages, and validity on any chain."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import Machine, extra_steps, random_chain, uniform

from jaxsub.core.chain import Chain, Stage
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.plan import walk
from jaxsub.core.simulate import extra_flops, predict
from jaxsub.planners.dp_tables import depth
from jaxsub.planners.recursive import Recursive, recursive_runs
from jaxsub.planners.revolve import Revolve, beta, repeats_of, revolve_runs


def chains(most: int = 12) -> st.SearchStrategy[Chain]:
    """Chains with small whole numbers, skips and shared weights."""
    return st.builds(
        lambda seed, n: random_chain(random.Random(seed).randint, n), st.integers(0, 2**32), st.integers(1, most)
    )


def layers(n: int) -> Chain:
    """A chain like tanh(x @ w): one unit crosses each cut, nothing else is kept, one is at work."""
    return uniform(n, keep_bytes=0, transient_bytes=1)


# Chains of tanh(x @ w), recursion by nested jax.checkpoint by hand, as compiled: FLOPs over plain.
@pytest.mark.parametrize(
    ("n", "k", "most_flops"),
    [(64, 1, 1.84), (64, 2, 1.72), (64, 3, 1.51), (256, 1, 2.18), (256, 2, 2.04), (256, 3, 1.76),
     (1024, 1, 2.51), (1024, 2, 2.34), (1024, 3, 2.01)],
)  # fmt: skip
def test_recursion_law(n, k, most_flops):
    """g(n) = k log_{k+1} n + 3 units or better, at no more FLOPs than the same recursion by hand."""
    prediction = Recursive(k)(layers(n)).prediction
    assert prediction.temp_bytes <= k * math.log(n, k + 1) + 3
    assert 1 + prediction.extra_flops / (3 * n) <= most_flops


@pytest.mark.parametrize("k", [1, 2, 5])
def test_recursion_is_shallow(k):
    """Nests stand logarithmically deep, so that long chains neither trace nor print without end."""
    assert depth(recursive_runs(layers(1024), k)) <= math.ceil(math.log(1024, k + 1))


def test_parts_have_equal_bytes():
    """The recursion halves bytes, not stages."""
    sizes = (8, 1, 1, 1, 1, 4)
    chain = Chain(tuple(Stage(s, s + 1, made_bytes=size) for s, size in enumerate(sizes)), (), ())
    assert recursive_runs(chain, 1)[0].stop == 1


def test_stages_that_keep_much_are_regions_of_their_own():
    """Down to single stages: one that keeps more than its result is recomputed, one that does not is left alone."""
    by_size = {keep: recursive_runs(uniform(2, keep_bytes=keep), 1)[0].option for keep in (1, 2)}
    assert by_size[1] is None
    assert by_size[2] is not None


@pytest.mark.parametrize("n", range(1, 61))
def test_revolve_costs_what_griewank_and_walther_say(n):
    """Extra forward steps on n equal stages with s slots are the least there are; conventions: `extra_steps`."""
    chain = uniform(n)
    for slots in range(1, 13):
        prediction = predict(chain, revolve_runs(chain, slots))
        assert prediction.extra_flops == extra_steps(n, slots)
        assert prediction.temp_bytes <= slots


def test_extra_steps_follow_the_recurrence():
    """The closed form equals p(l, s) = min over j of j + p(j, s) + p(l - j, s - 1), p(1, s) = 0."""
    steps = {(1, slots): 0 for slots in range(13)} | {(n, 0): math.inf for n in range(2, 61)}
    for n in range(2, 61):
        for slots in range(1, 13):
            steps[n, slots] = min(j + steps[j, slots] + steps[n - j, slots - 1] for j in range(1, n))
            assert steps[n, slots] == extra_steps(n, slots)


def test_machine_executes_each_stage_at_most_r_times_again():
    """No stage is executed more often than the least r with beta(s, r) >= n."""
    for n, slots in ((10, 3), (60, 2), (60, 4), (33, 12)):
        again = Machine(uniform(n)).execute(revolve_runs(uniform(n), slots)).extra_flops
        assert again == extra_steps(n, slots) <= n * repeats_of(n, slots)
        assert beta(slots, repeats_of(n, slots) - 1) < n <= beta(slots, repeats_of(n, slots))


@given(chains(), st.integers(1, 6))
def test_plans_are_valid_on_any_chain(chain, number):
    """The machine executes the recursion and revolve on any chain, and finds what was predicted."""
    for runs in (recursive_runs(chain, number), revolve_runs(chain, number)):
        machine, prediction = Machine(chain).execute(runs), predict(chain, runs)
        assert (machine.peak_bytes, machine.extra_flops) == (prediction.temp_bytes, prediction.extra_flops)


@pytest.mark.parametrize("planner", [Recursive(), Revolve()])
@given(chain=chains())
def test_budgets_are_met_monotonely_or_refused(planner, chain):
    """Every budget from nothing to plain is met or refused with one that works, and more memory is never slower."""
    plain_bytes, flops = predict(chain, chain.plain()).temp_bytes, float("inf")
    with pytest.raises(InfeasibleBudgetError) as refusal:
        planner(chain, 0)
    least_bytes = refusal.value.least_bytes
    assert planner(chain, least_bytes).prediction.temp_bytes == least_bytes
    with pytest.raises(InfeasibleBudgetError):
        planner(chain, least_bytes - 1)
    for budget_bytes in range(least_bytes, 2 * plain_bytes, 1 + plain_bytes // 8):
        prediction = planner(chain, budget_bytes).prediction
        assert prediction.temp_bytes <= budget_bytes
        assert prediction.extra_flops <= flops
        flops = prediction.extra_flops


def test_revolve_nests_no_deeper_than_allowed():
    """One slot for a thousand stages would nest a thousand deep: more slots are taken."""
    plan = Revolve(1)(uniform(1024))
    assert max(plan.mirror_counts) <= 8 < repeats_of(1024, 1)
    assert sum(1 for _ in walk(plan.segments)) < 8 * 1024


def test_natural_plans():
    """Without a budget: the recursion halves, revolve executes no stage more than twice again."""
    chain = random_chain(random.Random(1).randint, 12)
    assert Recursive()(chain).segments == Recursive(1)(chain).segments
    assert repeats_of(100, 13) == 2
    assert Revolve()(uniform(100)).prediction.extra_flops == extra_steps(100, 13)
    assert extra_flops(chain, revolve_runs(chain, 20)) <= 2 * chain.forward_flops


@pytest.mark.parametrize(("planner", "numbers"), [(Recursive, (0,)), (Revolve, (0,)), (Revolve, (1, 0))])
def test_numbers_below_one_are_refused(planner, numbers):
    """No k, slots or depth below 1."""
    with pytest.raises(ValueError, match="at least 1"):
        planner(*numbers)
