"""Store plans as JSON: a mixin that writes them to text and files and reads them back, fully checked.

The text names its kind and version. For any other or changed text, `ValueError` names the wrong field; whether a plan
fits a function is checked where it is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, TypeVar, cast

from jaxsub.core import codec

Self = TypeVar("Self", bound="Stored")
SCHEMA = 4


class Stored:
    """Something that is stored as JSON.

    Attributes:
        kind: What it is, in the text: `jaxsub_plan`.
        remedy: The call that makes a new one.
    """

    __slots__ = ()
    kind: ClassVar[str]
    remedy: ClassVar[str]

    def faults(self) -> list[str]:
        """Figures that cannot be, each by its field."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Serialise as JSON text."""
        return codec.write(self, indent=1, **{self.kind: SCHEMA})

    @classmethod
    def from_json(cls: type[Self], text: str | bytes) -> Self:
        """Load what `to_json` wrote; all of it is checked but whether it fits a function, which its use does.

        Raises:
            ValueError: If the text is something else, or of another version; it names the field that is wrong.
        """
        data, words = codec.parse(text), cls.kind.replace("_", " ")
        if not isinstance(data, dict) or data.pop(cls.kind, None) != SCHEMA:
            other = next((key for key in data if key.startswith("jaxsub_")), "") if isinstance(data, dict) else ""
            of_kind = f"a {other.replace('_', ' ')}, and no {words}" if other else f"no {words} of version {SCHEMA}"
            raise ValueError(f"this is {of_kind}; make a new one with {cls.remedy}")
        found = cast(Self, codec.convert(data, cls))
        if faults := found.faults():
            what = f"these fields of the {words.split()[-1]} cannot be"
            raise ValueError(f"{what}, make a new one with {cls.remedy}: {'; '.join(faults)}")
        return found

    def save(self, path: str) -> None:
        """Write it to a file, as JSON."""
        Path(path).write_text(self.to_json(), "utf-8")

    @classmethod
    def of(cls: type[Self], given: Self | str | os.PathLike[str]) -> Self:
        """What is given for a plan: one, or the path of one that `save` wrote; `TypeError` if it is neither."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str | os.PathLike):
            return cls.load(os.fspath(given))
        what = f"a {given.kind.replace('_', ' ')}" if isinstance(given, Stored) else f"{given!r:.99}"
        raise TypeError(f"this is {what}, and no {cls.kind.replace('_', ' ')}; make a new one with {cls.remedy}")

    @classmethod
    def load(cls: type[Self], path: str) -> Self:
        """Read what `save` wrote; of a file that is something else, a `ValueError` names the field that is wrong."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
