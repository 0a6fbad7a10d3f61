"""The house: what may import what, how large a file may grow, and that every public name is explained."""

import ast
import doctest
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxsub

ROOT = Path(jaxsub.__file__).parent.parent
PLAIN = ("errors", "budget", "graph", "memory", "ways", "chain", "hosting", "replay", "timeline", "plan", "planners")
JAX_WING = (
    "compat",
    "flops",
    "store",
    "targets",
    "crosscompile_child",
    "crosscompile",
    "compiled",
    "spread",
    "signatures",
    "program",
    "stages",
    "pooling",
    "results",
    "options",
    "hoisting",
    "turning",
    "kernels",
    "siblings",
    "products",
    "fusible",
    "fusing",
    "analytic",
    "offload",
    "seconds",
    "spent",
    "fences",
    "probes",
    "asking",
    "tangents",
    "alike",
    "regions",
    "loops",
    "waycosts",
    "pricing",
    "emit",
    "wishes",
    "verify",
    "offers",
    "repair",
    "shelf",
    "planning",
    "leaves",
    "statics",
    "frontier",
    "explain",
)
FRONT = (
    "policies",
    "sites",
    "api",
    "sizing",
    "holders",
    "step",
    "batches",
    "frontier",
    "explain",
    "schedule",
    "flax",
    "show",
    "cli",
    "__init__",
    "__main__",
)
DISPLAY = ("__str__", "_repr_html_", "plot", "to_html")
ORDER = PLAIN + JAX_WING + FRONT
FILES = sorted((ROOT / "jaxsub").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PUBLIC_NAMES, MAX_README_LINES = 420, 60, 24, 119


def room_of(path: Path) -> str:
    """The room a file stands in: its own name, or its folder's."""
    return path.relative_to(ROOT / "jaxsub").parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module a file names in an import that runs.

    Left out is what only a type checker sees, and what a method that shows something imports when it is called.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name in DISPLAY:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ([f"jaxsub.{a.name}" for a in node.names] if module == "jaxsub" else [module])
        yield from imported(node)


def import_faults(room: str, source: str) -> list[str]:
    """What is wrong with the imports of a file that stands in `room`."""
    faults = []
    for module in imported(ast.parse(source)):
        top, _, rest = module.partition(".")
        if top == "" or module == "jaxsub":
            faults.append(f"{module or '.'}: name the room in full")
        elif top == "jaxsub":
            other = rest.split(".")[0]
            if other not in ORDER:
                faults.append(f"{module}: no room of the house")
            elif ORDER.index(other) > ORDER.index(room):
                faults.append(f"{module}: stands below {room}")
        elif top in ("jax", "jaxlib", "flax", "optax") and room in PLAIN:
            faults.append(f"{module}: the plain wing knows no JAX")
        if module.startswith("jax._src") and room != "compat":
            faults.append(f"{module}: private, for compat.py alone")
    return faults


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring left out."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    return (function.end_lineno or 0) - function.lineno + 1 - has_docstring * (first.end_lineno - first.lineno + 1)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_rooms_above_it(path):
    """Imports run one way, the plain wing knows no JAX, and private JAX is known to compat.py alone."""
    assert room_of(path) in ORDER, "a new room needs its place in the order"
    assert import_faults(room_of(path), path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("room", "source", "word"),
    [
        ("graph", "from jaxsub.plan import Plan", "below"),
        ("emit", "from jaxsub import api", "below"),
        ("chain", "def f():\n    import jax.numpy as jnp", "plain wing"),
        ("emit", "from jax._src import core", "private"),
        ("emit", "from . import program", "in full"),
        ("emit", "from jaxsub.cellar import wine", "no room"),
    ],
)
def test_the_import_check_can_fail(room, source, word):
    """Each wrong import is found, wherever in the file it stands."""
    assert [fault for fault in import_faults(room, source) if word in fault]


def test_what_shows_a_plan_may_point_down():
    """A method that shows something may import what draws it, when it is called; others may not."""
    source = "class Plan:\n    def {}(self):\n        from jaxsub.show.text import describe"
    assert import_faults("plan", source.format("__str__")) == []
    assert import_faults("plan", source.format("save"))


def test_imports_for_a_type_checker_are_free():
    """What only a type checker sees may point down."""
    assert import_faults("errors", "if TYPE_CHECKING:\n    from jaxsub.plan import Plan") == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    """A file is a screenful of ideas, a function one of them, and every file says what it is for."""
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(tree)
    assert [f.name for f in functions(tree) if length_without_docstring(f) > MAX_FUNCTION_LINES] == []


def test_the_length_of_a_function_leaves_its_docstring_out():
    """Explaining more never makes a function too long."""
    (function,) = functions(ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n'))
    assert length_without_docstring(function) == 3


def test_public_names_are_few_and_there():
    """`__all__` lists every public name once, and nothing that is missing."""
    assert len(set(jaxsub.__all__)) == len(jaxsub.__all__) <= MAX_PUBLIC_NAMES
    assert [name for name in jaxsub.__all__ if not hasattr(jaxsub, name)] == []


@pytest.mark.parametrize("name", getattr(jaxsub, "__all__", ()))
def test_every_public_name_is_explained(name):
    """A public name has a docstring; a function also has an example that runs."""
    item = getattr(jaxsub, name)
    assert inspect.getdoc(item)
    if inspect.isfunction(item):
        examples = [e for test in doctest.DocTestFinder().find(item, name) for e in test.examples]
        assert examples, f"{name} needs an example"
        assert not [e.source for e in examples if doctest.SKIP in e.options]


@pytest.mark.parametrize("name", getattr(jaxsub, "__all__", ()))
def test_every_public_function_explains_its_arguments(name):
    """Each argument of a public function stands in its docstring."""
    item = getattr(jaxsub, name)
    if inspect.isfunction(item):
        doc = inspect.getdoc(item) or ""
        assert [p for p in inspect.signature(item).parameters if p not in doc] == []


def test_errors_are_one_family():
    """Every public exception derives from JaxsubError."""
    errors = [getattr(jaxsub, n) for n in jaxsub.__all__ if n.endswith("Error")]
    assert len(errors) >= 7
    assert all(issubclass(error, jaxsub.JaxsubError) for error in errors)


def test_the_type_marker_is_shipped():
    """Type checkers of users see jaxsub's types."""
    assert (ROOT / "jaxsub" / "py.typed").exists()


def test_doctests_and_warnings_are_on():
    """pytest runs the examples in docstrings and takes a warning for an error."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    assert "--doctest-modules" in options["addopts"]
    assert "jaxsub" in options["testpaths"]
    assert "error" in options["filterwarnings"]


def test_the_readme_is_short():
    """The README is read in one sitting."""
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MAX_README_LINES
