"""The notebooks run, are stored with what they show, and say nothing of the machine they were run on."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from processes import quickly

import jaxsub

pytestmark = pytest.mark.once
ROOT = Path(jaxsub.__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PATHS = re.compile(
    r"(?:^|[\s\"'(=])(?:/(?:home|root|tmp|usr|opt|work|mnt|Users|private|var)/|[A-Z]:\\)[\w.\-]", re.MULTILINE
)
PICTURES = ("image/png", "text/html")


def outputs(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    """What the cells of a notebook put out."""
    return (output for cell in notebook.cells for output in cell.get("outputs", ()))


def texts(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """All text of a notebook: its sources, and its outputs but for pictures."""
    yield from (cell.source for cell in notebook.cells)
    for output in outputs(notebook):
        yield output.get("text", "")
        yield from (data for kind, data in output.get("data", {}).items() if not kind.startswith("image/"))


def test_the_notebooks_are_there():
    """Four notebooks, in order."""
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """Every cell of a notebook runs in a kernel of its own."""
    for name, value in quickly().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel chooses its own, which shows pictures
    if "flax" in path.stem:
        pytest.importorskip("flax")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    assert any(output.output_type == "display_data" for output in outputs(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_stored_as_it_ran(path):
    """A stored notebook is valid, ran from top to bottom without errors or warnings, and shows its pictures."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"]
    assert any(kind in output.get("data", {}) for output in outputs(notebook) for kind in PICTURES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_says_nothing_of_a_machine(path):
    """No notebook names a folder of the machine that ran it."""
    notebook = nbformat.read(path, as_version=4)
    assert [found for text in texts(notebook) for found in PATHS.findall(text)] == []


@pytest.mark.parametrize(
    "text", ["File /home/me/model.py:3", "see '/tmp/ipykernel_1/2.py'", "C:\\Users\\me", "/root/x"]
)
def test_the_check_for_folders_can_fail(text):
    """Folders of machines are found, wherever in a text they stand."""
    assert PATHS.findall(text)


@pytest.mark.parametrize("name", [n for n in jaxsub.__all__ if callable(getattr(jaxsub, n)) and n[0].islower()])
def test_every_public_function_is_shown_at_work(name):
    """A newcomer finds every public function used in the README, a notebook or an example."""
    shown = [(ROOT / "README.md").read_text("utf-8")]
    shown += [cell.source for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
    assert any(re.search(rf"jaxsub\.{name}\b", text) for text in shown)
