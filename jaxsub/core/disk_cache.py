"""A disk cache of figures: key in, JSON value out; what was measured once is not compiled again.

In goes a key made by `key_of` (a digest of what was measured, where, and by which versions) and a small value that
JSON can hold; out comes the value, or `None`. The library `diskcache` (SQLite) keeps the entries, so that any number
of threads and processes may share them. Text is all that is ever read: nothing is unpickled.

A cache may always be lost: a file that cannot be read, or was written by something else, is ignored with a warning and
a new one is begun beside it (to remove a database that another process has open would ruin both). Where a directory
cannot be written, values are kept in memory only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import diskcache

SCHEMA = 2  # raise it when the meaning of a stored figure changes
SIZE_LIMIT_BYTES = 64 * 2**20  # some 100,000 figures; the least recently stored go first
TIMEOUT_SECONDS = 10.0  # how long to wait for another process's write
MAX_FILES = 16  # how many unreadable files to pass over before keeping values in memory
MARK = "unreadable"
T = TypeVar("T")


def key_of(*parts: str, schema: int = SCHEMA) -> str:
    """Make a key: a digest of what was measured and of the versions that measured it.

    Args:
        *parts: What was measured and where: a fingerprint, a target's name and spec, options.
        schema: The version of what is stored.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> key_of("a stage", "cpu") == key_of("a stage", "cpu") != key_of("a stage", "h100")
        True
    """
    return hashlib.sha256(json.dumps([schema, _versions(), parts]).encode()).hexdigest()


@functools.cache
def code_digest() -> str:
    """A digest of this package's code: part of the key of what any of it may change, such as whole plans."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def open_store(cache: bool | str | os.PathLike[str] | Store = True) -> Store:
    """Find the store that a `cache` argument asks for.

    Args:
        cache: `True` for the user's cache directory, `False` for values in memory only, a directory, or a store.

    Example:
        >>> open_store(False).directory is None
        True
    """
    if isinstance(cache, Store):
        return cache
    if cache is False:
        return Store(None)
    return Store(default_directory() if cache is True else Path(cache))


def default_directory() -> Path:
    """The user's cache directory for jaxsub, by the operating system's custom; it need not exist."""
    import platformdirs  # noqa: PLC0415 - not needed to import jaxsub

    return Path(platformdirs.user_cache_dir("jaxsub", appauthor=False))


class Store:
    """Figures by key, on disk and in memory.

    Attributes:
        directory: Where they are kept; `None` for in memory only.

    Example:
        >>> store = Store(None)
        >>> store.put("key", {"temp_bytes": 4096})
        >>> store.get("key")
        {'temp_bytes': 4096}
        >>> store.get("another") is None
        True
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None):
        self.directory = None if directory is None else Path(directory)
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()
        self._cache: diskcache.Cache | None = None
        self._is_off = directory is None

    def get(self, key: str) -> Any:
        """Return the value stored under a key, or `None`; an entry that is no JSON is a warning and `None`."""
        text = self._texts.get(key)
        if text is None:
            text = self._on_disk(lambda cache: cache.get(key))
        if text is None:
            return None
        try:
            value = json.loads(text)
        except ValueError as error:
            warnings.warn(f"an entry of jaxsub's cache in {self.directory} is ignored: {error}", stacklevel=2)
            return None
        self._texts[key] = text
        return value

    def put(self, key: str, value: Any) -> None:
        """Store a value that JSON can hold; tuples come back as lists.

        Raises:
            TypeError: If JSON cannot hold it.
            ValueError: If it holds a number that is not finite.
        """
        text = json.dumps(value, allow_nan=False)
        self._texts[key] = text
        self._on_disk(lambda cache: cache.set(key, text))

    def close(self) -> None:
        """Close the file; the store can be used again."""
        with self._lock:
            if self._cache is not None:
                self._cache.close()
                self._cache = None

    def _on_disk(self, act: Callable[[diskcache.Cache], T]) -> T | None:
        """Do something with the file; go on to a new one where it cannot be read, and without where none can."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self._is_off:
            place = None
            try:
                place = self._place()
                return act(self._open(place))
            except diskcache.Timeout:  # another process has been writing all the while
                return None
            except (sqlite3.Error, OSError, TypeError) as error:
                if not _is_busy(error):
                    self._give_up(place, error)
                elif time.monotonic() > deadline:
                    return None
                else:  # opening, unlike reading and writing, does not wait by itself
                    time.sleep(0.01)
        return None

    def _place(self) -> Path:
        """The first place whose file nobody has marked as unreadable."""
        assert self.directory is not None
        places = [self.directory / f"figures-{SCHEMA}-{number}" for number in range(MAX_FILES)]
        for place in places:
            if not (place / MARK).exists():
                return place
        raise FileNotFoundError(f"{MAX_FILES} files in it were unreadable")

    def _open(self, place: Path) -> diskcache.Cache:
        with self._lock:
            if self._cache is None or self._cache.directory != str(place):
                if self._cache is not None:
                    self._cache.close()
                # No write-ahead log and no memory map: they fail on network drives, where homes often are.
                self._cache = diskcache.Cache(
                    str(place), timeout=TIMEOUT_SECONDS, disk=TextDisk, size_limit=SIZE_LIMIT_BYTES,
                    sqlite_journal_mode="delete", sqlite_mmap_size=0, sqlite_synchronous=0,
                )  # fmt: skip
                weakref.finalize(self, self._cache.close)  # Python 3.13 warns of connections that nobody closes
            return self._cache

    def _give_up(self, place: Path | None, error: Exception) -> None:
        """Mark a file that is damaged or not ours; where it is the directory that fails, do without one."""
        with self._lock:
            if self._is_off or (place is not None and (place / MARK).exists()):
                return  # another thread or process has seen to it
            try:
                if place is None or not _is_unreadable(error):
                    raise error
                (place / MARK).touch()
            except (sqlite3.Error, OSError) as failure:
                self._is_off = True
                says = f"jaxsub's cache in {self.directory} cannot be used, figures are kept in memory only: {failure}"
            else:
                says = f"jaxsub's cache file in {place} cannot be read and is ignored, a new one is begun: {error}"
        warnings.warn(says, stacklevel=4)


class TextDisk(diskcache.Disk):
    """Keeps text and reads text, inside the database, never a pickle: the file may be anybody's."""

    def put(self, key: str) -> tuple[str, bool]:
        """Take a key as it is."""
        return key, True

    def get(self, key: Any, raw: bool) -> Any:
        """Give a key as it is."""
        return key if raw else None

    def store(self, value: str, read: bool, key: Any = None) -> tuple[int, int, None, str]:
        """Take a value as it is."""
        return len(value), diskcache.core.MODE_RAW, None, value

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> str:
        """Give a value if it is text; anything else is as good as an entry that is no JSON."""
        return value if mode == diskcache.core.MODE_RAW and isinstance(value, str) else "not text"


def _is_unreadable(error: Exception) -> bool:
    """Whether the file is damaged or another program's, rather than out of reach."""
    name = getattr(error, "sqlite_errorname", "")
    return isinstance(error, TypeError) or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR"))


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


@functools.cache
def _versions() -> list[str]:
    return [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
