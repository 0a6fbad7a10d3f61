"""What a prototype of the planner reached: the floor under every plan at the same budget.

`PROTOTYPE` holds, for a network and a target, budgets as shares of the plain gradient's memory, and FLOPs over the
plain gradient's. Its networks are the zoo's but for details: the plain ones need up to 6 % more memory and a percent
more FLOPs here.
"""

from __future__ import annotations

PROTOTYPE: dict[tuple[str, str], dict[float, float]] = {
    ("mlp", "cpu"): {0.8: 1.008, 0.6: 1.009, 0.4: 1.039, 0.3: 1.147, 0.25: 1.200, 0.2: 1.254, 0.15: 1.314, 0.1: 1.492},
    ("mlp", "h200"): {0.4: 1.173, 0.2: 1.368, 0.12: 1.680},
    ("gpt16", "cpu"): {0.8: 0.981, 0.6: 0.980, 0.4: 0.989, 0.3: 1.022, 0.25: 1.062, 0.2: 1.106, 0.15: 1.142, 0.1: 1.185,
                       0.08: 1.245, 0.065: 1.385},
    ("gpt16", "h200"): {0.4: 1.002, 0.25: 1.091, 0.15: 1.158, 0.08: 1.303},
    ("resnet", "cpu"): {0.35: 0.994, 0.27: 1.005, 0.25: 1.022, 0.22: 1.055, 0.2: 1.099, 0.18: 1.113, 0.15: 1.174},
    ("resnet198", "cpu"): {0.35: 0.957, 0.25: 0.965, 0.2: 1.027, 0.15: 1.111, 0.12: 1.161, 0.1: 1.208, 0.08: 1.284,
                           0.06: 1.367},
    ("lstm", "cpu"): {0.082: 0.993, 0.07: 1.064, 0.06: 1.202, 0.05: 1.273, 0.045: 1.454},
}  # fmt: skip

ON_THE_HULL = {
    ("gpt16", "cpu", 0.8): 0.981 / 0.982,
    ("gpt16", "cpu", 0.6): 0.980 / 0.982,
    ("resnet198", "cpu", 0.35): 0.957 / 0.958,
    ("resnet198", "cpu", 0.25): 0.965 / 0.972,
}
"""Cells that are compared with the hull of what is written by hand. There it is made of each block with
`dots_saveable`, or with its convolutions saved; that had .982 and .958 of the plain FLOPs of the prototype's networks
and has .992 and .969 of ours, and with the convolutions saved needs .268 of the plain memory, not .258."""

MATCHED, BEATEN = 1.005, 0.99
"""A plan with so much of the prototype's FLOPs is as good; with so little it is better."""
