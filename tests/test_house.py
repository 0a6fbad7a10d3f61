"""The house: what may import what, how large a file may grow, and that every public name is explained."""

import ast
import doctest
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest

import jaxsub

pytestmark = pytest.mark.once
ROOT = Path(jaxsub.__file__).parent.parent
ORDER = """
core: __init__ tuning shown measurement errors checks wrapped budget graph decisions codec chain passes output_reuse
    timeline simulate steps folder disk_cache stored figures plan step_plan
allocator: gradient allocation __init__
planners: memo milp_model milp_nested quantize dp_tables select baselines cheap chen recursive
    revolve split_regions optimal auto milp __init__
jaxpr: __init__ hi_primitives policy_calls compat flops new_equations derivative_rules rule_residuals identity inline
    max_pool_vjp grouped_conv_vjp ragged_products output_only_vjp shardings static_leaves tangents trace late_zeros
    own_rules constants differences arguments linearity axis_places random_bits axis axis_rules axis_inverse axis_bodies
    axis_origin axes product_rows
devices: __init__ cuda_plugin aot_worker targets aot compile
partition: __init__ cuts inner_gradients blocks inner_programs run_function traced_run min_cut
emission: __init__ barriers offload at_slice chunks regions scan_unrolling scans bodies own_regions clones
    forms folding emit
costs: __init__ body_options fusible hoisted_constants scheduler multi_output_fusion
    split_k narrow_floats library_calls operation_counts priority_fusion fusion live_ranges cond_options dead_inputs
    roofline slice_time step_options scan_options chain_builder
search: __init__ bracket compile_worth by_hand slice_seeds run_spans found_run slicing sliceable belonging candidates
    name_overrides named_policy verify propagated budget_search sliced_program fewest_slices slice_search
    frontier_points repeated_effects forms plan_cache progress annotate pipeline unsaid_shardings call_sites
api: __init__ frontier explain sublinear xla_timeline
step: __init__ ahead_of_time flat_step ordered_updates fused_update options attempt ladder sizing kept_plans device
    report given jit max_batch
diagnosis: __init__ findings subject traced compared doctor
policies: kinds names remat3 wrap __init__
flax: linen nnx overrides __init__
equinox: filtered __init__
show: __init__ curves loops text chart plot html
"""
"""Folders in the order in which data flows, and the modules of each: a module imports only modules before it."""

FRONT = ("__init__", "commands", "cli", "__main__")
DOWNWARD = {
    ("core.plan", "search.named_policy"),
    ("core.plan", "show.plot"),
    ("core.shown", "show.html"),
    ("core.shown", "show.text"),
    ("api.frontier", "show.plot"),
    ("api.xla_timeline", "show.plot"),
}
"""Imports against the order, each named: `TYPE_CHECKING` ones, and those of a method that displays or exports."""

