"""Passes: what maps a chain to a chain, each with a name, and the log of what each did.

Costs are counted for one device with barriers between all stages. Whatever changes that is a pass: what one device of
several holds, weights that are gathered, seconds in the place of FLOPs. To see the chain after each:

    logging.basicConfig()
    logging.getLogger("jaxsub.planning").setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxsub.core.budget import format_bytes
from jaxsub.core.chain import Chain

LOGGER = logging.getLogger("jaxsub.planning")


@dataclass(frozen=True, slots=True)
class Pass:
    """A map from chain to chain, with a name for the log."""

    name: str
    change: Callable[[Chain], Chain]


def run_passes(chain: Chain, passes: Iterable[Pass]) -> Chain:
    """Run passes in order; at log level `DEBUG` the chain is printed before the first and after each."""
    LOGGER.debug("a chain of %d stages\n%s", len(chain.stages), _Table(chain))
    for step in passes:
        chain = step.change(chain)
        LOGGER.debug("after the pass: %s\n%s", step.name, _Table(chain))
    return chain


@dataclass(frozen=True, slots=True)
class _Table:
    """A chain as a table; it is made only where it is printed."""

    chain: Chain

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        chain, total = self.chain, max(self.chain.forward_flops, 1.0)
        yield f"{'equations':>13} {'forward':>8} {'kept':>10} {'backward':>10} {'recomputed':>10} {'crossing':>10}"
        for s, stage in enumerate(chain.stages):
            crossing = int(chain.crossing_bytes[0, s + 1])
            sizes = stage.keep_bytes, stage.keep_transient_bytes, stage.transient_bytes, crossing
            share = f"{stage.forward_flops / total:.1%}"
            yield f"{stage.start:>6}:{stage.stop:<6} {share:>8} {' '.join(f'{format_bytes(n):>10}' for n in sizes)}"
