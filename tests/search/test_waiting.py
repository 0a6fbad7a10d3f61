"""What a user waits for and sees meanwhile: how many compiles a plan takes, effort, time limits, progress, the log."""

import io
import logging
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxsub
from jaxsub.search import verify

WS, X = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 8, jax.ShapeDtypeStruct((512, 32), jnp.float32)
PLAIN_BYTES = 9 * 512 * 32 * 4


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.fixture
def compiles(monkeypatch):
    """How many regions each program had that was compiled to be measured."""
    regions, compile_plan = [], verify.Verifier._compile

    def counted(self, plan):
        regions.append(plan.n_regions)
        return compile_plan(self, plan)

    monkeypatch.setattr(verify.Verifier, "_compile", counted)
    return regions


def planned(**options):
    return jaxsub.plan(loss, WS, X, **{"progress": False, "cache": False, "chunks": False} | options)


def test_a_plan_far_below_the_plain_program_is_compiled_once(compiles):
    """Its predicted peak is right, so the first plan is taken; the plain program is not compiled."""
    plan = planned(budget=PLAIN_BYTES // 2)
    assert 0 not in compiles
    assert len(compiles) == 1
    assert plan.measurement.temp_bytes <= PLAIN_BYTES // 2
    assert plan.plain_measurement is None


def test_a_second_budget_compiles_no_more_than_one_program_more(compiles, tmp_path):
    """And the same budget in another function none."""
    planned(budget=PLAIN_BYTES // 2, cache=tmp_path)
    planned(budget=PLAIN_BYTES // 2 + 999, cache=tmp_path)
    planned(budget=PLAIN_BYTES // 2, cache=tmp_path)
    assert len(compiles) <= 2


@pytest.mark.parametrize(("options", "words"), [
    ({"effort": "most"}, "effort is one of 'low', 'default', 'high', got 'most'"),
    ({"max_seconds": True}, "max_seconds is None or a positive number of seconds, got True"),
    ({"max_seconds": 0}, "max_seconds is None or a positive number of seconds, got 0"),
    ({"max_seconds": "1m"}, "max_seconds is None or a positive number of seconds, got '1m'"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options, words):
    """The error says what may be asked."""
    with pytest.raises(ValueError, match=words):
        planned(budget=0.5, **options)


def test_low_effort_compiles_no_more_than_default(compiles):
    """And keeps to the budget."""
    plan = planned(budget=0.45, effort="low")
    n_low = len(compiles)
    compiles.clear()
    planned(budget=0.45)
    assert n_low <= len(compiles)
    assert plan.measurement.temp_bytes <= 0.45 * plan.plain_measurement.temp_bytes


def test_one_line_is_logged(caplog):
    """What was decided: regions, what is recomputed, the peak; nothing with `progress=False`."""
    with caplog.at_level(logging.INFO, "jaxsub"):
        planned(budget=0.5)
        assert not caplog.records
        plan = planned(budget=0.5, progress=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{plan.n_regions} regions" in line
    assert "of a forward pass recomputed" in line
    assert "measured instead of" in line


def test_a_plan_of_the_cache_is_logged_too(caplog, tmp_path):
    """A decision that was made before is told as such, in one line."""
    planned(budget=0.5, cache=tmp_path)
    with caplog.at_level(logging.INFO, "jaxsub"):
        planned(budget=0.5, cache=tmp_path, progress=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("found in the plan cache, planned by")


def test_nothing_is_written_to_what_is_no_terminal(monkeypatch):
    """Neither a bar nor a line, however long it takes."""
    monkeypatch.setattr("jaxsub.search.progress.LONG_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    planned(budget=0.5, progress=True)
    assert sys.stderr.getvalue() == ""


def test_a_terminal_is_told_which_compile_it_is(monkeypatch):
    """The number of the compile, the most there can be, and in the end what was decided."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("jaxsub.search.progress.LONG_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    planned(budget=0.5, progress=True)
    told = sys.stderr.getvalue()
    assert re.search(r"compile 1 of at most \d", told)
    assert "of a forward pass recomputed" in told
