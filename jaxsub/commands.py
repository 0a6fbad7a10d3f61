"""The commands of `jaxsub`: plan, explain, examine and trace the frontier of a loss or step by its import path.

`jaxsub.cli` imports this module when a command is named: it needs JAX. See there for the exit codes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click
import jax

from jaxsub.api.explain import explain as make_explanation
from jaxsub.api.frontier import frontier as make_frontier
from jaxsub.api.sublinear import Sublinear, sublinear
from jaxsub.core import codec
from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.errors import BudgetError, InfeasibleBudgetError, JaxsubError, PlannerError
from jaxsub.core.plan import Plan
from jaxsub.core.step_plan import StepPlan
from jaxsub.devices.targets import NAMES, Target, get_target
from jaxsub.diagnosis.doctor import doctor as diagnose
from jaxsub.planners import names as planner_names
from jaxsub.search.slicing import Chunks, ChunksError
from jaxsub.step.jit import Step, jit
from jaxsub.step.options import donated_argnums

EXAMPLES = """
\b
Examples:
  jaxsub plan mypkg.train:loss --args mypkg.train:example_args --budget 8GiB --target h100
  jaxsub plan train.py:loss --args train.py:example_args --budget 0.4 --html plan.html
  jaxsub plan train.py:loss --args train.py:example_args --budget 2GiB --chunks head=8
  jaxsub plan train.py:step --args train.py:example_state --step --budget device --target v100,a100,h100,h200
  jaxsub plan train.py:step --args train.py:example_state --step --check --max-memory 24GiB --json -
  jaxsub explain mypkg.train:loss --args mypkg.train:example_args
  jaxsub frontier mypkg.train:loss --args mypkg.train:example_args --plot frontier.png
  jaxsub doctor mypkg.train:step --args mypkg.train:example_state
  jaxsub targets
"""

ARGS_HELP = """\
Where the arguments come from, as MODULE:NAME: a tuple of arrays or jax.ShapeDtypeStruct, or a function that returns
one. With a function nothing need be allocated: return shapes.\
"""


CHUNKS_HELP = """\
Whether runs of equations may be executed in slices: auto, where that spares recomputation or memory (the default);
on, with every planner; off; or counts by the name of a jax.named_scope, or by dimension of the batch: head=8,0=4.\
"""


class _File(click.Path):
    """A path that a file can have."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what the system would not take, with words instead of a traceback."""
        if "\0" in os.fspath(value):
            self.fail("a path cannot hold the character NUL", param, ctx)
        return super().convert(value, param, ctx)


_html_option = click.option("--html", "html_path", type=_File(dir_okay=False), help="Write a page that shows it.")
_json_option = click.option(
    "--json", "json_path", type=_File(dir_okay=False, allow_dash=True), help="Write it as JSON; - for stdout."
)


def _target_options(command: Callable[..., None]) -> Callable[..., None]:
    """What all commands about a function have in common."""
    for option in (
        click.option("--argnums", help="Arguments the gradient is taken of: 0 or 0,1; else the first with floats."),
        click.option("--target", help="Device to plan for, present or not; `jaxsub targets` lists them."),
        click.option("--args", "arguments", required=True, metavar="MODULE:NAME", help=ARGS_HELP),
        click.argument("function", metavar="FUNCTION"),
    ):
        command = option(command)
    return command


@click.group()
def main() -> None:
    """Hold the commands."""


