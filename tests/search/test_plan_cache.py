"""Finished plans on disk: found by all that decides them, by nothing less, and never believed when damaged."""

import functools
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from mutations import hostile_bytes

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Loop, Segment
from jaxsub.core.disk_cache import Store
from jaxsub.planners import get

WS, X = [jnp.eye(4)] * 12, jnp.ones((256, 4))
PATHS = os.pathsep.join(map(str, Path(__file__).parents[1:3]))


def loss(ws, x):
    """Twelve layers."""
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


planned = functools.partial(jaxsub.plan, loss, WS, X, progress=False)


@pytest.fixture
def priced_runs(monkeypatch):
    """The chains that are priced meanwhile, one entry each."""
    chains = []
    price = jaxsub.costs.chain_builder.Pricer.chain
    monkeypatch.setattr("jaxsub.costs.chain_builder.Pricer.chain", lambda *a, **k: chains.append(a) or price(*a, **k))
    return chains


def test_a_plan_is_found_without_pricing(tmp_path, priced_runs):
    """The same function, budget and planner are planned once, verified or not, and the plan found is the plan made."""
    for asked in (dict(verify=False), dict(budget=0.6, verify=False), dict(chunks={0: 4}), dict(budget=0.8)):
        made = planned(cache=tmp_path, **asked)
        n_made = len(priced_runs)
        assert n_made
        assert planned(cache=tmp_path, **asked) == made
        assert len(priced_runs) == n_made
    assert made.measurement is not None


def test_what_other_code_emitted_is_measured_anew(tmp_path, monkeypatch):
    """A measurement on disk is of a plan as this package's code writes it: other code does not believe it."""
    asked = dict(budget=0.8, cache=tmp_path, planner=lambda chain, budget_bytes: get("auto")(chain, budget_bytes))
    compiles = []
    compile_ = jaxsub.search.verify.measure_compiled
    monkeypatch.setattr("jaxsub.search.verify.measure_compiled", lambda *a: compiles.append(a) or compile_(*a))
    planned(**asked)
    n_first = len(compiles)
    planned(**asked)
    assert n_first == len(compiles) > 1
    monkeypatch.setattr("jaxsub.search.verify.code_digest", lambda: "another")
    planned(**asked)
    assert len(compiles) == 2 * n_first


@pytest.mark.parametrize("changed", [dict(budget=0.7), dict(planner="chen"), dict(planner="recursive(2)")], ids=str)
def test_what_decides_a_plan_is_in_its_key(changed, tmp_path, priced_runs):
    """Another budget, planner or setting of a planner is planned anew."""
    asked = dict(budget=0.9, planner="recursive(1)", verify=False, cache=tmp_path)
    planned(**asked)
    n_made = len(priced_runs)
    planned(**(asked | changed))
    assert len(priced_runs) > n_made


def test_a_planner_of_the_users_own_is_asked_each_time(tmp_path):
    """Nobody knows what it depends on."""
    asked = []

    def mine(chain, budget_bytes):
        asked.append(budget_bytes)
        return get("barriers")(chain, None)

    for times in (1, 2):
        planned(planner=mine, verify=False, cache=tmp_path)
        assert len(asked) == times


def forged(plan):
    """What somebody may have put in the place of a plan that was kept, all in the right form."""
    less = replace(plan.measurement, temp_bytes=8)
    other = jaxsub.plan(loss, WS[:4], X, verify=False, cache=False, progress=False)
    return {
        "no plan": "a plan",
        "a number": 7,
        "another function's": other,
        "nothing left of it": plan.replace(segments=(), barriers=(), loops=()),
        "nothing left of it, plainly": plan.replace(segments=(), barriers=(), loops=(), measurement=less,
                                                    plain_measurement=less),
        "half of it": plan.replace(segments=plan.segments[:1]),
        "measured at less": plan.replace(measurement=less),
        "measured at more": plan.replace(measurement=replace(less, temp_bytes=2**40)),
        "not measured": plan.replace(measurement=None),
        "measured at less than nothing": plan.replace(measurement=replace(less, temp_bytes=-8)),
        "measured elsewhere": plan.replace(measurement=replace(plan.measurement, target="h100")),
        "saves what is not there": plan.replace(segments=(Segment(0, 2, (999,)), *plan.segments[1:])),
        "a step that is not there": plan.replace(timeline=replace(plan.timeline, pieces=(replace(
            plan.timeline.pieces[0], stop=10**6), *plan.timeline.pieces[1:]))),
        "a loop where none is": plan.replace(loops=(Loop(1, blocks=(2,)),)),
        "a budget of nothing": plan.replace(budget=Budget(n_bytes=0)),
    }  # fmt: skip


FORGERIES = 15


