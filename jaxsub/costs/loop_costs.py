"""What ways to run a loop or a conditional cost: by counting, corrected by what the compiler said of their likes.

Ways go in, with a table of what the compiler said so far; out come bytes. Three things are asked of it for a way: what
it keeps between its passes (`keep`), what both passes allocate (`loop`), and what the compiler makes for it when the
program starts, where it is a region (`hoisted`): the zeros that a loop begins to fill wait for nothing, and a
loop that is executed again in the backward pass has its own, which stand until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxsub.core.decisions import Way, is_like
from jaxsub.costs.cond_options import BranchChoice
from jaxsub.costs.scan_options import LoopChoice

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
    keeps = [(w, w.kept_bytes, found) for w in alike if (found := said("keep", w)) is not None]

    def kept_by(of: WayChoice) -> int:
        found = said("keep", of)
        return _like_nearest(of, of.kept_bytes, keeps) if found is None else found

    kept, transient = kept_by(way), said("loop", way)
    if transient is None:
        own = [(w, w.transient_bytes - w.kept_bytes, max(0, found - kept_by(w))) for w in alike
               if (found := said("loop", w)) is not None]  # fmt: skip
        transient = kept + _like_nearest(way, way.transient_bytes - way.kept_bytes, own)
    hoisted = said("hoisted", way)
    if hoisted is None:
        hoisted = max((h for w in alike if (h := said("hoisted", w)) is not None), default=0)
    return WayBytes(min(kept, transient), transient, hoisted)


def _like_nearest(way: WayChoice, n_bytes: int, known: Sequence[tuple[WayChoice, int, int]]) -> int:
    """Bytes counted for a way, corrected by what was found for the nearest of its likes, each with what was counted.

    Those with the same blocks come first. What counting left out is often the same for all, such as copies of weights,
    and seldom more than in proportion: the lesser is believed, since what is used is asked for, and the rest never.
    """
    if not known:
        return n_bytes

    def distance(like: tuple[WayChoice, int, int]) -> tuple[bool, int]:
        return _blocks(like[0]) != _blocks(way), abs(like[0].kept_bytes - way.kept_bytes)

    _, counted, found = min(known, key=distance)
    return min(n_bytes * found // max(counted, 1), n_bytes + max(0, found - counted))


def _blocks(way: WayChoice) -> tuple[int, ...]:
    return way.loop.blocks if isinstance(way, LoopChoice) else ()


def to_ask(ways: Sequence[WayChoice], used: Way, known: Known, *, is_region: bool) -> Iterator[tuple[str, Way]]:
    """What to ask of the compiler for a way in use, and while that is not known of its rivals that run less again.

    Of rivals like one of which something is known nothing is asked: that says enough. Of the others two are those that
    need least, one that which runs least again and may need little more than the way.

    Args:
        ways: All ways of its loop.
        used: The way, its node 0.
        known: What the compiler said.
        is_region: Whether it is used in a region, which keeps nothing of it.
    """
    yield from ((what, used) for what in (("loop", "hoisted") if is_region else ("keep", "loop")))
    chosen = next((w for w in ways if replace(w.loop, node=0) == used), None)
    if chosen is None or known("loop", used) is not None:
        return
    seen = [w.loop for w in ways if w is chosen or known("loop", replace(w.loop, node=0)) is not None]
    rivals = [w for w in ways if w.again_flops < chosen.again_flops and w.loop not in seen
              and not any(is_like(w.loop, s) for s in seen)]  # fmt: skip
    if rivals:
        near = [w for w in rivals if w.transient_bytes <= NEAR_BYTES * chosen.transient_bytes]
        least = sorted(rivals, key=lambda w: w.transient_bytes)[:2]
        cheapest = min(near, key=lambda w: w.again_flops, default=least[0])
        yield from dict.fromkeys(("loop", replace(w.loop, node=0)) for w in (*least, cheapest))