@main.command(epilog=EXAMPLES)
@_target_options
@click.option("--budget", help="8GiB, 512MB, bytes, or 0.4 of what it needs now; else FUNCTION's own.")
@click.option("--planner", help=f"One of {', '.join(planner_names())}; else its own, or auto.")
@click.option("--verify/--no-verify", default=None, help="Compile the plan and measure it, or trust predictions.")
@click.option("--chunks", metavar="auto|on|off|NAME=COUNT", help=CHUNKS_HELP)
@click.option("--step", "is_step", is_flag=True, help="FUNCTION is a whole step: --budget, or `device`, is for it all.")
@click.option("--donate", help="Arguments that a step donates: 0 or 0,1; else those of its own jax.jit.")
@click.option("--max-memory", help="What arguments, outputs and temporaries may take together, such as 24GiB.")
@click.option("--check", is_flag=True, help="Say in a line whether --max-memory is kept; if not, exit with 1.")
@_json_option
@_html_option
def plan(target: str | None, json_path: str | None, html_path: str | None, **given: Any) -> None:
    """Plan the gradient of FUNCTION, or with --step all of it, within a budget, and print the plan.

    Of several targets, as in --target v100,a100,h100,h200, the plan for each; {target} in paths is then its name.
    """
    targets = [_target(name) for name in target.split(",")] if target else [None]
    for path in (json_path, html_path) if len(targets) > 1 else ():
        if path and "{target}" not in path:
            raise click.UsageError(f"several targets need several files: write '{{target}}' in {path!r}.")
    codes = []
    for one in targets:
        name = (one or get_target(None)).name
        paths = [path and path.replace("{target}", name) for path in (json_path, html_path)]
        if len(targets) == 1:
            codes.append(_plan(one, *paths, **given))
            continue
        click.echo(f"{name}:")
        try:
            codes.append(_plan(one, *paths, **given))
        except click.ClickException as error:
            if isinstance(error, click.UsageError):
                raise
            error.show(sys.stdout)
            codes.append(error.exit_code)
    sys.exit(max(codes))


def _plan(target: Target | None, json_path: str | None, html_path: str | None, *, function: str, arguments: str,
          argnums: str | None, budget: str | None, planner: str | None, verify: bool | None, chunks: str | None,
          is_step: bool, donate: str | None, max_memory: str | None, check: bool) -> int:  # fmt: skip
    """Plan for one target, print and write the plan; the exit code."""
    with _friendly():
        limit, sliced = _limit(max_memory, check), _chunks(chunks, is_step)
        if donate is not None and not is_step:
            raise click.UsageError("--donate names arguments that a step donates: it needs --step.")
        fun, args = _function(function), _arguments(arguments)
        try:
            if is_step:
                planned: Any = _fitted(fun, args, budget, max_memory, target, donate)
            else:
                planned = _sublinear(fun, budget=budget, planner=planner, verify=True if check else verify,
                                     target=target, argnums=_numbers(argnums), chunks=sliced)  # fmt: skip
            made: Plan | StepPlan = planned.plan(*args)
        except InfeasibleBudgetError as error:
            if check:
                _verdict(limit, error.least_bytes, {}, json_path)
            raise
    if check:
        taken = made.measurement.step_bytes if made.measurement is not None else 0
        return _verdict(limit, taken, made.metrics(), json_path)
    _show(made, html_path, json_path, made.to_json)
    return 0


def _limit(max_memory: str | None, check: bool) -> int:
    if check and max_memory is None:
        raise click.UsageError("--check needs --max-memory, such as --max-memory 24GiB.")
    n_bytes = Budget.parse(max_memory).n_bytes if max_memory is not None else 0
    if n_bytes is None:
        raise click.UsageError(f"--max-memory takes bytes, such as 24GiB, not a fraction: {max_memory!r}.")
    return n_bytes


def _sublinear(fun: Any, **options: Any) -> Sublinear[..., Any]:
    """A function under the options that are given; one that is made by `sublinear` has its own beside them."""
    given = {name: option for name, option in options.items() if option is not None}
    if "budget" in given:
        given["budget"] = Budget.parse(given["budget"])
    plain: Any = fun if isinstance(fun, Sublinear) else sublinear(fun)
    own, settings, *statics = plain.made_of()
    try:
        return Sublinear(own, replace(settings, **given), *statics)
    except ValueError as error:  # it has a plan, which leaves nothing to plan
        raise click.UsageError(str(error)) from error


