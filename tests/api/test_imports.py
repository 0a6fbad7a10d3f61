"""What `import jaxsub` loads, and what is said where an optional package is missing."""

import os
import subprocess
import sys

import pytest

LATER = "scipy tqdm click platformdirs matplotlib flax equinox optax treescope jinja2".split()
"""What is loaded where it is used, not by `import jaxsub`."""

BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import jax, jax.numpy as jnp, jaxsub
loss = lambda w, x: (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean()
w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
{code}
"""


def run(code, **settings):
    env = {**os.environ, **settings}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env, check=False
    )


def test_what_import_jaxsub_leaves_for_later():
    """Importing jaxsub loads none of the packages that only some uses need, beyond what JAX loads itself."""
    found = run(
        f"import sys, jax; before = set(sys.modules); import jaxsub; print([n for n in {LATER} if n in sys.modules and "
        "n not in before])"
    )
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


def test_import_jaxsub_is_quick():
    """What jaxsub adds to `import jax`, its own modules and all they bring, takes at most .3 s of processor time."""
    code = "import jax, time; start = time.process_time(); import jaxsub; print(time.process_time() - start)"
    # bytecode is kept from the first time on, as it is of what is installed
    assert min(float(run(code, PYTHONDONTWRITEBYTECODE="").stdout) for _ in range(3)) <= 0.3


MISSING = {
    "flax equinox matplotlib": {
        "jaxsub.flax.linen": 'jaxsub.flax needs Flax: pip install "jaxsub[flax]"',
        "import jaxsub.flax.nnx": 'jaxsub.flax needs Flax: pip install "jaxsub[flax]"',
        "jaxsub.equinox.filter_jit": 'jaxsub.equinox needs Equinox: pip install "jaxsub[equinox]"',
        "jaxsub.plan(loss, w, x, verify=False).plot()": 'pip install "jaxsub[plot]"',
    },
    "jinja2": {"jaxsub.plan(loss, w, x, verify=False).to_html()": 'pip install "jaxsub[plot]"'},
}
"""Uses of what is not installed, and what is said: each needs one of the packages, so that one process tries all."""

TOLD = """
for use in {uses}:
    try:
        exec(use)
    except ImportError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("packages", MISSING)
def test_a_missing_package_is_named_with_its_extra(packages):
    """Without an optional package the error says which it is, and the extra that brings it."""
    uses = MISSING[packages]
    found = run(BLOCKED.format(blocked={*packages.split()}, code=TOLD.format(uses=list(uses))))
    told = found.stdout.splitlines()
    assert len(told) == len(uses), found.stdout + found.stderr
    for line, words in zip(told, uses.values(), strict=True):
        assert line.startswith("ImportError ")
        assert words in line


def test_jaxsub_works_without_any_optional_package():
    """With nothing installed but what jaxsub requires, a loss is planned, called, printed and measured."""
    code = (
        "f = jaxsub.sublinear(loss, cache=False)\njax.grad(f)(w, x)\nprint(f.plan(w, x), jaxsub.measure(loss, w, x))\n"
        "jaxsub.explain(loss, w, x)\nassert 'flax' not in sys.modules"
    )
    blocked = {"flax", "equinox", "jinja2", "matplotlib", "optax", "treescope", "IPython"}
    found = run(BLOCKED.format(blocked=blocked, code=code))
    assert found.returncode == 0, found.stderr
    assert "jaxsub plan by" in found.stdout


def test_what_plans_are_made_of_needs_no_jax():
    """Graphs, chains, plans and planners are imported without JAX."""
    code = "import sys, jaxsub.core.graph, jaxsub.core.plan, jaxsub.planners; print('jax' in sys.modules)"
    assert run(code).stdout.strip() == "False"


def test_every_public_name_is_found_where_it_lives():
    """What `__all__` names can be had, and nothing else."""
    code = "import jaxsub; print(all(getattr(jaxsub, name) is not None for name in jaxsub.__all__)); jaxsub.no_such"
    found = run(code)
    assert found.stdout.strip() == "True"
    assert "has no attribute 'no_such'" in found.stderr
