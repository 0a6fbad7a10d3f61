"""Run the gauntlet: programs of other libraries, each planned, compared with the plain function and read back.

Every program runs in two processes of its own that share an empty plan cache. The first plans the loss for a share of
what its gradient takes and the whole train step for the same share of its temporaries; if that is refused, the least
that the refusal names has to do. What both take is read from the compiler, values, gradients and the step's results are
compared with the plain program's. The second process has only to read: it compiles nothing but what runs.

    pip install -e ".[gauntlet]"
    python tests/gauntlet/run.py                             # all of them, a table
    python tests/gauntlet/run.py --small                     # those that CI runs, a few minutes
    python tests/gauntlet/run.py keras_cnn jax_maml          # some
    python tests/gauntlet/run.py --budget .5 .25 --jobs 1

Columns: MiB of temporaries of the plain gradient, the budget, what the compiler gives the planned one; FLOPs of the
traced gradient over the plain one's, loops counted with their lengths; processor seconds of lowering and compiling the
plain gradient; those of a cold plan or refusal over them, then those of asking for the least that a refusal named;
compiles of the first; processor seconds of fitting the whole step, and of finding both plans in the second process.
`least` behind a budget: the one asked for was refused, this is the least that the refusal named. A program that lacks a
library is skipped. Exits with 1 if any program failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gauntlet import PROGRAMS, SMALL
from gauntlet.trial import again, first, merged

MIB = 2**20
HEADER = f"{'program':24}{'budget':>7}{'plain':>8}{'asked':>8}{'':6}{'planned':>8}{'FLOPs':>7}{'compile':>9}"
HEADER += f"{'plan':>7}{'least':>7}{'compiles':>9}{'step':>7}{'again':>7}  verdict"


def one_process(name: str, share: float, trial: str, folder: Path) -> None:
    """Run one of a program's two trials; write its figures as they come, so that a crash leaves those before it."""
    built = PROGRAMS[name].build()
    before = folder / "first.json"
    parts = first(built, share, folder) if trial == "first" else again(built, json.loads(before.read_text()), folder)
    for found in merged(parts):
        (folder / f"{trial}.json").write_text(json.dumps(found))


def run_apart(name: str, share: float, limit: int) -> dict[str, Any]:
    """Run a program's trials in two processes; a crash or too long a search is a fault like any other."""
    missing = PROGRAMS[name].missing()
    if missing:
        return {"skipped": f"{', '.join(missing)} is not installed"}
    figures: dict[str, Any] = {"faults": []}
    with tempfile.TemporaryDirectory() as folder:
        environment = {"XDG_CACHE_HOME": folder} | {k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"}
        environment["JAX_PLATFORMS"] = "cpu"
        # NumPyro adds up in the order of a set: with another seed of hashes a process has another program
        environment["PYTHONHASHSEED"] = "0"
        for trial in ("first", "again"):
            command = [sys.executable, __file__, name, "--budget", str(share), "--limit", str(limit)]
            ran = subprocess.run([*command, "--trial", trial, folder], capture_output=True, text=True, env=environment)
            written = Path(folder, f"{trial}.json")
            found = json.loads(written.read_text()) if written.exists() else {"faults": []}
            figures = figures | found | {"faults": figures["faults"] + found["faults"]}
            if ran.returncode:
                said = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1][:200]
                if ran.returncode == -signal.SIGXCPU:
                    said = f"not done after {limit} processor seconds"
                figures["faults"].append(f"{trial} process: {said}")
                return figures | {"stderr": ran.stderr}
    return figures


def row(name: str, share: float, found: dict[str, Any]) -> str:
    """One line of the table."""
    line = f"{name:24}{share:7.2f}"
    if "skipped" in found:
        return f"{line}  skipped: {found['skipped']}"
    if "plain_bytes" in found:
        n_bytes = (found[key] / MIB for key in ("plain_bytes", "budget_bytes", "planned_bytes"))
        plain, asked, planned = (f"{n:8.2f}" for n in n_bytes)
        line += f"{plain}{asked}{' least' if found['loss_refused'] else '':6}{planned}{found['flops']:7.2f}"
        line += f"{found['plain_seconds']:8.1f}s{found['plan_seconds'] / found['plain_seconds']:6.1f}x"
        line += f"{found['least_seconds'] / found['plain_seconds']:6.1f}x" if found["loss_refused"] else f"{'':7}"
        line += f"{found['compiles']:9d}"
        for key in ("step_seconds", "again_seconds"):
            line += f"{found[key]:6.1f}s" if key in found else f"{'':7}"
    refused = "loss refused, its least fits" if found.get("loss_refused") else ""
    refused += "; step refused, its least fits" if found.get("step_refused") else ""
    return f"{line}  {'; '.join(found['faults']) or refused.lstrip('; ') or 'ok'}"


def summary(results: list[dict[str, Any]]) -> str:
    """What the table comes to."""
    ran = [found for found in results if "skipped" not in found]
    ratios = sorted(found["plan_seconds"] / found["plain_seconds"] for found in ran if "plan_seconds" in found)
    line = f"{len(ran)} ran, {sum(bool(found['faults']) for found in ran)} failed, {len(results) - len(ran)} skipped"
    if ratios:
        line += (
            f"; cold plans cost {ratios[len(ratios) // 2]:.1f} plain compiles in the median, {ratios[-1]:.1f} at most"
        )
    return line


def main() -> int:
    """Run what is asked for; print the table, and what crashed below it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="; ".join(PROGRAMS))
    parser.add_argument("--small", action="store_true", help=f"only {', '.join(SMALL)}")
    parser.add_argument("--budget", nargs="+", type=float, default=[0.5], metavar="SHARE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="programs that run side by side")
    parser.add_argument("--limit", type=int, default=300, help="processor seconds for one process")
    parser.add_argument("--trial", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.programs) - set(PROGRAMS)
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    if options.trial:
        faulthandler.register(signal.SIGXCPU, chain=True)  # says where it was
        resource.setrlimit(resource.RLIMIT_CPU, (options.limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        one_process(options.programs[0], options.budget[0], options.trial[0], Path(options.trial[1]))
        return 0
    asked = [
        (name, share) for name in options.programs or (SMALL if options.small else PROGRAMS) for share in options.budget
    ]
    print(HEADER, flush=True)
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(run_apart, name, share, options.limit) for name, share in asked]
        for (name, share), running in zip(asked, pending, strict=True):
            results.append(running.result())
            print(row(name, share, results[-1]), flush=True)
    print(f"\n{summary(results)}")
    for (name, share), found in zip(asked, results, strict=True):
        if "stderr" in found:
            print(f"\n== {name} at {share}\n{found['stderr'][-6000:]}")
    return int(any(found.get("faults") for found in results))


if __name__ == "__main__":
    raise SystemExit(main())
