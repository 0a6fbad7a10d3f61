"""How the pictures of results look: one colour and marker a strategy in all of them, and labels that stay apart.

Colours are Okabe and Ito's (2008) and Tol's (2021), for people with any of the common colour blindnesses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

LOOKS = (
    (r"jaxsub|√n memory|half the memory", "#0072b2", "o"),
    (r"plain|no checkpoints|no optimization|nothing$", "#777777", "s"),
    (r"sublinear plan|Chen et al", "#d55e00", "D"),
    (r"every \d+, nested|recursi|k = |Haliax|levanter nested", "#332288", "P"),
    (r"every \d+|√n segments|full", "#56b4e9", "v"),
    (r"sharing", "#009e73", "^"),
    (r"inplace", "#cc79a7", "<"),
    (r"drop bn-relu|\w*saveable|convolutions saved|maxtext", "#e69f00", "X"),
    (r"revolve", "#44aa99", "s"),
    (r"Alpa", "#117733", ">"),
    (r"PyTorch", "#882255", "p"),
    (r"XLA's own", "#aa4499", "*"),
)
"""What strategies are called, and the colour and marker of each; the first that fits is taken."""

STROKES = ("-", "--", "-.", ":")
"""Lines of one strategy under several settings."""

MOST = 1.75
"""Points higher than this are drawn at the edge, and their labels say where they are."""

LOG_TICKS = [n * 10**e for e in range(-2, 4) for n in (1, 2, 5)]
FONT = 10
DPI = 120


def look(strategy: str) -> dict[str, str]:
    """The colour and marker of a strategy.

    Example:
        >>> look("jaxsub, 1/4 of plain") == look("jaxsub")
        True
        >>> look("every 4")["color"] != look("Chen et al., greedy")["color"]
        True
    """
    color, marker = next((color, marker) for words, color, marker in LOOKS if re.match(words, strategy))
    return {"color": color, "marker": marker}


def draw_points(ax: Axes, points: Mapping[str, tuple[float, float]], *, most: float = MOST) -> None:
    """Draw points, and list their labels beside the axes in the order of their heights, each with a line to its point.

    Args:
        ax: The axes; lines that are drawn there already are kept in view.
        points: Places by label.
        most: How high the axes reach; points above are drawn at the edge and say their height.
    """
    xs, ys = ([*(p[i] for p in points.values()), *(v for line in ax.lines for v in line.get_data()[i])] for i in (0, 1))
    highest, lowest, is_log = min(most, max(ys)), min(ys), ax.get_xscale() == "log"
    room = (max(xs) / min(xs)) ** 0.08 if is_log else 0.08 * (max(xs) - min(xs))
    ax.set_xlim((min(xs) / room, max(xs) * room) if is_log else (min(xs) - room, max(xs) + room))
    ax.set_ylim(lowest - 0.05 * (highest - lowest), highest + 0.05 * (highest - lowest))
    if is_log:
        ax.set_xticks([t for t in LOG_TICKS if min(xs) / room <= t <= max(xs) * room])
        ax.xaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    order = sorted(points.items(), key=lambda item: (-item[1][1], item[1][0]))
    for i, (label, (x, y)) in enumerate(order):
        place, words = (x, min(y, highest)), f"{label}, at {y:.2f}: above" if y > highest else label
        ax.plot(*place, **look(label), ls="none", ms=7, mec="white", mew=0.5, zorder=4)
        line = dict(arrowstyle="-", color=look(label)["color"], lw=0.7, alpha=0.7, shrinkB=4, relpos=(0, 0.5))
        ax.annotate(words, place, (1.03, 1 - (i + 0.5) / len(order)), textcoords="axes fraction", va="center",
                    fontsize=FONT, color="0.15", arrowprops=line, annotation_clip=False)  # fmt: skip


def legend(ax: Axes, **options: Any) -> None:
    """A legend under the axes, clear of everything that is drawn."""
    n = len(ax.get_legend_handles_labels()[1])
    ax.legend(
        loc="upper left", bbox_to_anchor=(0, -0.13), ncols=1 if n < 2 else 2, frameon=False, fontsize=FONT, **options
    )


def save(figure: Figure, path: Path) -> None:
    """Write a picture, large enough to be read at half its size."""
    figure.savefig(path, dpi=DPI)


def overprinting(figure: Figure) -> list[str]:
    """Labels of a figure that overlap another or leave the picture; the figure is drawn for it."""
    figure.canvas.draw()
    found: list[str] = []
    for ax in figure.axes:
        texts = [text for text in ax.texts if text.get_text()]
        boxes = [Text.get_window_extent(text) for text in texts]  # without the line of an annotation
        for i, (text, box) in enumerate(zip(texts, boxes, strict=True)):
            if not (figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1):
                found.append(f"{text.get_text()}: leaves the picture")
            over = (other.get_text() for other, its in zip(texts[:i], boxes, strict=False) if box.overlaps(its))
            found += [f"{text.get_text()}: over {other}" for other in over]
    return found
