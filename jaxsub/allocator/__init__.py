"""The paper's memory optimisation, §3 and Algorithm 2: the gradient as a graph, and the allocation of its values.

`gradient` turns a graph and mirror counts into a schedule; `allocation` assigns memory to its arrays and lists
live ranges. Neither knows JAX or needs a compiler.
"""

from jaxsub.allocator.allocation import STRATEGIES, Allocation, Strategy, Timeline, allocate, timeline
from jaxsub.allocator.gradient import LEAST_NEEDS, Buffer, Needs, Schedule, Step, forward_graph, gradient_graph

__all__ = [
    "LEAST_NEEDS",
    "STRATEGIES",
    "Allocation",
    "Buffer",
    "Needs",
    "Schedule",
    "Step",
    "Strategy",
    "Timeline",
    "allocate",
    "forward_graph",
    "gradient_graph",
    "timeline",
]
