"""JAX's own tests of `jax.checkpoint`, run with `sublinear` in its place wherever no policy is given.

    python tests/remat/jax_remat_tests.py JAX/tests/api_test.py

takes class `RematTest` from a checkout of the installed version of JAX, rewrites the calls, and runs each test twice:
with a plan of our own making, counted and not compiled (some tests count compiles), and with a plan that makes the
whole function one region, as `jax.checkpoint` does. A test that fails must be in the table below with its reason, and
one in the table must fail; otherwise it exits with 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import jax

import jaxsub

CHOICE = "counts what runs again, which a plan chooses: with little to save it saves it; passes as one region"
WHOLE: dict[str, str] = {
    "test_linearize_caching": "wants one lowering; a product has been lowered by the tests before it, and is not again",
    "test_name_stack_annotation": "wants one line with the region's name; its calls are inlined, each equation has it",
}
PLANNED: dict[str, str] = {
    **WHOLE,
    "test_remat_basic": CHOICE,
    "test_remat_eval_counter": CHOICE,
    "test_remat_scan": CHOICE,
    "test_remat_of_scan": CHOICE,
    "test_remat_of_cond": CHOICE,
    "test_remat_residual_logging": "reads what JAX logs of a region's residuals; where all is saved there is no region",
    "test_no_cse_widget_on_primals": "looks for no barrier in the forward pass; a plan's gradient barriers stand there",
}
FORMS = {
    "planned": (PLANNED, {"verify": False}),
    "one region": (WHOLE, {"mirror": lambda node: int(node.can_recompute)}),
}

checkpoint = jax.checkpoint


def substitute(options: dict[str, Any]) -> Any:
    """Replace `jax.checkpoint`, except where a policy or `prevent_cse` is given."""

    def wrap(fun: Any = None, *, static_argnums: Any = (), **kwargs: Any) -> Any:
        if fun is None:
            return lambda f: wrap(f, static_argnums=static_argnums, **kwargs)
        if kwargs.get("policy") is not None or kwargs.get("prevent_cse", True) is not True:
            return checkpoint(fun, static_argnums=static_argnums, **kwargs)
        return jaxsub.sublinear(fun, static_argnums=static_argnums, cache=False, progress=False, **options)

    return wrap


def remat_tests(path: Path, options: dict[str, Any]) -> type[unittest.TestCase]:
    """Class `RematTest` with the calls of `jax.checkpoint` rewritten."""
    lines = path.read_text("utf-8").splitlines()
    classes = [i for i, line in enumerate(lines) if line.startswith("class ")]
    start = next(i for i in classes if lines[i].startswith("class RematTest"))
    stop = next(i for i in classes if i > start)
    while not lines[stop - 1].strip() or lines[stop - 1].startswith("@"):
        stop -= 1
    body = re.sub(
        r"\b(jax|api)\.(checkpoint|remat)\b(?!_)|\bnew_checkpoint\b", "SUBSTITUTE", "\n".join(lines[start:stop])
    )
    module = types.ModuleType("jax_remat_tests_of_jax")
    sys.modules[module.__name__] = module
    vars(module)["SUBSTITUTE"] = substitute(options)
    exec(
        compile("\n".join(lines[: classes[0]]) + "\n" * (start - classes[0] + 1) + body, str(path), "exec"),
        vars(module),
    )
    return module.RematTest


def main() -> int:
    """Run all tests in both forms; say what failed, and why it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="tests/api_test.py of a checkout of JAX")
    parser.add_argument("--form", choices=FORMS, action="append", help="one of the two forms alone")
    parser.add_argument("--show", action="store_true", help="show the traceback of each failure")
    given = parser.parse_args()
    wrong = 0
    for form in given.form or FORMS:
        reasons, options = FORMS[form]
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(remat_tests(given.path, options)).run(result)
        failed = {test.id().rpartition(".")[2]: text for test, text in (*result.failures, *result.errors)}
        bare = {name.removesuffix("_new").removesuffix("_policy") for name in failed}
        n_passed = result.testsRun - len(failed) - len(result.skipped)
        print(f"{form}: {n_passed} of {result.testsRun - len(result.skipped)} pass, JAX skips {len(result.skipped)}")
        for name, text in sorted(failed.items()):
            known = reasons.get(name) or reasons.get(name.removesuffix("_new").removesuffix("_policy"))
            wrong += known is None
            print(f"  {name}: {known or 'NO REASON: ' + text.strip().splitlines()[-1]}")
            if given.show:
                print(text)
        for name in sorted(set(reasons) - bare - set(failed)):
            wrong += 1
            print(f"  {name} passes, but is in the table")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