def _fitted(fun: Any, args: tuple[Any, ...], budget: str | None, max_memory: str | None, target: Target | None,
            donate: str | None) -> Step[..., Any]:  # fmt: skip
    """A step under a memory, target and donations: those that are given, or else its own."""
    donated = _donated(donate, len(args))
    if isinstance(fun, Step):
        run, memory, own, cache, progress, jit_kwargs, *others = fun.made_of()
        if donated is not None:
            jit_kwargs = {**jit_kwargs, "donate_argnums": donated, "donate_argnames": None}
        return Step(run, budget or memory, target or own, cache, progress, jit_kwargs, *others)
    if (memory := budget or max_memory) is None:
        raise click.UsageError("--step needs --budget or --max-memory, or a step made by jaxsub.jit(memory=...).")
    if donated is None:
        try:
            donated = donated_argnums(fun, args)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    run = getattr(fun, "__wrapped__", fun) if hasattr(fun, "trace") else fun
    fitted = jit(run, memory=memory, target=target, donate_argnums=donated)
    return cast(Step[..., Any], fitted)  # checkers choose among overloads by the type of what is wrapped


def _donated(text: str | None, n_args: int) -> tuple[int, ...] | None:
    found = _numbers(text, "--donate")
    if far := [number for number in found or () if not -n_args <= number < n_args]:
        raise click.UsageError(f"--donate names argument {far[0]}, but --args gives {n_args}, from 0 on.")
    return found


def _verdict(limit: int, taken: int, metrics: dict[str, float], json_path: str | None) -> int:
    """Say whether a memory is kept, in a line or as JSON; the exit code."""
    fits = taken <= limit
    words = f"{'fits' if fits else 'does not fit'}: {format_bytes(taken)} of {format_bytes(limit)}"
    click.echo(words, err=json_path == "-")
    if json_path:
        found = {"fits": fits, "needed_bytes": taken, "max_memory_bytes": limit, "metrics": metrics}
        _write(json_path, json.dumps(found, indent=1))
    return 0 if fits else 1


@main.command(epilog=EXAMPLES)
@_target_options
@_html_option
def explain(function: str, arguments: str, target: str | None, argnums: str | None, html_path: str | None) -> None:
    """Say where the memory of FUNCTION goes, and what budgets are within reach."""
    with _friendly():
        found = make_explanation(
            _function(function), *_arguments(arguments), target=_target(target), argnums=_numbers(argnums)
        )
    _show(found, html_path)


@main.command(epilog=EXAMPLES)
@_target_options
@click.option("--points", default=8, show_default=True, type=click.IntRange(2), help="About how many plans.")
@click.option("--verify/--no-verify", default=False, show_default=True, help="Compile and measure every plan.")
@click.option("--plot", "plot_path", type=_File(dir_okay=False), help="Write a picture (.png, .svg, .pdf).")
@_html_option
def frontier(function: str, arguments: str, target: str | None, argnums: str | None, points: int, verify: bool,
             plot_path: str | None, html_path: str | None) -> None:  # fmt: skip
    """Show what every budget buys FUNCTION: memory against recomputation."""
    with _friendly():
        found = make_frontier(_function(function), *_arguments(arguments), points=points, target=_target(target),
                              verify=verify, argnums=_numbers(argnums))  # fmt: skip
    _show(found, html_path)
    if plot_path:
        _write_plot(plot_path, found)


@main.command(epilog=EXAMPLES)
@_target_options
@click.option("--verify/--no-verify", default=True, show_default=True, help="Compile with and without each fault.")
@_json_option
@_html_option
def doctor(function: str, arguments: str, target: str | None, argnums: str | None, verify: bool,
           json_path: str | None, html_path: str | None) -> None:  # fmt: skip
    """Say what is wrong with the memory of a loss or a step, FUNCTION, and the line that mends it."""
    with _friendly():
        found = diagnose(_function(function), *_arguments(arguments), target=_target(target), argnums=_numbers(argnums),
                         verify=verify)  # fmt: skip
    _show(found, html_path, json_path, lambda: codec.write(found, indent=1))


@main.command()
def targets() -> None:
    """List the devices one can plan for, whether they are there or not."""
    here = get_target(None)
    click.echo(f"{'name':<12} {'memory':>10} {'bandwidth':>11}")
    for target in (here, *map(get_target, NAMES)):
        note = "  in use here" if target is here else ""
        bandwidth = f"{target.bytes_per_second / 1e9:.0f} GB/s"
        click.echo(f"{target.name:<12} {format_bytes(target.memory_bytes):>10} {bandwidth:>11}{note}")
    click.echo('Several devices of one host: "h100:8". A text file with XLA\'s description of a GPU works too.')


