"""What ways to run a loop or a conditional cost: by counting, corrected by what the compiler said of their likes.

Ways go in, with a table of what the compiler said so far; out come bytes. Three things are asked of it for a way: what
it keeps between its passes (`keep`), what both passes allocate (`loop`), and what the compiler makes for it when the
program starts, where it is a region (`hoisted`): the zeros that a loop begins to fill wait for nothing, and a
loop that is executed again in the backward pass has its own, which stand until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxsub.loops import BranchChoice, LoopChoice
from jaxsub.ways import Way, is_like

NEAR_BYTES = 1.3
"""Ways to run a loop that are said to need less than this share of another are compiled together with it."""

WayChoice = LoopChoice | BranchChoice
Known = Callable[[str, Way], int | None]
"""What the compiler said: of `keep`, `loop` or `hoisted`, and a way whose node is 0; `None` where it was not asked."""


@dataclass(frozen=True, slots=True)
class WayBytes:
    """Bytes of one way.

    Attributes:
        kept: What it keeps from its forward to its backward pass.
        transient: What its backward pass allocates, the kept included.
        hoisted: What stands from the program's start where it is a region.
    """

    kept: int
    transient: int
    hoisted: int


def way_bytes(ways: Sequence[WayChoice], way: WayChoice, known: Known) -> WayBytes:
    """What a way needs, by what the compiler said of it, of its likes, or by counting.

    Args:
        ways: All ways of its loop.
        way: The way.
        known: What the compiler said.
    """

    def said(what: str, of: WayChoice) -> int | None:
        return known(what, replace(of.loop, node=0))

    alike = [w for w in ways if is_like(way.loop, w.loop)]
    shares = [k / max(w.kept_bytes, 1) for w in alike if (k := said("keep", w)) is not None]
    kept = said("keep", way)
    kept = int(max(shares, default=1.0) * way.kept_bytes) if kept is None else kept
    transient = said("loop", way)
    if transient is None:
        own = [(w.transient_bytes - w.kept_bytes, t - (said("keep", w) or w.kept_bytes)) for w in alike
               if (t := said("loop", w)) is not None]  # fmt: skip
        scale = max((found / max(guess, 1) for guess, found in own), default=1.0)
        transient = kept + int(max(scale, 0.0) * (way.transient_bytes - way.kept_bytes))
    hoisted = said("hoisted", way)
    if hoisted is None:
        hoisted = max((h for w in alike if (h := said("hoisted", w)) is not None), default=0)
    return WayBytes(min(kept, transient), transient, hoisted)


def to_ask(ways: Sequence[WayChoice], used: Way, known: Known) -> Iterator[tuple[str, Way]]:
    """What to ask of the compiler for a way in use, and while that is not known of its rivals that run less again.

    Two of these are those that need least, one that which runs least again and may need little more than the way.

    Args:
        ways: All ways of its loop.
        used: The way, its node 0.
        known: What the compiler said.
    """
    yield from ((what, used) for what in ("keep", "loop", "hoisted"))
    chosen = next((w for w in ways if replace(w.loop, node=0) == used), None)
    if chosen is None or known("loop", used) is not None:
        return
    rivals = [w for w in ways if w.again_flops < chosen.again_flops and known("loop", replace(w.loop, node=0)) is None]
    if rivals:
        near = [w for w in rivals if w.transient_bytes <= NEAR_BYTES * chosen.transient_bytes]
        least = sorted(rivals, key=lambda w: w.transient_bytes)[:2]
        cheapest = min(near, key=lambda w: w.again_flops, default=least[0])
        yield from ((what, replace(w.loop, node=0)) for w in (*least, cheapest) for what in ("keep", "loop"))
