"""Give the pages the pictures of `examples/results`, so that no picture is in the repository twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parent.parent / "examples" / "results"


def on_files(files: Files, config: Any) -> Files:
    """Add every picture of the results under `figures/`, at its own path."""
    for path in sorted(RESULTS.rglob("*.png")):
        where = Path("figures", path.relative_to(RESULTS)).as_posix()
        files.append(File.generated(config, where, abs_src_path=str(path)))
    return files
