"""The command line: what it prints, what it writes, and how it fails."""

import importlib.metadata
import json
import subprocess
import sys
import warnings

import pytest
from click.testing import CliRunner

import jaxsub
from jaxsub.cli import main
from jaxsub.commands import EXAMPLES
from jaxsub.commands import main as commands
from jaxsub.core.plan import Plan
from jaxsub.core.step_plan import StepPlan

MODULE = """
import functools, jax, jax.numpy as jnp, jaxsub

def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

def example_args():
    s = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 12, s

def head(w, x):
    return jnp.mean(jax.nn.logsumexp(jnp.tanh(x @ w), -1))

classes = jax.ShapeDtypeStruct((16, 4096), jnp.float32), jax.ShapeDtypeStruct((1024, 16), jnp.float32)
arrays = ([jnp.ones((4, 4))] * 4, jnp.ones((8, 4)))
wide = ([jnp.ones((16, 16))] * 12, jnp.ones((512, 16)))
planned = jaxsub.sublinear(loss)
sized = jaxsub.sublinear(loss, budget=0.6, planner="chen", chunks=False)
decided = jaxsub.sublinear(loss, plan=jaxsub.Plan("f", jaxsub.Budget(), 1))

@functools.partial(jax.jit, donate_argnums=0)
def step(state, x):
    ws, moments = state
    ms = [0.9 * m + g for m, g in zip(moments, jax.grad(planned)(ws, x))]
    return [w - 0.1 * m for w, m in zip(ws, ms)], ms

fitted = jaxsub.jit(step.__wrapped__, memory="1GiB", donate_argnums=0)
stepped = jax.jit(lambda n, state, x: step(state, x), static_argnums=0)

def numbered():
    return 3, *state()

def state():
    s = jax.ShapeDtypeStruct((512, 16), jnp.float32)
    return ([jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 12,) * 2, s

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


@pytest.mark.parametrize(("asked", "counts"), [("auto", []), ("off", []), ("on", [32]), ("0=4", [4])])
def test_a_plan_is_made_in_slices_when_asked(run, tmp_path, asked, counts):
    """`--chunks`: in as many slices as are named; when on as many as products allow; else none."""
    done = run("plan", "toy_train:head", "--args", "toy_train:classes", "--chunks", asked, "--json", "p.json")
    assert done.exit_code == 0, done.output
    found = Plan.from_json((tmp_path / "p.json").read_text(encoding="utf-8"))
    assert [one.count for one in found.slices] == counts
    assert ("in slices" in done.output) == bool(counts)


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


def test_cards_are_written(run, tmp_path):
    """`explain` and `frontier` write what they found as pages."""
    for command in ("explain", "frontier"):
        found = run(command, *LOSS, "--html", f"{command}.html")
        assert found.exit_code == 0, found.output
        assert (tmp_path / f"{command}.html").read_text("utf-8").startswith("<!DOCTYPE html>")


STEP = ("toy_train:step", "--args", "toy_train:state", "--step")


def test_a_step_is_planned_and_its_plan_is_given_back(run, tmp_path):
    """`plan --step` plans all of a step, with the donations of its own `jax.jit`; what it writes `jaxsub.jit` takes."""
    found = run("plan", *STEP, "--budget", "0.8", "--json", "p.json", "--html", "p.html")
    assert found.exit_code == 0, found.output
    assert "loss: " in found.output
    plan = StepPlan.load(str(tmp_path / "p.json"))
    assert plan.measurement.alias_bytes > 0
    assert plan.measurement.step_bytes <= 0.8 * plan.plain_measurement.step_bytes
    assert (tmp_path / "p.html").read_text("utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("options", "budget", "planner"),
    [([], "60% of plain", "chen"), (["--budget", "0.7"], "70% of plain", "chen"),
     (["--planner", "optimal"], "60% of plain", "optimal")],
)  # fmt: skip
def test_the_options_of_a_planned_function_are_its_own_until_they_are_given(run, tmp_path, options, budget, planner):
    """A budget and a planner that a loss was decorated with hold, each unless the command gives another."""
    given = ("toy_train:sized", "--args", "toy_train:example_args", "--no-verify", "--json", "p.json")
    found = run("plan", *given, *options)
    assert found.exit_code == 0, found.output
    plan = Plan.load(str(tmp_path / "p.json"))
    assert (str(plan.budget), plan.planner) == (budget, planner)


def test_a_check_keeps_to_the_functions_own_budget(run):
    """It does not take what it takes planned without one."""
    checks = ("--args", "toy_train:example_args", "--check", "--max-memory", "1GiB", "--json", "-")
    taken = [json.loads(run("plan", f"toy_train:{f}", *checks).stdout)["needed_bytes"] for f in ("sized", "planned")]
    assert taken[0] != taken[1]


FITTED = ("toy_train:fitted", "--args", "toy_train:state", "--step")


def test_a_step_under_jaxsub_jit_takes_another_memory_and_donation(run, tmp_path):
    """What the command gives holds; without it the step's own does."""
    memory, donated = {}, {}
    for name, options in {"own": (), "less": ("--budget", "0.8"), "kept": ("--donate", "1")}.items():
        with warnings.catch_warnings(action="ignore"):  # the batch is donated in vain
            found = run("plan", *FITTED, *options, "--json", f"{name}.json")
        assert found.exit_code == 0, found.output
        plan = StepPlan.load(str(tmp_path / f"{name}.json"))
        memory[name], donated[name] = plan.memory_bytes, plan.measurement.alias_bytes
    assert memory["less"] < memory["own"] == memory["kept"] == 2**30
    assert donated["kept"] == 0 < donated["own"] == donated["less"]


