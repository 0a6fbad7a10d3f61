"""Display objects: a mixin that prints as text, and as an HTML card in a notebook and a browser.

A class inherits `Shown`; `jaxsub.show` has its text in `text` and its card in `templates`. The cards need jinja2.
Without it a notebook gets the text, and `to_html` names the extra to install.
"""

from __future__ import annotations

from html import escape
from typing import Any


class Shown:
    """Something with words and a card of its own, by the name of its class."""

    __slots__ = ()

    def __str__(self) -> str:
        from jaxsub.show.text import words_of  # noqa: PLC0415 - shown only when asked

        return words_of(self)

    def to_html(self) -> str:
        """Make a page of its own, for a browser: self-contained, light and dark.

        Raises:
            ImportError: If jinja2 is not there.
        """
        from jaxsub.show.html import page  # noqa: PLC0415 - shown only when asked

        return page(self)

    def _repr_html_(self) -> str:
        from jaxsub.show.html import fragment  # noqa: PLC0415 - shown only when asked

        try:
            return fragment(self)
        except ImportError as error:
            return f"<pre>{escape(str(self))}\n\n{escape(str(error))}</pre>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"{type(self).__name__}(...)" if cycle else str(self))
