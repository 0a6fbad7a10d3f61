"""Passes map chains to chains, and a log at level DEBUG shows the chain after each."""

import logging

import jax.numpy as jnp

import jaxsub


def test_a_log_shows_the_chain_after_each_pass(caplog):
    """Planning by seconds prints the chain as it was counted, and once more with FLOPs weighed by seconds."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    with caplog.at_level(logging.DEBUG, "jaxsub.planning"):
        jaxsub.plan(loss, [jnp.ones((8, 8))] * 6, jnp.ones((4, 8)), verify=False, profile="roofline", cache=False)
    shown = [record.getMessage() for record in caplog.records if record.name == "jaxsub.planning"]
    before = next(i for i, text in enumerate(shown) if text.startswith("a chain of "))
    assert shown[before + 1].startswith("after the pass: FLOPs weighed by seconds")
    rows = shown[before].splitlines()[2:]
    assert f"a chain of {len(rows)} stages" in shown[before]
    assert sum(float(row.split()[1].rstrip("%")) for row in rows) > 99  # shares of one forward pass


def test_nothing_is_printed_otherwise(caplog):
    """At the level that is usual no table is made."""
    with caplog.at_level(logging.INFO, "jaxsub.planning"):
        jaxsub.plan(lambda w: (w**2).sum(), jnp.ones(4), verify=False, cache=False)
    assert [record for record in caplog.records if record.name == "jaxsub.planning"] == []
