"""Loops of known length: how they may run, what each way costs, and a program with them rewritten.

A `lax.scan` over L steps is L equal stages. Its body is a program of its own; `choose` finds what a step may save and
how steps may be grouped, `rewrite` puts the scan together again. `fori_loop` with static bounds and `lax.map` are scans
by the time they are seen here; `while_loop` has no reverse mode and stays as it is, and so does a scan with effects.
"""

from jaxsub.loops.choose import LoopChoice, find_loops, loop_choices
from jaxsub.loops.rewrite import body_program, with_loops

__all__ = ["LoopChoice", "body_program", "find_loops", "loop_choices", "with_loops"]
