"""Measured cells in one JSON file: a run that was stopped goes on where it stood, and pictures need only the file.

A cell is a key, such as `cpu/50/plain`, and a function that measures. `fill` measures the cells that a file lacks, or
holds from other versions, one after the other under a progress bar, and writes the file after each. Every cell says
with which versions and on what machine it was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

MIB = 2**20
Measured = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure: its key in the file, and what measures it and returns figures by name."""

    key: str
    run: Callable[[], Mapping[str, Any]]


def fill(path: Path, cells: Iterable[Cell], minutes: float = math.inf, is_anew: bool = False) -> Measured:
    """Measure what the file at `path` lacks, keep it there, and return the figures of the cells asked for.

    Args:
        path: The file.
        cells: What is asked for.
        minutes: After how many no further cell is begun; the next run goes on from there.
        is_anew: Whether to measure what the file holds too: the code may have changed, not its version.
    """
    cells, stored, begun = tuple(cells), load(path), time.perf_counter()
    here = {name: version(name) for name in ("jaxsub", "jax", "jaxlib")}
    missing = [cell for cell in cells if is_anew or stored.get(cell.key, {}).get("versions") != here]
    bar = tqdm(missing, unit="cell", disable=not missing)
    for cell in bar:
        if time.perf_counter() - begun > 60 * minutes:
            break
        bar.set_postfix_str(cell.key)
        start = time.perf_counter()
        figures = dict(cell.run())
        seconds = round(time.perf_counter() - start, 1)
        stored[cell.key] = {**figures, "seconds_to_measure": seconds, "versions": here, "machine": machine()}
        _write(path, stored)
    return {cell.key: stored[cell.key] for cell in cells if cell.key in stored}


def load(path: Path) -> Measured:
    """What a file holds; nothing where there is none."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def machine() -> str:
    """This machine, in words that name nobody, and how many of its cores the process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} core{'s' * (cores != 1)}, {platform.machine()}, Python {platform.python_version()}"


def figure(
    description: str | None,
    results: Path,
    *,
    quick: Callable[[], Iterable[Cell]],
    full: Callable[[], Iterable[Cell]],
    table: Callable[[Measured], None],
    draw: Callable[[Measured, Path], None],
    broken: Callable[[Measured], Iterable[str]],
    suffix: str = ".txt",
) -> None:
    """Read the command line, measure what is missing, print the table and draw the picture.

    Promises that are broken are told at the end; with `--quick`, which is a check, they end the process with 1.

    Args:
        description: What `--help` says first.
        results: The file that keeps the full results; the picture stands beside it.
        quick: Makes the cells of `--quick`.
        full: Makes the cells of a full run.
        table: Prints the figures of all cells.
        draw: Draws them to a path.
        broken: Says, in a sentence each, which promises the cells break.
        suffix: Of the file that keeps the table, beside the picture.

    Raises:
        SystemExit: If there are no results, or with `--quick` if a promise is broken.
    """
    chosen = options(argparse.ArgumentParser(description=description), results.parent)
    path = chosen.out / results.name
    if not chosen.draw:
        fill(path, picked((quick if chosen.quick else full)(), chosen.only), chosen.minutes, chosen.anew)
    measured = load(path)
    if not measured:
        raise SystemExit(f"{path} holds no results: run this without --draw first")
    keep_table(table, measured, path.with_suffix(suffix))
    draw(measured, path.with_suffix(".png"))
    print(f"results: {path}, table: {path.with_suffix(suffix)}, picture: {path.with_suffix('.png')}")
    tell(list(broken(measured)), is_check=chosen.quick)


def keep_table(table: Callable[[Measured], None], measured: Measured, path: Path) -> None:
    """Print a table, and keep what was printed at `path`."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        table(measured)
    path.write_text(told.getvalue().lstrip("\n"), "utf-8")
    print(told.getvalue(), end="")


def tell(broken: list[str], is_check: bool) -> None:
    """Print broken promises, one a line; where this is a check, end the process with them.

    Raises:
        SystemExit: If this is a check and a promise is broken.
    """
    text = "\n".join(f"BROKEN: {sentence}" for sentence in broken)
    if broken and is_check:
        raise SystemExit(text)
    print(text or "every promise is kept")


def over_budget(key: str, n_bytes: float, budget_bytes: float) -> list[str]:
    """A sentence if a plan needs more than its budget."""
    return [f"{key}: {mib(n_bytes)} under a budget of {mib(budget_bytes)}"] if n_bytes > budget_bytes else []


def picked(cells: Iterable[Cell], only: Iterable[str]) -> list[Cell]:
    """The cells whose keys begin with one of these; all where there is none."""
    starts = tuple(only)
    return [cell for cell in cells if not starts or cell.key.startswith(starts)]


def options(parser: argparse.ArgumentParser, results: Path) -> argparse.Namespace:
    """Read the command line with the options that all figures share beside a figure's own; make the results' folder."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="small sizes, under two minutes on one core")
    parser.add_argument("--draw", action="store_true", help="measure nothing: tables and pictures from the file alone")
    parser.add_argument("--only", nargs="+", default=(), metavar="KEY", help="only cells whose keys begin like this")
    parser.add_argument("--anew", action="store_true", help="measure what the file holds too")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further cell after so many")
    where = f"where results are kept (default: {'/'.join(results.parts[-3:])}; with --quick a new folder)"
    parser.add_argument("--out", type=Path, help=where)
    chosen = parser.parse_args()
    if chosen.out is None:
        chosen.out = Path(tempfile.mkdtemp(prefix="jaxsub-")) if chosen.quick else results
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen


def mib(n_bytes: float) -> str:
    """Bytes for a table."""
    return f"{n_bytes / MIB:.1f} MiB"


def _write(path: Path, stored: Measured) -> None:
    """Replace the file in one step: who reads it sees the old cells or the new ones."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", "utf-8")
    unfinished.replace(path)


def run_cells(doc: str | None, folder: Path, cells: Callable[[bool], Iterable[Cell]],
              table: Callable[[Measured], None], faults: Callable[[Measured], list[str]]) -> None:  # fmt: skip
    """Read a benchmark's command line; measure what is asked for, keep and print its table, say what is broken."""
    chosen = options(argparse.ArgumentParser(description=doc), folder)
    path = chosen.out / f"{folder.name}.json"
    if not chosen.draw:
        fill(path, picked(cells(chosen.quick), chosen.only), chosen.minutes, chosen.anew)
    measured = load(path)
    if not measured:
        raise SystemExit(f"{path} holds no results: run this without --draw first")
    keep_table(table, measured, path.with_suffix(".md"))
    tell(faults(measured), is_check=chosen.quick)
