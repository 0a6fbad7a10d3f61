"""Twelve plans whose compiled memory and FLOPs are pinned: both are deterministic for a version of JAX.

`tests/pinned.json` holds them by version. A change that moves one by more than 2 %, to either side, is seen here. Where
it is meant, pin anew, with every version that is held:

    python tests/figures/test_pinned.py
"""

import functools
import json
from pathlib import Path

import jax
import pytest
import zoo

import jaxsub

PINNED = Path(__file__).with_suffix("").with_name("pinned.json")
TOLERANCE = 0.02
CELLS = (
    ("chain", dict(planner="chen")),
    ("chain", dict(planner="recursive(1)")),
    ("chain", dict(budget=0.4)),
    ("mlp", dict(budget=0.5)),
    ("mlp", dict(budget=0.25)),
    ("gpt", dict(planner="chen")),
    ("gpt", dict(budget=0.5, verify=False)),
    ("relu", dict(planner="cheap")),
    ("vit", dict(planner="revolve(2)")),
    ("lstm", dict(planner="barriers")),
    ("dropout", dict(planner="chen")),
    ("tied", dict(budget=0.6)),
)


def name_of(cell):
    name, asked = cell
    return f"{name}, {', '.join(f'{key}={value}' for key, value in asked.items())}"


def measured(cell, cache=True):
    """Bytes and FLOPs of the compiled gradient under a plan; those with a budget are verified."""
    name, asked = cell
    loss, args = zoo.BY_NAME[name].toy()
    plan = jaxsub.plan(loss, *args, cache=cache, chunks=False, progress=False, **{"verify": "budget" in asked} | asked)
    found = plan.measurement or jaxsub.measure(jaxsub.sublinear(loss, plan=plan), *args)
    return {"bytes": found.temp_bytes, "flops": found.flops}


@functools.cache
def pinned():
    """What is pinned for this version of JAX; nothing for others."""
    return json.loads(PINNED.read_text("utf-8")).get(jax.__version__, {})


@pytest.mark.skipif(not pinned(), reason=f"nothing is pinned for jax {jax.__version__}")
@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_memory_and_flops_are_as_pinned(cell):
    """Neither moves by more than 2 % without being noticed."""
    found = measured(cell)
    assert found == pytest.approx(pinned()[name_of(cell)], rel=TOLERANCE), "meant? python tests/figures/test_pinned.py"


def main():
    """Pin the figures of this version of JAX."""
    jax.config.update("jax_platforms", "cpu")
    held = json.loads(PINNED.read_text("utf-8"))
    held[jax.__version__] = {name_of(cell): measured(cell, cache=False) for cell in CELLS}
    PINNED.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