@contextlib.contextmanager
def _friendly() -> Iterator[None]:
    """Turn what a user can mend into a message and an exit code."""
    try:
        yield
    except (BudgetError, ChunksError, PlannerError) as error:
        raise click.UsageError(str(error)) from error
    except JaxsubError as error:
        raise click.ClickException(str(error)) from error


def _load(path: str) -> Any:
    """The object at MODULE:NAME or FILE.py:NAME."""
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name or "\0" in path:
        raise click.UsageError(f"{path!r} is not of the form MODULE:NAME, such as mypkg.train:loss or train.py:loss.")
    module = _module(module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            there = ", ".join(n for n in vars(module) if not n.startswith("_"))[:200]
            raise click.UsageError(f"{module_name} has no {name!r}. It has: {there}.")
        found = getattr(found, part)
    return found


def _function(path: str) -> Any:
    """The function at such a path."""
    if not callable(found := _load(path)):
        raise click.UsageError(f"{path} is no function: it is of type {type(found).__name__}. Name a loss or a step.")
    return found


def _module(name: str) -> Any:
    """Import a module by name or file, from the current folder too."""
    path = Path(name)
    folder, module = (path.parent, path.stem) if name.endswith(".py") else (Path(), name)
    if name.endswith(".py") and not path.is_file():
        raise click.UsageError(f"there is no file {name}.")
    if (where := os.fspath(folder.resolve())) not in sys.path:
        sys.path.insert(0, where)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise click.UsageError(f"there is no module {module!r} here or among what is installed.") from error


def _arguments(path: str) -> tuple[Any, ...]:
    found = _load(path)
    if callable(found):
        found = found()
    if not isinstance(found, tuple | list):
        kind = type(found).__name__
        raise click.UsageError(f"{path} is no tuple of arguments, nor returns one: it is of type {kind}.")
    if not jax.tree.leaves(tuple(found)):
        raise click.UsageError(f"{path} holds no arrays.")
    return tuple(found)


def _target(name: str | None) -> Target:
    try:
        return get_target(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _chunks(text: str | None, is_step: bool) -> Chunks | None:
    """What `chunks=` is to be."""
    if text is not None and is_step:
        raise click.UsageError("--chunks is for one function: in a step, pass chunks= to its jaxsub.sublinear.")
    if text in (None, "auto", "on", "off"):
        return text if text in (None, "auto") else text == "on"
    counts: dict[Any, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\S.*?)\s*=\s*([0-9]{1,9})\s*", part)
        if found is None or int(found[2]) < 2:
            raise click.UsageError(
                "--chunks takes auto, on, off, or NAME=COUNT with a count of at least 2, such as head=8 or "
                f"head=8,0=4; got {part!r}."
            )
        key = int(found[1]) if re.fullmatch(r"-?[0-9]{1,3}", found[1]) else found[1]
        if key in counts:
            raise click.UsageError(f"--chunks names {found[1]!r} twice.")
        counts[key] = int(found[2])
    return counts


def _numbers(text: str | None, option: str = "--argnums") -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.UsageError(f"{option} takes whole numbers such as 0 or 0,1, got {text!r}.") from error


def _show(found: Any, html_path: str | None, json_path: str | None = None, to_json: Callable[[], str] = str) -> None:
    """Print what was found, and write it where it is wanted; stdout is JSON's alone where that goes there."""
    click.echo(str(found), err=json_path == "-")
    if json_path:
        _write(json_path, to_json())
    if html_path:
        try:
            _write(html_path, found.to_html())
        except ImportError as error:
            raise click.ClickException(str(error)) from error


def _write(path: str, text: str) -> None:
    if path == "-":
        click.echo(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(path, error.strerror or str(error)) from error
    click.echo(f"wrote {path}", err=True)


def _write_plot(path: str, found: Any) -> None:
    """Draw with a figure of its own, so that no display is needed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise click.ClickException('drawing needs matplotlib: pip install "jaxsub[plot]"') from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    found.plot(figure.subplots())
    try:
        figure.savefig(path, dpi=144)
    except (OSError, ValueError) as error:
        raise click.FileError(path, str(error)) from error
    click.echo(f"wrote {path}", err=True)