@pytest.mark.parametrize("what", [STEP, LOSS])
@pytest.mark.parametrize(("memory", "code"), [("1GiB", 0), ("20KiB", 1)])
def test_a_memory_is_checked(run, what, memory, code):
    """`--check`: one line and an exit code; with `--json -` stdout is JSON that says what is needed."""
    found = run("plan", *what, "--check", "--max-memory", memory, "--json", "-")
    assert found.exit_code == code, found.output
    said = json.loads(found.stdout)
    assert said["fits"] is (code == 0)
    assert (said["needed_bytes"] > said["max_memory_bytes"]) is (code == 1)
    assert ("fits: " if code == 0 else "does not fit: ") in found.stderr


def test_one_command_plans_for_several_targets(run, tmp_path):
    """`--target a,b`: the plan of each, its own file, and where one is refused the others all the same."""
    args = ("plan", *LOSS, "--no-verify", "--budget", "0.5", "--target")
    found = run(*args, "v100,a100,h100,h200", "--json", "{target}.json", "--html", "{target}.html")
    assert found.exit_code == 0, found.output
    for name in ("v100", "a100", "h100", "h200"):
        assert f"{name}:\n{Plan.load(str(tmp_path / f'{name}.json'))}" in found.output
        assert (tmp_path / f"{name}.html").exists()
    found = run("plan", *STEP, "--target", "v100,cpu", "--budget", "10", "--json", "{target}.json")
    assert found.exit_code == 1
    assert [found.output.count(f"{name}:\n") for name in ("v100", "cpu")] == [1, 1]
    assert found.output.count("the least") == 2
    assert not (tmp_path / "cpu.json").exists()


def test_targets_are_listed(run):
    """`targets` lists devices that are not here, with their memory."""
    lines = run("targets").output.splitlines()
    assert ["h200", "141.0", "GiB"] in [line.split()[:3] for line in lines]
    assert any("in use here" in line for line in lines)


