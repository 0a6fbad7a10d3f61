"""Typed JSON: values to text, and text to values of a type that is known, checked whole.

Figures, measurements and plans are frozen dataclasses of tuples. `write` makes JSON of one; `read` makes one of JSON
that may be anybody's. The library `msgspec` compares each entry with the type that the dataclass declares and names the
field that does not fit. In addition a field that the type does not have, and an integer of more than 64 bits, are
refused: nothing that is read is ignored.

Whatever the text, `read` raises nothing but `ValueError`. Text that is nested more deeply than Python's recursion goes
is refused as such. Memory is some 40 times the text: limit the text where nobody vouches for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxsub.core.decisions import Conditional, ControlFlow, Loop

MOST_INTEGER = 2**63 - 1


def write(value: Any, *, indent: int | None = None, **more: Any) -> str:
    """Serialise a value as JSON text, `more` in front of a dataclass's own fields; no indent means no blanks.

    A `TypeError` or `ValueError` says what JSON cannot hold, such as a number that is not finite.
    """
    data = msgspec.to_builtins(value)
    separators = (",", ":") if indent is None else None
    return json.dumps({**more, **data} if more else data, allow_nan=False, indent=indent, separators=separators)


def parse(text: str | bytes) -> Any:
    """Read JSON text as lists, dictionaries, numbers and text; `ValueError` if it is none, or nested too deeply."""
    try:
        return msgspec.json.decode(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None
    except UnicodeError as error:
        raise ValueError(f"the text is not UTF-8: {error}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"the text is no JSON: {error}") from None


def convert(data: Any, kind: Any) -> Any:
    """Make a value of a type from what `parse` gave; where it is none, a `ValueError` names the field.

    Example:
        >>> convert({"node": 3, "blocks": [4]}, ControlFlow) == Loop(3, blocks=(4,))
        True
        >>> convert({"node": 3, "blocks": ["four"]}, ControlFlow)
        Traceback (most recent call last):
        ValueError: Expected `int`, got `str` - at `$.blocks[0]`
    """
    try:
        value = msgspec.convert(data, kind, dec_hook=_made)
        faults = _faults(data, msgspec.to_builtins(value), "$")
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if faults:
        raise ValueError(faults)
    return value


def read(text: str | bytes, kind: Any) -> Any:
    """Make a value of a type from JSON text; where it is none, a `ValueError` names the field."""
    return convert(parse(text), kind)


def _made(kind: Any, data: Any) -> Any:
    """A value of a type that msgspec does not know: one way or another to run an equation that holds programs."""
    if kind is not ControlFlow:
        raise TypeError(f"nothing of type {kind} is stored")
    return convert(data, Conditional if isinstance(data, Mapping) and "branches" in data else Loop)


def _faults(data: Any, known: Any, place: str) -> str:
    """The first thing in `data` that is not in what was made of it, or is no sensible number; empty where none is."""
    if isinstance(data, Mapping):
        if unknown := [name for name in data if name not in known]:
            return f"Object contains unknown field `{unknown[0]}` - at `{place}`"
        return next((found for name in data if (found := _faults(data[name], known[name], f"{place}.{name}"))), "")
    if isinstance(data, Sequence) and not isinstance(data, str):
        pairs = enumerate(zip(data, known, strict=True))
        return next((found for i, pair in pairs if (found := _faults(*pair, f"{place}[{i}]"))), "")
    if isinstance(data, int) and abs(data) > MOST_INTEGER:
        return f"Expected an integer of at most 64 bits - at `{place}`"
    return ""