@pytest.mark.parametrize("number", range(FORGERIES))
def test_what_is_damaged_is_planned_anew(tmp_path, number, kept):
    """An entry that is no plan, one of another program, or one that says what was not measured is as good as none."""
    made, key, directory = kept
    wrongs = forged(made)
    assert len(wrongs) == FORGERIES
    shutil.copytree(directory, tmp_path / "cache")
    Store(tmp_path / "cache").put(key, list(wrongs.values())[number])
    assert planned(budget=0.8, chunks=False, cache=tmp_path / "cache") == made


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A verified plan, the key under which it is kept, and the directory."""
    directory, keys = tmp_path_factory.mktemp("kept"), []
    put = Store.put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "put", lambda self, key, value: keys.append(key) or put(self, key, value))
        made = planned(budget=0.8, chunks=False, cache=directory)
    assert Store(directory).get(keys[-1], jaxsub.Plan) == made
    return made, keys[-1], directory


def test_a_moved_line_is_named_as_it_is_now(tmp_path):
    """Labels say where the code stands, not where it stood when the plan was made."""
    source = "def f(w, x):\n    for _ in range(6):\n        x = jnp.tanh(x @ w)\n    return jnp.sum(x)"
    lines = []
    for moved in ("", "\n" * 40):
        scope = {"jnp": jnp}
        path = tmp_path / f"model{len(moved)}.py"
        path.write_text(moved + source)
        exec(compile(moved + source, str(path), "exec"), scope)
        plan = jaxsub.plan(scope["f"], WS[0], X, budget=0.6, verify=False, cache=tmp_path, progress=False)
        lines.append(" ".join(plan.timeline.stage_labels))
    assert "model0.py:3" in lines[0]
    assert "model40.py:43" in lines[1]


OTHER_PROCESS = """
import sys, jax.numpy as jnp, jaxsub
import jaxsub.costs.chain_builder
sys.path.insert(0, sys.argv[1])
jaxsub.costs.chain_builder.Pricer.chain = None
from test_plan_cache import planned
print(planned(budget=0.8, cache=sys.argv[2]).to_json())
"""


def test_another_process_finds_the_verified_plan(tmp_path):
    """A new process prices and compiles nothing for a plan that was verified before."""
    made = planned(budget=0.8, cache=tmp_path)
    here = Path(__file__).parent
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (here.parents[1], here.parent))),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", OTHER_PROCESS, str(here), str(tmp_path)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert jaxsub.Plan.from_json(ran.stdout) == made
    assert jax.default_backend() == "cpu"


KILLED = """
import os, pathlib, signal, sys, time
sys.path.insert(0, sys.argv[1])
from test_plan_cache import planned
pathlib.Path(sys.argv[4], str(os.getpid())).touch()
while len(os.listdir(sys.argv[4])) < 3:  # none begins before all can
    time.sleep(0.01)
replace, calls = os.replace, []
def kill_in_mid_write(beside, place):
    calls.append(place)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(beside, place)
os.replace = kill_in_mid_write
print(planned(budget=0.8, cache=sys.argv[2]).to_json())
"""


def test_processes_plan_at_once_and_one_is_killed(tmp_path, priced_runs):
    """Of three processes that plan the same at once one is killed: the others plan, and the next finds their plan."""
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu"}
    ready, cache = tmp_path / "ready", tmp_path / "cache"
    ready.mkdir()
    command = [sys.executable, "-c", KILLED, str(here), str(cache)]
    processes = [subprocess.Popen([*command, n, str(ready)], env=env, stdout=subprocess.PIPE, text=True)
                 for n in ("1", "0", "0")]  # fmt: skip
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 0, 0]
    assert len(list(cache.rglob("*.tmp"))) == 1
    found = planned(budget=0.8, cache=cache)
    assert priced_runs == []
    assert said[0] == ""
    for text in said[1:]:
        made = jaxsub.Plan.from_json(text)
        assert (made.segments, made.barriers, made.measurement.temp_bytes) == (
            found.segments, found.barriers, found.measurement.temp_bytes)  # fmt: skip


def test_a_hostile_directory_changes_nothing(tmp_path, kept):
    """Where every file is something else, a link out or a bomb, a plan is as without a cache; nothing else changes."""
    made, _, directory = kept
    outside = tmp_path / "outside"
    outside.write_text("mine")
    shutil.copytree(directory, tmp_path / "cache")
    files, makers = sorted((tmp_path / "cache").rglob("*.json")), list(hostile_bytes().values())
    for number, file in enumerate(files):
        if number % 4:
            makers[number % len(makers)](file)
        else:
            file.unlink()
            if number % 8:
                file.symlink_to(outside)
            else:
                file.hardlink_to(outside)
    found = planned(budget=0.8, chunks=False, cache=tmp_path / "cache")
    assert (found.segments, found.barriers, found.loops) == (made.segments, made.barriers, made.loops)
    assert replace(found.measurement, compile_seconds=0) == replace(made.measurement, compile_seconds=0)
    assert outside.read_text() == "mine"
    assert sorted((tmp_path / "cache").rglob("*.json")) == files
    assert planned(budget=0.8, chunks=False, cache=tmp_path / "cache") == found


@pytest.mark.parametrize("changed", ["a setting of JAX", "a flag of XLA"])
def test_what_was_compiled_otherwise_is_no_plan_here(changed, tmp_path, monkeypatch):
    """Settings that no jaxpr shows decide what a program needs: a plan of others is not taken. Dumps do not."""

    def loss(w, x, key):
        x = jnp.tanh(x @ w)
        return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0) ** 2)

    args = jnp.eye(64), jnp.ones((1024, 64)), jax.random.key(0)

    def compiled_with(partitionable, flags=""):
        monkeypatch.setenv("XLA_FLAGS", flags)
        compiles = []
        measure = jaxsub.search.verify.measure_compiled
        with monkeypatch.context() as patch, jax.threefry_partitionable(partitionable):
            patch.setattr("jaxsub.search.verify.measure_compiled", lambda *a: compiles.append(a) or measure(*a))
            jaxsub.plan(loss, *args, budget="1GiB", cache=tmp_path, progress=False)
        return len(compiles)

    assert compiled_with(True)
    assert not compiled_with(True, "--xla_dump_to=dumps")
    assert compiled_with(False) if changed == "a setting of JAX" else compiled_with(True, "--xla_some_scheduler=false")
