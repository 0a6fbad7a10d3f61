"""A folder of small files that belongs to one user: named by digests, read with care, written whole or not at all.

A name, 64 hexadecimal digits, and bytes go in; the bytes, or nothing, come out. Any number of threads and processes may
share a folder, over a network too: a file is written under another name and then renamed (`os.replace`), so that others
read the old one or the new one. A killed process leaves a file that is never read and soon removed.

Files that another user could have written are not read: the folder and its parent directory must belong to this user or
to the superuser and be writable by nobody else; links are not followed out of it, and a file is a regular one of
limited size. The oldest files are removed where all take too much. Nothing else is removed or changed: no file outside
the folder, and none in it whose name has another form.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_FILE_BYTES = 4 * 2**20
"""A plan of 5,000 equations takes a tenth of it."""

MOST_BYTES = 128 * 2**20
MOST_FILES = 20_000
"""Where there is more, the files written longest ago are removed until a quarter is free."""

TEMPORARY_SECONDS = 3600.0
"""A file that was begun so long ago and not put in its place was left by a process that is gone."""

SWEPT = "0"
"""The folder is looked through when a name that begins like this is written: once in sixteen times."""

_NAME = re.compile(r"jaxsub-[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"jaxsub-[0-9a-f]{64}\.json\.[0-9a-f]{16}\.tmp")
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_BINARY = getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of one kind in a folder of this name in the directory that the user named."""

    directory: Path
    name: str

    @property
    def path(self) -> Path:
        """Where the files are."""
        return self.directory / self.name

    def read(self, digest: str) -> bytes | None:
        """The bytes under a digest; `None` where there are none, or what is there is no file of ours.

        An `OSError` says that the folder cannot be read, or somebody else may write it; so for `write`.
        """
        if not self._is_there():
            return None
        try:
            number = os.open(self._place(digest), os.O_RDONLY | _SAFE | _BINARY)
        except OSError:  # not there, a link, a socket, forbidden
            return None
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_FILE_BYTES or _is_others(found, 0o022):
                return None
            with open(number, "rb", closefd=False) as file:
                return file.read(MOST_FILE_BYTES)
        finally:
            os.close(number)

    def write(self, digest: str, data: bytes) -> None:
        """Put bytes under a digest; more than `MOST_FILE_BYTES` are not kept."""
        if len(data) > MOST_FILE_BYTES:
            return
        if not self._is_there():
            os.makedirs(self.directory, 0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process was quicker
                os.mkdir(self.path, 0o700)
            self._is_there()
        place = self._place(digest)
        beside = place.with_name(f"{place.name}.{secrets.token_hex(8)}.tmp")
        number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE | _BINARY, 0o600)
        try:
            with open(number, "wb") as file:
                file.write(data)
            os.replace(beside, place)
        except OSError:
            _remove(beside)
            raise
        if digest.startswith(SWEPT):
            self.sweep()

    def sweep(self) -> None:
        """Remove what was left half-written, and the oldest files where all take too much."""
        found = sorted(self._own())
        n_bytes, n_files = sum(size for _, size, _ in found), len(found)
        if n_bytes <= MOST_BYTES and n_files <= MOST_FILES:
            return
        for _, size, path in found:
            if n_bytes <= 0.75 * MOST_BYTES and n_files <= 0.75 * MOST_FILES:
                return
            _remove(path)
            n_bytes, n_files = n_bytes - size, n_files - 1

    def _own(self) -> Iterator[tuple[float, int, Path]]:
        """When each file of ours was written, its bytes, and where it is."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                is_begun = _TEMPORARY.fullmatch(entry.name) is not None
                if not (is_begun or _NAME.fullmatch(entry.name)) or not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process removed it
                    continue
                if not is_begun:
                    yield found.st_mtime, found.st_size, Path(entry.path)
                elif time.time() - found.st_mtime > TEMPORARY_SECONDS:
                    _remove(Path(entry.path))

    def _place(self, digest: str) -> Path:
        place = self.path / f"jaxsub-{digest}.json"
        if not _NAME.fullmatch(place.name):
            raise ValueError(f"{digest!r} is no digest of 64 hexadecimal digits")
        return place

    def _is_there(self) -> bool:
        """Whether the folder is there; it has to be ours.

        Into a directory that everybody may write, with the sticky bit as `/tmp` has it, others can put a folder, but
        not in the place of ours.
        """
        try:
            _require_own(self.directory, 0o002)
            _require_own(self.path, 0o022)
        except FileNotFoundError:
            return False
        return True


def _require_own(path: Path, bits: int) -> None:
    """Refuse a directory that another user made or may write; a link to one counts as whose it is."""
    for found in (os.lstat(path), os.stat(path)):
        if stat.S_ISLNK(found.st_mode):
            bad = _is_others(found, 0)
        elif not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(f"{path} is no directory")
        else:
            bad = _is_others(found, 0 if found.st_mode & stat.S_ISVTX else bits)
        if bad:
            raise PermissionError(
                f"{path} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}: others could put "
                f"anything there. Pass cache= a directory of your own, or take their right to write away: "
                f"chmod go-w {path}"
            )


def _is_others(found: os.stat_result, bits: int) -> bool:
    """Whether something belongs to another user, or has one of some bits of its mode set."""
    if not hasattr(os, "getuid"):  # Windows: the directory of a user is the user's alone
        return False
    return found.st_uid not in (os.getuid(), 0) or bool(found.st_mode & bits)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
