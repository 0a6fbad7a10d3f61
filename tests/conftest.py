"""Settings of every test: the CPU, a disk cache that no earlier run has filled, hypothesis without deadlines."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import jax
import pytest
from processes import QUICK_FLAGS

pytest.register_assert_rewrite("counterparts", "six_layers")  # what they assert for tests is shown as tests' own
jax.config.update("jax_platforms", "cpu")

# Most of what tests compile runs once, in microseconds. Buffers are assigned before machine code is made, so what a
# program allocates is the same (tests/devices/test_compile.py compares it with optimised code).
jax.config.update("jax_disable_most_optimizations", True)


def generate_code_quickly() -> None:
    """Start XLA with the flags of `processes`."""
    with pytest.MonkeyPatch.context() as patch:  # read once, by this process alone
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}")
        jax.devices()


generate_code_quickly()

# A compile takes longer than any deadline; derandomised, so that a failure is there again in the next run.
hypothesis.settings.register_profile("jaxsub", deadline=None, max_examples=50, derandomize=True, database=None)
hypothesis.settings.load_profile("jaxsub")


LONG_FILES = ("tests/test_notebooks.py", "tests/test_docs.py")
"""Run first: were they last, as their names have it, one worker would wait for the other."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run take a part of the cells of parametrized tests."""
    parser.addoption("--part", default="1/1", help="run one of so many parts of each parametrized test, as 2/3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long unless `-m` names it (`-m "not slow"` alone does not), and cells of other parts."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FILES))
    left_out = set[pytest.Item]()
    if "exhaustive" not in config.option.markexpr:
        left_out.update(item for item in items if item.get_closest_marker("exhaustive"))
    part, n_parts = map(int, config.option.part.split("/"))
    tests: dict[str, list[pytest.Item]] = {}
    for item in (item for item in items if item not in left_out):
        tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cells in tests.values():
        step = min(n_parts, len(cells))
        left_out.update(set(cells).difference(cells[part % step :: step]))
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point the user's cache folder at an empty one for the whole session: what one worker has measured all find."""
    base = tmp_path_factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(session / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def few_collections() -> None:
    """Look for cycles of garbage less often: JAX's caches hold millions of objects that stay, and each look costs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture
def remat3() -> Iterator[None]:
    """JAX's new rematerialisation, switched on."""
    was = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", was)
