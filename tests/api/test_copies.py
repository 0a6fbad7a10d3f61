"""Wrapped functions and steps in threads, copies and other processes: one trace a key, and nothing left out."""

import copy
import functools
import pickle
import subprocess
import sys
import threading

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsub
from jaxsub.core.errors import BudgetError, InfeasibleBudgetError, PlanMismatchError
from jaxsub.step.device import OutOfMemoryError

W, X = jnp.full((8, 8), 0.1), jnp.ones((4, 8))
traces = []


def plain(w, x):
    traces.append(1)
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return (x**2).mean()


@jaxsub.sublinear(cache=False, progress=False)
def loss(w, x):
    """A loss at the top of a module."""
    return plain(w, x)


@jaxsub.jit(memory="1GiB", cache=False, progress=False)
def step(w, x):
    """A step at the top of a module."""
    return w - jax.grad(loss)(w, x)


class Model:
    """A loss that is a method."""

    @jaxsub.sublinear(cache=False, progress=False, static_argnums=0)
    def loss(self, w, x):
        """Mean square."""
        return plain(w, x)


MADE = {
    "loss": lambda: jaxsub.sublinear(plain, cache=False, progress=False, verify=False),
    "step": lambda: jaxsub.jit(plain, memory="1GiB", cache=False, progress=False),
    "closure": lambda: jaxsub.sublinear(lambda w, x: plain(2 * w, x), cache=False, progress=False, verify=False),
    "step with options": lambda: jaxsub.jit(plain, memory=1.0, cache=False, progress=False, donate_argnums=()),
}


def in_threads(call, count=6):
    """Call in threads that begin together; return what came out of each."""
    barrier, out = threading.Barrier(count), []

    def run():
        barrier.wait()
        out.append(call())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(out) == count
    return out


@pytest.mark.parametrize("kind", ["loss", "step"])
def test_threads_prepare_once(kind):
    """Six threads that call at once trace as often as one call does, and get the same result."""
    counts = []
    for count in (1, 6):
        traces.clear()
        made = MADE[kind]()
        results = in_threads(lambda made=made: np.asarray(made(W, X)), count)
        assert all((r == results[0]).all() for r in results)
        counts.append(len(traces))
    assert counts[0] == counts[1]


def test_threads_wait_only_for_their_own():
    """While one key is being prepared, another can be prepared and used."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(x):
        if x.shape == (2,):
            inside.set()
            assert go_on.wait(60)
        return (x**2).sum()

    made = jaxsub.sublinear(slow, cache=False, progress=False, verify=False)
    thread = threading.Thread(target=made, args=(jnp.ones(2),))
    thread.start()
    assert inside.wait(60)
    assert made(jnp.ones(3)) == 3.0
    go_on.set()
    thread.join()


@pytest.mark.parametrize("use", [False, True], ids=["before", "after use"])
@pytest.mark.parametrize("kind", MADE)
def test_copies_work(kind, use):
    """`copy`, `deepcopy` and cloudpickle make one that gives the same, before and after use; pickle where it can."""
    made = MADE[kind]()
    wanted = plain(W if kind != "closure" else 2 * W, X)
    if use:
        np.testing.assert_allclose(made(W, X), wanted, rtol=1e-6)
    copies = [copy.copy(made), copy.deepcopy(made), pickle.loads(cloudpickle.dumps(made))]
    if kind != "closure":
        copies.append(pickle.loads(pickle.dumps(made)))
    for other in copies:
        assert other is not made
        assert repr(other) == repr(made)
        assert not other._ready
        np.testing.assert_allclose(other(W, X), wanted, rtol=1e-6)


@pytest.mark.parametrize("made", [loss, step, Model.loss], ids=["loss", "step", "method"])
def test_what_stands_in_a_module_is_pickled_by_its_name(made):
    """A decorated function or method of a module is itself again, as a function is."""
    assert pickle.loads(pickle.dumps(made)) is made
    assert copy.deepcopy(made) is made
    assert cloudpickle.loads(cloudpickle.dumps(made)) is made


@pytest.mark.parametrize("wrap", [jax.value_and_grad, jax.vmap, jaxsub.jit, functools.wraps(loss)])
def test_what_wraps_one_takes_nothing_of_its_own_over(wrap):
    """A gradient of a function that was called is pickled by cloudpickle, as the gradient of a plain one is."""
    for made in (MADE["loss"](), MADE["step"]()):
        made(W, X)
        around = wrap(made) if wrap is not jaxsub.jit else jaxsub.jit(jax.value_and_grad(made))
        assert not {"fun", "settings", "memory", "_ready", "_locks"}.intersection(vars(around))
    pickle.loads(cloudpickle.dumps(jax.value_and_grad(MADE["loss"]())))


SCRIPT = """
import sys, cloudpickle, jax, jax.numpy as jnp, jaxsub
scale = 2.0
@jaxsub.sublinear(cache=False, progress=False, verify=False)
def loss(w):
    return scale * jnp.tanh(w).sum()
if sys.argv[1] == "used":
    loss(jnp.ones(3))
sys.stdout.buffer.write(cloudpickle.dumps((loss, lambda w: jax.grad(loss)(w))))
"""


@pytest.mark.parametrize("use", ["fresh", "used"])
def test_from_a_script_to_another_process(use):
    """What a script decorates is taken along by cloudpickle, with what it needs."""
    made = subprocess.run([sys.executable, "-c", SCRIPT, use], capture_output=True, check=True, timeout=300)
    loss, grad = pickle.loads(made.stdout)
    np.testing.assert_allclose(loss(jnp.ones(3)), 6 * np.tanh(1), rtol=1e-6)
    np.testing.assert_allclose(grad(jnp.ones(3)), np.full(3, 2 - 2 * np.tanh(1) ** 2), rtol=1e-5)


@pytest.mark.parametrize(
    "error",
    [
        BudgetError("not a budget"),
        InfeasibleBudgetError("too little", requested_bytes=1, least_bytes=2, holders=("a value",)),
        PlanMismatchError("another", plan_fingerprint="a", function_fingerprint="b"),
        OutOfMemoryError("no room", planned_bytes=1, memory_bytes=2, refused_bytes=None, try_bytes=3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_another_process_whole(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@jax.tree_util.register_static
class Doubling:
    by = 2.0

    @jaxsub.jit
    def times(self, x):
        return self.by * x


def test_functions_without_a_memory_are_copied_and_bound_as_those_of_jax_are():
    """On a CPU before JAX 0.11.2 it is no function of `jax.jit` itself, and works like one."""
    jitted = jaxsub.jit(plain, donate_argnums=())
    assert isinstance(jitted, jax.stages.Wrapped)
    assert jitted.lower(W, X).compile()(W, X) == jitted(W, X)
    for again in (copy.copy(jitted), copy.deepcopy(jitted), pickle.loads(cloudpickle.dumps(jitted))):
        np.testing.assert_allclose(again(W, X), jitted(W, X))
    jitted.clear_cache()
    np.testing.assert_allclose(Doubling().times(X), 2 * X)
