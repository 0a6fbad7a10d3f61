"""The command line: what it prints, what it writes, and how it fails."""

import importlib.metadata
import json
import sys

import pytest
from click.testing import CliRunner

from jaxsub.cli import EXAMPLES, main
from jaxsub.core.plan import Plan

MODULE = """
import jax, jax.numpy as jnp

def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

def example_args():
    s = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 12, s

arrays = ([jnp.ones((4, 4))] * 4, jnp.ones((8, 4)))
wide = ([jnp.ones((16, 16))] * 12, jnp.ones((512, 16)))
nothing = ()
number = 3
def counts(n): return n
broken = "a string"
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a folder with a module `toy_train`."""
    (tmp_path / "toy_train.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "imports_what_is_missing.py").write_text("import no_such_module_at_all", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "toy_train", raising=False)
    return lambda *args: CliRunner().invoke(main, args)


LOSS = ("toy_train:loss", "--args", "toy_train:example_args")


def test_a_plan_is_printed_and_written(run, tmp_path):
    """`plan` prints the plan, and writes it as JSON that loads and as a page."""
    found = run("plan", *LOSS, "--budget", "0.5", "--no-verify", "--json", "p.json", "--html", "p.html")
    assert found.exit_code == 0, found.output
    plan = Plan.load(str(tmp_path / "p.json"))
    assert str(plan) in found.output
    assert (tmp_path / "p.html").read_text("utf-8").startswith("<!DOCTYPE html>")


def test_a_plan_is_verified_when_asked(run):
    """`--verify` compiles the plan, and what the compiler says is printed."""
    found = run("plan", "toy_train.py:loss", "--args", "toy_train:arrays", "--verify", "--argnums", "0,1")
    assert found.exit_code == 0, found.output
    assert "measured " in found.output


def test_a_function_is_explained(run):
    """`explain` names the source line that holds most."""
    found = run("explain", *LOSS)
    assert found.exit_code == 0, found.output
    assert "toy_train.py:6 (loss)" in found.output


def test_a_frontier_is_printed_and_drawn(run, tmp_path):
    """`frontier` prints a table and writes a picture."""
    found = run("frontier", *LOSS, "--points", "4", "--plot", "f.png")
    assert found.exit_code == 0, found.output
    assert "√n segments" in found.output
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_a_function_is_examined(run, tmp_path):
    """`doctor` prints the findings with their fixes, and writes them."""
    found = run("doctor", "toy_train:loss", "--args", "toy_train:wide", "--json", "d.json")
    assert found.exit_code == 0, found.output
    written = json.loads((tmp_path / "d.json").read_text("utf-8"))
    assert written["measurement"]["temp_bytes"] > 0
    assert all(finding["fix"] in found.output for finding in written["findings"])
    assert "a plan saves" in {finding["kind"] for finding in written["findings"]}


def test_targets_are_listed(run):
    """`targets` lists devices that are not here, with their memory."""
    lines = run("targets").output.splitlines()
    assert ["h200", "141.0", "GiB"] in [line.split()[:3] for line in lines]
    assert any("in use here" in line for line in lines)


WRONG = {
    "no colon": (("plan", "toy_train", "--args", "toy_train:arrays"), 2, "not of the form MODULE:NAME"),
    "no module": (("plan", "no_such_one:f", "--args", "toy_train:arrays"), 2, "no module 'no_such_one'"),
    "no file": (("plan", "no_such.py:f", "--args", "toy_train:arrays"), 2, "no file no_such.py"),
    "no name": (("plan", "toy_train:lose", "--args", "toy_train:arrays"), 2, "It has: jax, jnp, loss"),
    "no arguments": (("explain", "toy_train:loss"), 2, "Missing option '--args'"),
    "no tuple": (("explain", "toy_train:loss", "--args", "toy_train:number"), 2, "a tuple of arguments, got a int"),
    "no arrays": (("explain", "toy_train:loss", "--args", "toy_train:nothing"), 2, "holds no arrays"),
    "no budget": (("plan", *LOSS, "--budget", "8 bananas"), 2, "Cannot read the budget '8 bananas'"),
    "a budget above 1": (("plan", *LOSS, "--budget", "1.5"), 2, "fraction in (0, 1]"),
    "a superscript": (("plan", *LOSS, "--budget", "\u00b2"), 2, "Cannot read the budget"),
    "a budget below 0": (("plan", *LOSS, "--budget=-5"), 2, "must be positive and finite, got '-5'"),
    "more than all": (("plan", *LOSS, "--budget", "150%"), 2, "fraction in (0, 1]"),
    "NUL in a function": (("plan", "toy\0train:loss", "--args", "toy_train:arrays"), 2, "not of the form MODULE:NAME"),
    "NUL in arguments": (("plan", "toy_train:loss", "--args", "toy_train:ar\0rays"), 2, "not of the form MODULE:NAME"),
    "NUL in a path": (("plan", *LOSS, "--no-verify", "--json", "a\0b.json"), 2, "cannot hold the character NUL"),
    "NUL in a picture": (("frontier", *LOSS, "--plot", "a\0b.png"), 2, "cannot hold the character NUL"),
    "NUL in a target": (("plan", *LOSS, "--target", "h\x00100"), 2, "no target"),
    "no planner": (("plan", *LOSS, "--planner", "chenn"), 2, "did you mean 'chen'"),
    "no target": (("plan", *LOSS, "--target", "h99"), 2, "no target 'h99'"),
    "no argnums": (("plan", *LOSS, "--argnums", "first"), 2, "--argnums takes whole numbers"),
    "too little": (("plan", *LOSS, "--budget", "10", "--no-verify"), 1, "below the least"),
    "not differentiable": (
        ("plan", "toy_train:loss", "--args", "toy_train:arrays", "--argnums", "5"),
        1,
        "names argument 5",
    ),
    "no folder": (("plan", *LOSS, "--no-verify", "--json", "no/such/folder.json"), 1, "no/such/folder.json"),
    "no picture": (("frontier", *LOSS, "--plot", "f.bananas"), 1, "f.bananas"),
}


@pytest.mark.parametrize(("args", "code", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said(run, args, code, words):
    """A wrong command ends with its exit code and says what is wrong, without a traceback."""
    found = run(*args)
    assert found.exit_code == code, found.output
    assert words in " ".join(found.output.split())
    assert isinstance(found.exception, SystemExit)


def test_a_module_that_cannot_be_imported_shows_its_own_error(run):
    """A fault in the user's module is theirs to see, not taken for a wrong name."""
    found = run("plan", "imports_what_is_missing:f", "--args", "toy_train:arrays")
    assert isinstance(found.exception, ModuleNotFoundError)
    assert found.exception.name == "no_such_module_at_all"


@pytest.mark.parametrize("command", ["", *main.commands])
def test_help_is_there(run, command):
    """Every command has help, and those about a function have examples."""
    found = run(*([command] if command else []), "--help")
    assert found.exit_code == 0
    assert command == "targets" or "jaxsub plan mypkg.train:loss" in found.output


def test_the_examples_are_commands_that_exist(run):
    """Each example of the help is parsed by the command it names."""
    for line in EXAMPLES.splitlines():
        if line.strip().startswith("jaxsub "):
            name, *rest = line.split()[1:]
            main.commands[name].make_context(name, [*rest])


def test_the_version_is_that_of_the_package(run):
    """`--version` says what is installed."""
    try:
        version = importlib.metadata.version("jaxsub")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxsub is imported from a checkout, not installed")
    assert version in run("--version").output
