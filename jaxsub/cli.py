"""`jaxsub` on the command line.

    jaxsub plan mypkg.train:loss --args mypkg.train:example_args --budget 8GiB --target h100 --html plan.html

The commands are in `jaxsub.commands`, which needs JAX; `jaxsub --version` does without.

Exit codes: 0, it went well; 1, the budget cannot be met, the memory is not kept or the function cannot be supported; 2,
the command is wrong (no such option, module, name, budget or target).
"""

from __future__ import annotations

import importlib

import click


class _Commands(click.Group):
    """The commands, imported when one is named or all are listed."""

    @property
    def _all(self) -> click.Group:
        found: click.Group = importlib.import_module("jaxsub.commands").main
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return self._all.list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One of them."""
        return self._all.get_command(ctx, cmd_name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="jaxsub")
def main() -> None:
    """Give a loss a memory budget, and see what its gradient keeps, recomputes and costs.

    FUNCTION is MODULE:NAME, such as mypkg.train:loss, or FILE.py:NAME. Each command has examples: jaxsub plan --help.
    """
