"""Programs that are traced in another order in every process: digests, orders of plans, and plans found on disk."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsub
from jaxsub.jaxpr.order import equation_digests, ordered_as, unordered_fingerprint
from jaxsub.jaxpr.trace import trace

W = jax.random.normal(jax.random.key(0), (8, 32, 32)) / 6
X = jax.random.normal(jax.random.key(1), (256, 32))


def heads(order, wiring=(jnp.sin, jnp.tanh, jnp.cos)):
    """A model with three heads that are traced in a given order and summed in a fixed one."""

    def loss(w, x):
        for layer in w[:5]:
            x = jnp.tanh(x @ layer)
        made = {i: wiring[i](jax.nn.gelu(x @ w[5 + i]) @ w[9 + i]) for i in order}
        return (made[0] * made[1] + made[2]).mean()

    return loss


def test_the_order_of_equations_is_no_part_of_a_fingerprint():
    """Two orders of one program have one fingerprint besides their own; another wiring has another."""
    one, other, wired = (trace(f, (W, X), {}) for f in (
        heads([0, 1, 2]), heads([2, 0, 1]), heads([0, 1, 2], (jnp.tanh, jnp.sin, jnp.cos))))  # fmt: skip
    assert one.fingerprint != other.fingerprint
    assert unordered_fingerprint(one) == unordered_fingerprint(other) != unordered_fingerprint(wired)


def test_a_plan_runs_on_another_order():
    """A plan made for one order gives values and gradients of the other, and takes what it was measured to take."""
    plan = jaxsub.plan(heads([0, 1, 2]), W, X, budget=0.6, chunks=False, cache=False)
    planned = jaxsub.sublinear(heads([2, 0, 1]), plan=plan, cache=False)
    assert plan.segments
    assert jaxsub.measure(planned, W, X).temp_bytes == plan.measurement.temp_bytes
    got, wanted = (jax.value_and_grad(f)(W, X) for f in (planned, heads([2, 0, 1])))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, wanted)


def test_another_program_is_not_put_in_order():
    """A plan of other equations, or of equations with others between them, is refused as ever."""
    plan = jaxsub.plan(heads([0, 1, 2]), W, X, verify=False, cache=False)
    program = trace(heads([0, 1, 2], (jnp.tanh, jnp.sin, jnp.cos)), (W, X), {})
    assert ordered_as(program, plan) is program
    turned = plan.replace(equations=equation_digests(trace(heads([0, 1, 2]), (W, X), {}))[::-1])
    assert ordered_as(trace(heads([2, 0, 1]), (W, X), {}), turned).fingerprint != plan.fingerprint
    with pytest.raises(jaxsub.PlanMismatchError, match="The first equation that differs is number"):
        jaxsub.sublinear(heads([0, 1, 2], (jnp.tanh, jnp.sin, jnp.cos)), plan=plan)(W, X)


def test_effects_keep_their_order():
    """Two prints in another order are another program: what is printed first is part of what it does."""

    def printing(words):
        def loss(x):
            for word in words:
                jax.debug.print(word + "{}", x[0], ordered=True)
            return jnp.sin(x).sum()

        return loss

    one, other = (trace(printing(words), (X[0],), {}) for words in ("ab", "ba"))
    assert unordered_fingerprint(one) != unordered_fingerprint(other)


CHILD = """
import sys
import jax, jax.numpy as jnp, jaxsub
W = jnp.full((12, 32, 32), 0.01)
X = jnp.ones((256, 32))
PLAIN = {"sine": jnp.sin, "tangent": jnp.tanh, "cosine": jnp.cos, "root": jnp.cbrt}
def loss(w, x):
    for layer in w[:9]:
        x = jnp.tanh(x @ layer)
    made = {name: PLAIN[name](jax.nn.gelu(x @ w[9]) @ w[10]) for name in set(PLAIN)}
    return (made["sine"] * made["tangent"] + made["cosine"] * made["root"]).mean()
def step(w, x):
    return w - 0.1 * jax.grad(jaxsub.sublinear(loss, cache=sys.argv[1]))(w, x)
names = []
def count(event, *_, **__):
    if event.endswith("backend_compile_duration"):
        names.append(event)
jax.monitoring.register_event_duration_secs_listener(count)
plan = jaxsub.sublinear(loss, budget=0.6, chunks=False, cache=sys.argv[1], progress=False).plan(W, X)
jaxsub.jit(step, memory=0.85, cache=sys.argv[1], progress=False).report(W, X)
print(list(set(PLAIN)), len(names), plan.fingerprint, plan.n_regions)
"""


def test_another_process_finds_plans_whatever_the_order(tmp_path):
    """A model that goes through a set is planned once; processes with other hashes find its plan and the step's."""
    said = {}
    for seed in ("0", "1", "2", "3"):
        ran = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=True,
                             env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
                             timeout=100)  # fmt: skip
        order, _, rest = ran.stdout.partition("] ")
        if order not in said:
            said[order] = rest.split()
        if len(said) == 2:
            break
    first, second = said.values()
    assert int(first[0]) > 0 == int(second[0])
    assert first[1:] == second[1:]
    assert int(first[2]) > 0
