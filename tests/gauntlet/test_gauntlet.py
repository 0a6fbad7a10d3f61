"""The gauntlet itself: its table is whole, it passes what is right, and each kind of fault is found."""

import ast
import json
import tomllib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsub
from gauntlet import PROGRAMS, SMALL, Built
from gauntlet.run import row, run_apart, summary
from gauntlet.trial import again, difference, first, merged, within

pytestmark = pytest.mark.once
HERE = Path(__file__).parent
PACKAGES = {"haiku": "dm-haiku", "e3nn_jax": "e3nn-jax"}
"""What is installed under another name than it is imported by."""
PARAMS = [jax.random.normal(k, (16, 16)) / 4 for k in jax.random.split(jax.random.key(0), 6)]
X = jax.random.normal(jax.random.key(1), (64, 16))


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


BUILT = Built(loss, (PARAMS, X))


def test_the_table_is_whole():
    """At least 14 programs of 10 libraries, each with a module, and no module without its line."""
    modules = {path.stem for path in (HERE / "programs").glob("*.py")} - {"__init__"}
    assert {program.module for program in PROGRAMS.values()} == set(PROGRAMS) == modules
    assert len(PROGRAMS) >= 14
    assert set(SMALL) < set(PROGRAMS)
    assert len({library for program in PROGRAMS.values() for library in program.libraries}) >= 10


def test_the_extra_has_every_library():
    """What the programs import is what `pip install -e ".[gauntlet]"` installs, and what the table says they need."""
    project = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
    extra = {package.split(">=")[0] for package in project["optional-dependencies"]["gauntlet"]}
    for program in PROGRAMS.values():
        assert {PACKAGES.get(library, library) for library in program.libraries} <= extra
        tree = ast.parse((HERE / "programs" / f"{program.module}.py").read_text("utf-8"))
        names = [n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names]
        names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        tops = {name.split(".")[0] for name in names} - {"jax", "numpy", "optax", "gauntlet", "os", "itertools"}
        assert tops == set(program.libraries) - {"optax"}


def test_a_program_without_its_library_is_skipped(monkeypatch):
    """A library that is not installed is named, and nothing is run."""
    monkeypatch.setitem(PROGRAMS, "other", type(PROGRAMS["jax_maml"])("other", ("no_such_library",), ""))
    assert "skipped: no_such_library is not installed" in row("other", 0.5, run_apart("other", 0.5, 10))


def test_what_is_right_passes(tmp_path):
    """A plain chain has no faults, and the second trial compiles nothing to find its plans."""
    *_, found = merged(first(BUILT, 0.75, tmp_path))
    assert found["faults"] == []
    assert found["planned_bytes"] <= found["budget_bytes"] < found["plain_bytes"]
    *_, second = merged(again(BUILT, json.loads(json.dumps(found)), tmp_path))
    assert second["faults"] == []
    assert "ok" in row("chain", 0.75, found)
    assert "1 ran, 0 failed" in summary([found])


def test_what_a_library_compiles_while_it_is_traced_is_no_fault(tmp_path):
    """A loss that runs an operation of its own in each trace passes: the second process compiles nothing of ours."""

    def eager(params, x):
        with jax.ensure_compile_time_eval():
            scale = jnp.cbrt(jnp.ones(3)).sum() / 3
        return scale * loss(params, x)

    built = Built(eager, (PARAMS, X))
    *_, found = merged(first(built, 0.75, tmp_path))
    *_, second = merged(again(built, found, tmp_path))
    assert second["faults"] == []


def test_plans_that_are_made_again_are_a_fault(tmp_path):
    """A second process that finds no plan compiles, and that is reported."""
    *_, found = merged(first(BUILT, 0.75, tmp_path))
    (tmp_path / "cache").rename(tmp_path / "lost")
    *_, second = merged(again(BUILT, found, tmp_path))
    assert "compiles for a plan" in str(second["faults"])
    assert "compiles to fit the step" in str(second["faults"])


def test_wrong_values_are_a_fault(tmp_path, monkeypatch):
    """A planned function whose gradient is off by a thousandth is found, in the loss and in the step."""
    sublinear = jaxsub.sublinear
    monkeypatch.setattr(jaxsub, "sublinear", lambda f, **options: sublinear(lambda w, x: 1.001 * f(w, x), **options))
    *_, found = merged(first(BUILT, 0.75, tmp_path))
    assert [fault.split(":")[0] for fault in found["faults"]] == ["wrong values", "wrong step"]


def test_a_budget_that_is_broken_is_a_fault(tmp_path, monkeypatch):
    """A loss that takes what it always took is reported with both figures."""
    plain = partial(jaxsub.sublinear, planner="plain", progress=False)
    monkeypatch.setattr(jaxsub, "sublinear", lambda f, **_: plain(f))
    *_, found = merged(first(BUILT, 0.75, tmp_path))
    assert [fault.split()[:2] for fault in found["faults"]] == [["loss", "takes"]]


def test_a_least_that_is_refused_again_is_an_error():
    """The least that a refusal names is asked for once, and has to do."""

    def ask(n_bytes):
        if n_bytes < 8:
            raise jaxsub.InfeasibleBudgetError("no", requested_bytes=n_bytes, least_bytes=n_bytes + 1)
        return "plan"

    assert within(ask, 9) == ("plan", 9, False)
    assert within(ask, 7) == ("plan", 8, True)
    with pytest.raises(jaxsub.InfeasibleBudgetError):
        within(ask, 6)


ONES = np.ones(3, "float32")


@pytest.mark.parametrize(
    ("got", "wanted", "words"),
    [
        ([ONES], [ONES, ONES], "1 arrays, not 2"),
        ([ONES], [ONES[:2]], "float32[3], not float32[2]"),
        ([ONES * (1 + 1e-3)], [ONES], "off by 1.0e-03"),
        ([ONES * np.nan], [ONES], "off by nan"),
        ([np.arange(3)], [np.arange(1, 4)], "not equal"),
        ([ONES, 2e-3 * ONES], [ONES, 1e-3 * ONES], "array 1"),
    ],
)
def test_a_difference_is_said(got, wanted, words):
    """Numbers, shapes and values that differ are found; so is what is no number."""
    assert words in difference(got, wanted, 1e-4)


def test_rounding_is_no_difference():
    """A share of the largest entry may differ, and noise far below the largest array."""
    assert difference([ONES + 1e-5, 1e-8 * ONES], [ONES, 0 * ONES], 1e-4) is None