DISPLAY = ("__str__", "_repr_html_", "plot", "to_html", "to_policy")
WITHOUT_JAX = ("core", "allocator", "planners")
FORBIDDEN = {"emission": ("planners", "costs")}
FILES = sorted((ROOT / "jaxsub").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PUBLIC_NAMES, MAX_README_LINES = 420, 60, 30, 119


def modules_in_order() -> list[str]:
    """Every module of the library, in the order of `ORDER`."""
    found: list[str] = []
    for folder, names in re.findall(r"^(\w+):((?:\s+\w+(?!:))+)$", ORDER, re.MULTILINE):
        found += [f"{folder}.{name}" for name in names.split()]
    return [*found, *FRONT]


MODULES = modules_in_order()


def module_of(path: Path) -> str:
    """A file's module, without the library's own name."""
    return ".".join(path.relative_to(ROOT / "jaxsub").with_suffix("").parts)


def is_module(name: str) -> bool:
    """Whether a name in full is a module or a folder of the library."""
    rest = name.partition(".")[2]
    return rest in MODULES or f"{rest}.__init__" in MODULES


def imported(tree: ast.AST, is_free: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module a file names in an import, and whether only a type checker or a display method reads it."""
    for node in ast.iter_child_nodes(tree):
        free = is_free or (isinstance(node, ast.FunctionDef) and node.name in DISPLAY)
        free = free or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        if isinstance(node, ast.Import):
            yield from ((alias.name, free) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            inner = [name for a in node.names if is_module(name := f"{module}.{a.name}")]
            yield from ((name, free) for name in inner or [module])
        yield from imported(node, free)


def import_faults(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a file."""
    return [
        fault
        for name, is_free in imported(ast.parse(source))
        for fault in (library_fault(module, name, is_free), jax_fault(module, name))
        if fault is not None
    ]


def library_fault(module: str, name: str, is_free: bool) -> str | None:
    """What is wrong with an import of a module of the library."""
    top, _, other = name.partition(".")
    if top == "":
        return f"{name}: name the module in full"
    if top != "jaxsub":
        return None
    other = other or "__init__"
    other = other if other in MODULES else f"{other}.__init__"
    if other not in MODULES:
        return f"{name}: no module of the house"
    if other.partition(".")[0] in FORBIDDEN.get(module.partition(".")[0], ()):
        return f"{name}: not for {module.partition('.')[0]}"
    if MODULES.index(other) >= MODULES.index(module) and not (is_free and (module, other) in DOWNWARD):
        return f"{name}: stands below {module}"
    return None


def jax_fault(module: str, name: str) -> str | None:
    """What is wrong with an import of JAX."""
    if name.split(".")[0] in ("jax", "jaxlib", "flax", "equinox", "optax") and module.split(".")[0] in WITHOUT_JAX:
        return f"{name}: {module.split('.')[0]} knows no JAX"
    if name.startswith("jax._src") and module != "jaxpr.compat":
        return f"{name}: private, for compat.py alone"
    return None


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring left out."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    return (function.end_lineno or 0) - function.lineno + 1 - has_docstring * (first.end_lineno - first.lineno + 1)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_modules_above_it(path):
    """Imports run one way, folders without JAX import none, and private JAX is known to compat.py alone."""
    assert module_of(path) in MODULES, "a new module needs its place in ORDER"
    assert import_faults(module_of(path), path.read_text("utf-8")) == []


def test_the_order_lists_the_modules_that_are_there():
    """Every module of the order is a file, listed once."""
    assert sorted(MODULES) == sorted(map(module_of, FILES))


@pytest.mark.parametrize(
    ("module", "source", "word"),
    [
        ("core.graph", "from jaxsub.core.plan import Plan", "below"),
        ("emission.emit", "from jaxsub.api import sublinear", "below"),
        ("core.chain", "def f():\n    import jax.numpy as jnp", "no JAX"),
        ("emission.emit", "from jax._src import core", "private"),
        ("emission.emit", "from . import trace", "in full"),
        ("emission.emit", "from jaxsub.cellar import wine", "no module"),
        ("emission.emit", "from jaxsub.planners import get", "not for"),
        ("core.budget", "class B:\n    def plot(self):\n        from jaxsub.show.plot import draw", "below"),
        ("core.plan", "class Plan:\n    def save(self):\n        from jaxsub.show.text import describe", "below"),
    ],
)
def test_the_import_check_can_fail(module, source, word):
    """Each wrong import is found, wherever in the file it stands."""
    assert [fault for fault in import_faults(module, source) if word in fault]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.shown", "class Shown:\n    def __str__(self):\n        from jaxsub.show.text import describe"),
        ("core.shown", "class Shown:\n    def __str__(self):\n        from jaxsub.show.text import words_of"),
    ],
)
def test_named_imports_against_the_order_are_allowed(module, source):
    """A display method, and what only a type checker reads, may import what `DOWNWARD` names."""
    assert import_faults(module, source) == []


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
    """The docstring of a public function names each argument."""
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


def _collected(items, expression="", part="1/1"):
    """What is left of some tests, and how many were deselected."""
    deselected = []
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression, part=part))
    config.hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    conftest.pytest_collection_modifyitems(config, items)
    return items, len(deselected)


class _Test:
    def __init__(self, name, mark=None):
        self.nodeid, self.mark = name, mark

    def get_closest_marker(self, name):
        return self.mark


@pytest.mark.parametrize(("expression", "left"), [("", ["short"]), ("not slow", ["short"]), ("exhaustive", ["long"])])
def test_what_takes_long_runs_only_where_it_is_asked_for(expression, left):
    """`-m "not slow"` does not switch on the tests marked `exhaustive`."""
    items, deselected = _collected([_Test("long", True), _Test("short")], expression)
    if expression == "exhaustive":  # what is not marked pytest's own -m leaves out
        items = [item for item in items if item.get_closest_marker("exhaustive")]
    assert [item.nodeid for item in items] == left
    assert deselected == (expression != "exhaustive")


@pytest.mark.parametrize("n_cells", range(1, 9))
def test_parts_of_tests_make_up_all(n_cells):
    """`--part=2/3` runs every test, a third of the cells of a parametrized one; all three parts run all cells."""
    seen = []
    for part in ("1/3", "2/3", "3/3"):
        cells = [_Test("many[long]", True), *(_Test(f"many[{i}]") for i in range(n_cells))]
        left, deselected = _collected([_Test("one"), *cells], part=part)
        assert left[0].nodeid == "one"
        assert 2 <= len(left) <= 2 + n_cells // 3
        assert len(left) + deselected == 2 + n_cells
        seen += [item.nodeid for item in left]
    assert len(set(seen)) == 1 + n_cells
