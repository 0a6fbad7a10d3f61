"""What a compiler reports: `Measurement`. Plain data, no JAX."""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxsub.core.shown import Shown


@dataclass(frozen=True, slots=True)
class Measurement(Shown):
    """What the compiler reports for the gradient of a function.

    Attributes:
        temp_bytes: What it allocates beside arguments and outputs; budgets speak of this.
        argument_bytes: Bytes of the arguments.
        output_bytes: Bytes of the outputs.
        alias_bytes: Bytes of outputs that reuse an argument's memory (donation).
        flops: The compiler's own count; loops are counted once, whatever their length. Where the device is not there
            those of the traced program, loops with their lengths. `None` where nobody counts.
        compile_seconds: How long the compile took.
        target: What it was compiled for, such as `cpu`.
        host_temp_bytes: What it allocates in host memory, for what is offloaded.
    """

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    flops: float | None
    compile_seconds: float
    target: str
    host_temp_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """What the program takes of a device: arguments, outputs and temporaries, without outputs in donated memory."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    def faults(self) -> list[str]:
        """Figures that no compiler reports, each by its field.

        Example:
            >>> Measurement(8, 4, 4, 5, None, 0.5, "cpu").faults()
            ['alias_bytes: 5 is more than the outputs, 4']
        """
        figures = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "target"}
        found = [f"{name}: {figure} is below zero" for name, figure in figures.items() if (figure or 0) < 0]
        if self.alias_bytes > self.output_bytes:
            found.append(f"alias_bytes: {self.alias_bytes} is more than the outputs, {self.output_bytes}")
        return found
