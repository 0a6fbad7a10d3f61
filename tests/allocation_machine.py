"""A machine that executes a schedule in an allocation and finds every read and write of memory that is not live."""

from bisect import bisect_left, insort

from jaxsub.allocator import Allocation, Schedule, Step


def replay(schedule: Schedule, allocation: Allocation) -> None:
    """Execute a schedule in an allocation; an `AssertionError` lists every read and write of memory that is not live.

    The check shares no code with `allocate`: it tracks the extents of live buffers.
    """
    machine = _Machine(schedule, allocation)
    for at, step in enumerate(schedule.steps):
        machine.execute(at, step)
    if machine.faults:
        raise AssertionError("the allocation does not hold: " + "; ".join(machine.faults))


class _Machine:
    """A memory that tracks its live buffers: `live` holds (start, end, buffer), disjoint, in order."""

    def __init__(self, schedule: Schedule, allocation: Allocation) -> None:
        self.schedule = schedule
        self.total_bytes = allocation.total_bytes
        starts = (-1 if offset is None else offset for offset in allocation.offsets)
        self.extents = [(at, at + b.n_bytes, b.index) for at, b in zip(starts, schedule.buffers, strict=True)]
        self.last_read = {r: at for at, step in enumerate(schedule.steps) for r in step.reads}
        self.last_read |= dict.fromkeys((*range(schedule.n_given), *schedule.results), len(schedule.steps))
        self.present = set(range(schedule.n_given))
        self.live: list[tuple[int, int, int]] = []
        self.faults: list[str] = []

    def execute(self, at: int, step: Step) -> None:
        """Check a step's reads and writes, then drop the buffers that are dead after it."""
        name = self.schedule.label
        self.faults += [f"step {at} reads {name(r)}, which is not there" for r in step.reads if r not in self.present]
        for w in step.writes:
            start, end, _ = self.extents[w]
            if not 0 <= start <= end <= self.total_bytes:
                self.faults.append(f"step {at} writes {name(w)} outside the allocation")
            for b in self._overlapping(start, end):
                if (b, w) not in step.in_place or self.last_read[b] != at or self.extents[b][0] != start:
                    self.faults.append(f"step {at} writes {name(w)} over {name(b)}")
                self._drop(b)
            self.present.add(w)
            if start < end:
                insort(self.live, self.extents[w])
        for b in (*step.reads, *step.writes):
            if b in self.present and self.last_read.get(b, at) == at:
                self._drop(b)

    def _overlapping(self, start: int, end: int) -> list[int]:
        """List the live buffers in `start .. end - 1`; empty ones take no memory."""
        found = []
        at = bisect_left(self.live, (end, -1, -1)) - 1
        while start < end and at >= 0 and self.live[at][1] > start:
            found.append(self.live[at][2])
            at -= 1
        return found

    def _drop(self, buffer: int) -> None:
        self.present.discard(buffer)
        if self.schedule.buffers[buffer].n_bytes:
            self.live.pop(bisect_left(self.live, self.extents[buffer]))
