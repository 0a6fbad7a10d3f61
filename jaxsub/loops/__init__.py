"""What stands inside an equation: how loops and conditionals may run, what each way costs, and the program rewritten.

A `lax.scan` over L steps is L equal stages. Its body is a program of its own; `choose` finds what a step may save and
how steps may be grouped, `unroll` writes steps out one after the other, `inside` plans the body, `branches` plans the
branches of a `lax.cond` or `lax.switch`, and `rewrite` puts it all together again. `fori_loop` with static bounds and
`lax.map` are scans by the time they are seen here; `while_loop` has no reverse mode and stays as it is, and so does a
scan or a conditional with effects.
"""

from jaxsub.loops.branches import BranchChoice, branch_choices
from jaxsub.loops.choose import LoopChoice, loop_choices
from jaxsub.loops.find import find_conditionals, find_loops, find_nested
from jaxsub.loops.rewrite import body_program, branch_programs, with_loops

__all__ = [
    "BranchChoice",
    "LoopChoice",
    "body_program",
    "branch_choices",
    "branch_programs",
    "find_conditionals",
    "find_loops",
    "find_nested",
    "loop_choices",
    "with_loops",
]
