"""The pages under `docs/` and `CONTRIBUTING.md`: their code runs, and no public name, page or folder is missing.

The pages are built, and every link and anchor checked, by `mkdocs build --strict -f docs/mkdocs.yml`; what is tested
here needs no MkDocs.
"""

import ast
import logging
import pkgutil
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
from test_house import ORDER

import jaxsub
from jaxsub import planners

ROOT = Path(jaxsub.__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))
BLOCK = re.compile(r"^```python[^\n]*\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
REFERENCE = re.compile(r"^::: (?P<name>[\w.]+)", re.MULTILINE)
OPTIONAL = {"keras": "keras", "haiku": "dm-haiku", "penzai": "penzai"}
"""Packages that an environment may lack, and what they are installed as; blocks that import them are then left out."""


def blocks_of(text):
    """A page's blocks of Python, each with the number of lines above it."""
    return [(text[: m.start("code")].count("\n"), m["code"]) for m in BLOCK.finditer(text)]


def run(path, text):
    """Execute a page's blocks from top to bottom, as a reader would who copies them; lines are those of the page."""
    names = {"__name__": path.stem}
    for line, code in blocks_of(text):
        needed = [name for name in OPTIONAL if re.search(rf"^(import|from) {name}\b", code, re.MULTILINE)]
        if any(find_spec(name) is None for name in needed):
            continue
        tree = ast.increment_lineno(ast.parse(code), line)
        exec(compile(tree, str(path), "exec"), names)


@pytest.mark.parametrize("path", [p for p in PAGES if blocks_of(p.read_text("utf-8"))], ids=lambda p: p.stem)
def test_the_code_of_a_page_runs(path, tmp_path, monkeypatch):
    """Every block of Python runs where the page has it, after those above it, and leaves JAX's settings alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planners, "_TABLE", dict(planners._TABLE))  # planners that pages register are theirs alone
    monkeypatch.setattr(logging.getLogger("jaxsub.planning"), "level", logging.NOTSET)  # a page shows what it logs
    before = jax.config.values.copy()
    run(path, path.read_text("utf-8"))
    assert jax.config.values == before


def test_first_steps_change_few_lines():
    """Each program of the first steps highlights the lines that speak of jaxsub, and these are fewer than ten."""
    text = (ROOT / "docs" / "pages" / "first_steps.md").read_text("utf-8")
    programs = re.findall(r'^```python title="[\w.]+" hl_lines="([\d ]+)"\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
    assert len(programs) == 6
    for shown, code in programs:
        speaking = [n for n, line in enumerate(code.splitlines(), 1) if "jaxsub" in line or "loss.plan" in line]
        assert speaking == [int(n) for n in shown.split()]
        assert len(speaking) < 10


def test_a_block_that_fails_is_noticed():
    """A name that no block above defines is an error, at the line of the page."""
    with pytest.raises(NameError, match="modell"):
        run(Path("page.md"), "Text.\n\n```python\nmodell.apply(1)\n```\n")


def test_every_public_name_has_a_reference():
    """What `jaxsub.__all__` lists, and what the public modules list, has an entry in `docs/pages/reference`."""
    found = {name for path in PAGES for name in REFERENCE.findall(path.read_text("utf-8"))}
    assert {f"jaxsub.{name}" for name in jaxsub.__all__} - found == set()


def test_every_reference_is_there():
    """An entry names something that can be imported."""
    names = [name for path in PAGES for name in REFERENCE.findall(path.read_text("utf-8"))]
    assert len(names) >= len(jaxsub.__all__)
    for name in names:
        assert pkgutil.resolve_name(name) is not None


def test_every_page_is_in_the_menu():
    """The menu lists each page once."""
    menu = re.findall(r"([\w/]+\.md)$", (ROOT / "docs" / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(str(p.relative_to(ROOT / "docs" / "pages")) for p in PAGES)


def test_what_pages_need_is_installed_with_the_gauntlet():
    """A package that only pages import is among those of the extra `gauntlet`: CI runs the page of recipes with it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert [name for name in OPTIONAL.values() if not any(re.match(rf"{name}\b", n) for n in extras["gauntlet"])] == []
    assert "tests/test_docs.py -k other_libraries" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_contributing_has_every_folder_in_order():
    """The map of folders lists those of the library, in the order in which data flows."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)/` \|", contributing, re.MULTILINE) == re.findall(r"^(\w+):", ORDER, re.MULTILINE)
