"""The pictures of the pages: cards as a browser shows them, light and dark, and a plan drawn by matplotlib.

    python docs/pictures.py         # writes docs/pages/pictures/; needs Chromium and the extra `plot`

The pictures of measured figures come from `examples/`: each of its commands draws again with `--draw`.
"""

from __future__ import annotations

import html
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import jaxsub

PAGES = Path(__file__).parent / "pages" / "pictures"
WIDTH = 900


def blocks(params, x):  # a list of {"up": f32[128, 512], "down": f32[512, 128]}, f32[1024, 128]
    """A chain of MLP blocks."""
    for i, w in enumerate(params):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean(x**2)


def layers(params, x):  # {"up": f32[n, 128, 512], "down": f32[n, 512, 128]}, f32[1024, 128]
    """Such blocks as a scan."""

    def layer(x, w):
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    with jax.named_scope("layers"):
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def shapes(*steps: int) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """The weights of a block, or of so many stacked, and its input."""
    dims = (*steps, 128, 512), (*steps, 512, 128), (1024, 128)
    up, down, x = (jax.ShapeDtypeStruct(each, jnp.float32) for each in dims)
    return {"up": up, "down": down}, x


def photograph(page: str, path: Path, height: int, theme: str) -> None:
    """A page as Chromium shows it, in light or dark."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise SystemExit("the cards are photographed by Chromium, which is not here: apt-get install chromium")
    themed = page.replace("<html ", f'<html data-theme="{theme}" ').replace(
        "color-scheme:light dark", f"color-scheme:{theme}"
    )
    frame = f'<iframe srcdoc="{html.escape(themed)}" style="width:{WIDTH}px;height:{height}px;border:0"></iframe>'
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "card.html")
        place.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">{frame}', "utf-8")
        profile = f"--user-data-dir={folder}/profile"
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", profile,
                   f"--window-size={WIDTH},{height}", f"--screenshot={path}")  # fmt: skip
        command = [found, *options, place.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    """Plan, and write the pictures."""
    PAGES.mkdir(exist_ok=True)
    block, x = shapes()
    chain = jaxsub.plan(blocks, [block] * 12, x, budget=0.4, chunks=False)
    loop = jaxsub.plan(layers, *shapes(64), budget=0.3, chunks=False)
    page = loop.to_html().replace('<details class="js-inside">', '<details class="js-inside" open>')
    photograph(chain.to_html(), PAGES / "card.png", 720, "light")
    photograph(page, PAGES / "loop-dark.png", 1180, "dark")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    chain.plot(figure.subplots())
    figure.savefig(PAGES / "plan.png", dpi=110)


if __name__ == "__main__":
    main()