WRONG = {
    "no colon": (("plan", "toy_train", "--args", "toy_train:arrays"), 2, "not of the form MODULE:NAME"),
    "no module": (("plan", "no_such_one:f", "--args", "toy_train:arrays"), 2, "no module 'no_such_one'"),
    "no file": (("plan", "no_such.py:f", "--args", "toy_train:arrays"), 2, "no file no_such.py"),
    "no name": (("plan", "toy_train:lose", "--args", "toy_train:arrays"), 2, "It has: functools, jax, jnp"),
    "no arguments": (("explain", "toy_train:loss"), 2, "Missing option '--args'"),
    "no tuple": (("explain", "toy_train:loss", "--args", "toy_train:number"), 2, "nor returns one: it is of type int"),
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
    "no step": (("plan", *STEP), 2, "--step needs --budget or --max-memory"),
    "static arguments": (
        ("plan", "toy_train:stepped", "--args", "toy_train:numbered", "--step", "--budget", "0.8"),
        2,
        "the step has static arguments",
    ),
    "no memory to check": (("plan", *LOSS, "--check"), 2, "--check needs --max-memory"),
    "a fraction to check": (("plan", *LOSS, "--check", "--max-memory", "0.5"), 2, "--max-memory takes bytes"),
    "no planner": (("plan", *LOSS, "--planner", "chenn"), 2, "did you mean 'chen'"),
    "chunks of no count": (
        ("plan", *LOSS, "--chunks", "head=many"),
        2,
        "such as head=8 or head=8,0=4; got 'head=many'",
    ),
    "chunks of one": (("plan", *LOSS, "--chunks", "head=4,0=1"), 2, "a count of at least 2, such as head=8"),
    "chunks without a name": (("plan", *LOSS, "--chunks", "=8"), 2, "--chunks takes auto, on, off, or NAME=COUNT"),
    "chunks of a long number": (("plan", *LOSS, "--chunks", "0=" + "9" * 5000), 2, "--chunks takes auto, on, off"),
    "chunks as a word": (("plan", *LOSS, "--chunks", "yes"), 2, "--chunks takes auto, on, off, or NAME=COUNT"),
    "chunks twice": (("plan", *LOSS, "--chunks", "head=4,head=8"), 2, "--chunks names 'head' twice"),
    "chunks of no scope": (("plan", *LOSS, "--chunks", "head=8"), 2, "no equation is in a named scope or function"),
    "chunks of an axis": (("plan", *LOSS, "--chunks", "0=65"), 2, "the axis has no more than 64 units"),
    "chunks in a step": (
        ("plan", *STEP, "--chunks", "on", "--budget", "0.8"),
        2,
        "pass chunks= to its jaxsub.sublinear",
    ),
    "no target": (("plan", *LOSS, "--target", "h99"), 2, "no target 'h99'"),
    "one file for two": (("plan", *LOSS, "--target", "cpu,h100", "--json", "p.json"), 2, "'{target}' in 'p.json'"),
    "no second target": (("plan", *LOSS, "--target", "cpu,h99"), 2, "no target 'h99'"),
    "a donation by no step": (("plan", *LOSS, "--donate", "0"), 2, "it needs --step"),
    "no donation": (("plan", *STEP, "--budget", "0.8", "--donate", "x"), 2, "--donate takes whole numbers"),
    "no argument to donate": (
        ("plan", *STEP, "--budget", "0.8", "--donate", "9"),
        2,
        "--donate names argument 9, but --args gives 2",
    ),
    "no function": (("plan", "toy_train:number", "--args", "toy_train:arrays"), 2, "is no function: it is of type int"),
    "a planned function": (
        ("plan", "toy_train:decided", "--args", "toy_train:arrays", "--budget", "0.5"),
        2,
        "plan= is made already; it needs no budget=",
    ),
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


@pytest.mark.parametrize("command", ["", *commands.commands])
def test_help_is_there(run, command):
    """Every command has help, and those about a function have examples."""
    found = run(*([command] if command else []), "--help")
    assert found.exit_code == 0
    assert command in ("", "targets") or "jaxsub plan mypkg.train:loss" in found.output
    assert command or all(name in found.output for name in commands.commands)


def test_the_examples_are_commands_that_exist(run):
    """Each example of the help is parsed by the command it names."""
    for line in EXAMPLES.splitlines():
        if line.strip().startswith("jaxsub "):
            name, *rest = line.split()[1:]
            commands.commands[name].make_context(name, [*rest])


def test_the_version_is_that_of_the_package(run):
    """`--version` says what is installed."""
    try:
        version = importlib.metadata.version("jaxsub")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxsub is imported from a checkout, not installed")
    assert version in run("--version").output
    assert version == jaxsub.__version__


def test_the_version_needs_no_jax():
    """`--version` answers without importing JAX: in well under a second."""
    code = "import sys; from jaxsub.cli import main; main(['--version'], standalone_mode=False)"
    code += "; print('jax' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.splitlines()[-1] == "False", found.stderr
