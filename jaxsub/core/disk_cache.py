"""A disk cache of figures: key in, value out; what was measured once is not compiled again.

In goes a key made by `key_of` (a digest of what was measured, where, and by which versions) and a value of figures, a
measurement or a plan; out comes the value, of the type that is asked for, or `None`. Each value is a file of JSON in a
folder of the user's (`jaxsub.core.folder`), beside its key and a digest of both.

**Why files.** A database was kept here before (`diskcache`, SQLite). Its rows name files that it removes, its settings
are read from itself, entries are compressed, and a writer locks all others out: much to be checked in what may be
anybody's, and much that can stand still. A file is opened without following links, is read whole or not at all, has a
limited size, and is compared with its digest and then with the declared type (`jaxsub.core.codec`) before anything of
it is used. Damaged, foreign or of another version, it is as good as nothing there. The digest finds damage; it does not
find forgery: nobody but the user may write the folder.

A cache may always be lost. Where a directory cannot be used, values are kept in memory only, and a warning says why;
one that can only be read is read. Waiting for a slow drive takes a second in all, then memory must do.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jaxsub.core import codec
from jaxsub.core.folder import Folder

SCHEMA = 3  # raise it when the meaning of a stored figure changes
PATIENCE_SECONDS = 1.0
"""How long a process waits for a slow directory, in all."""

QUICK_SECONDS = 0.05
"""An answer within this is no wait: it spares a compile that takes longer. It gives back as much patience."""

T = TypeVar("T")


def key_of(*parts: str, schema: int = SCHEMA) -> str:
    """Make a key: 64 hexadecimal digits, a digest of what was measured and where, and of the versions that did."""
    return hashlib.sha256(json.dumps([schema, _versions(), parts]).encode()).hexdigest()


@functools.cache
def code_digest() -> str:
    """A digest of this package's code: part of the key of what any of it may change, such as whole plans."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def open_store(cache: bool | str | os.PathLike[str] | Store = True) -> Store:
    """Find the store: `True` for the user's cache directory, `False` for memory only, a directory, or a store."""
    if isinstance(cache, Store):
        return cache
    if not isinstance(cache, bool | str | os.PathLike):
        raise TypeError(f"cache= is True, False for in memory only, a directory or a store; got {cache!r:.99}.")
    if cache is False:
        return Store(None)
    return Store(default_directory() if cache is True else Path(cache))


def default_directory() -> Path:
    """The user's cache directory for jaxsub, by the operating system's custom; it need not exist."""
    import platformdirs  # noqa: PLC0415 - not needed to import jaxsub

    return Path(platformdirs.user_cache_dir("jaxsub", appauthor=False))


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """What a file holds: a value as text, what it belongs to, and a digest of both."""

    schema: int
    key: str
    digest: str
    value: msgspec.Raw


@dataclass(slots=True)
class _Disk:
    """One directory, for all stores of this process, and how long may still be waited for it."""

    folder: Folder
    patience_seconds: float = PATIENCE_SECONDS


@functools.cache
def _disk(directory: Path) -> _Disk:
    return _Disk(Folder(directory, f"figures-{SCHEMA}"))


@dataclass(slots=True, eq=False)
class Store:
    """Values by key, on disk and in memory.

    Attributes:
        directory: Where they are kept, the user's home written as `~` perhaps; `None` for in memory only.
    """

    directory: Path | None = None
    _texts: dict[str, str | bytes] = field(init=False, repr=False, default_factory=dict)
    _is_read: bool = field(init=False, repr=False, default=True)
    _is_written: bool = field(init=False, repr=False, default=True)

    def __post_init__(self) -> None:
        if self.directory is None:
            self._is_read = self._is_written = False
            return
        if "\0" in os.fspath(self.directory):
            raise ValueError(f"cache={os.fspath(self.directory)!r} is no path of a directory")
        self.directory = Path(self.directory).expanduser()

    def get(self, key: str, kind: Any) -> Any:
        """Return the value of this type that is stored under a key, or `None`."""
        text = self._texts.get(key)
        if text is None and self._is_read:
            data = self._on_disk(lambda folder: folder.read(_digest(key)))
            text = None if data is None else _opened(data, key)
        if text is None:
            return None
        try:
            value = codec.read(text, kind)
        except ValueError:
            return None
        self._texts[key] = text
        return value

    def put(self, key: str, value: Any) -> None:
        """Store a value; `TypeError` or `ValueError` if JSON cannot hold it."""
        text = codec.write(value)
        self._texts[key] = text
        if self._is_written:
            data = msgspec.json.encode(_Entry(SCHEMA, key, _digest(key, text.encode()), msgspec.Raw(text.encode())))
            self._on_disk(lambda folder: folder.write(_digest(key), data), is_read=False)

    def _on_disk(self, act: Callable[[Folder], T], *, is_read: bool = True) -> T | None:
        """Do something with the folder, in a thread that may be left waiting; do without where that fails."""
        assert self.directory is not None
        disk, start, future = _disk(self.directory), time.monotonic(), Future[T]()

        def work() -> None:
            try:
                future.set_result(act(disk.folder))
            except OSError as error:
                future.set_exception(error)

        try:
            if disk.patience_seconds <= 0:
                raise TimeoutError
            threading.Thread(target=work, daemon=True, name="jaxsub's cache").start()
            return future.result(disk.patience_seconds)
        except TimeoutError:
            self._is_read = self._is_written = False
            self._warn(f"does not answer within {PATIENCE_SECONDS:.0f} s")
        except OSError as error:
            self._is_read, self._is_written = self._is_read and not is_read, False
            self._warn(f"cannot be {'read' if is_read else 'written'}: {error}")
        finally:
            waited = time.monotonic() - start
            if waited > QUICK_SECONDS:
                disk.patience_seconds -= waited
            elif disk.patience_seconds > 0:
                disk.patience_seconds = min(PATIENCE_SECONDS, disk.patience_seconds + QUICK_SECONDS)
        return None

    def _warn(self, fault: str) -> None:
        warnings.warn(f"jaxsub's cache in {self.directory} {fault}. New figures are kept in memory only.", stacklevel=4)


def _digest(key: str, value: bytes = b"") -> str:
    """What a file is named by, and what its value is compared with."""
    return hashlib.blake2b(value, key=hashlib.blake2b(key.encode()).digest(), digest_size=32).hexdigest()


def _opened(data: bytes, key: str) -> bytes | None:
    """The text of the value in a file; `None` where the file is none of ours, damaged, or of another key."""
    try:
        entry = msgspec.json.decode(data, type=_Entry)
    except (ValueError, RecursionError):
        return None
    text = bytes(entry.value)
    is_ours = entry.schema == SCHEMA and entry.key == key and entry.digest == _digest(key, text)
    return text if is_ours else None


@functools.cache
def _versions() -> list[str]:
    return [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
