"""Texts, files and folders as nobody should write them: what is read from disk is tried on these."""

import contextlib
import gzip
import os
import random
import re
import resource
import sys
import zlib
from pathlib import Path

PLANS, STORES = 1_000, 200
"""How many changed plans and stores `pytest -m exhaustive` tries."""


STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_bytes():
    """Begin to watch for the most memory this process has, where the system can; return what it has now."""
    with contextlib.suppress(OSError):
        RESET.write_text("5")
    return peak_bytes()


def peak_bytes():
    """The most memory this process has had since."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    kib = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * (1 if sys.platform == "darwin" else 1024)


def hostile_bytes():
    """Contents of a file, by name."""

    def writes(data):
        return lambda file: file.write_bytes(data)

    def entry(value):
        """An entry with whatever value, right in form."""
        return lambda file: file.write_bytes(file.read_bytes().replace(b'"value":7', b'"value":' + value))

    return {
        "empty": writes(b""),
        "zeros": writes(bytes(1000)),
        "no UTF-8": writes(b'{"key": "\xff\xfe"}'),
        "no UTF-8 inside": entry(b'"\xff"'),
        "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        "lists in lists": writes(b"[" * 3_000_000),
        "closed lists in lists": entry(b"[" * 1_000_000 + b"]" * 1_000_000),
        "objects in objects": entry(b'{"a":' * 500_000),
        "many lists": entry(b"[" + b"[]," * 1_300_000 + b"[]]"),
        "many fields": writes(b"{" + b",".join(b'"%d":{}' % n for n in range(300_000)) + b"}"),
        "an integer of 300 digits": entry(b"9" * 300),
        "an integer of a million digits": entry(b"9" * 1_000_000),
        "no number": entry(b"NaN"),
        "a number out of range": entry(b"1e999"),
        "a zlib bomb": writes(zlib.compress(bytes(2**28))),
        "a gzip bomb": writes(gzip.compress(bytes(2**26))),
        "gigabytes": lambda file: os.truncate(file, 2**33),
        "a pickle": writes(b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94."),
        "a database": writes(b"SQLite format 3\0" + bytes(4080)),
    }


def mutated_bytes(rng, data):
    """Bytes with some changed, cut, doubled, or replaced by what JSON parsers stumble over."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((0, 1, 3, 20)))
        rows = (b"", bytes([rng.randrange(256)]), b"-", b"9" * 30, b"1e400", b"NaN", b"null", b"true", b"[]", b"{}",
                b'"', b"\xff", b"\\ud800", b"[" * 2000, bytes(data[end : end + 50]))  # fmt: skip
        data[at:end] = rng.choice(rows)
    return bytes(data)


def mutated_store(seed, files, outside):
    """Change the files of a folder: their bytes, their names, their kind, and other files beside them."""
    rng = random.Random(seed)
    for file in rng.sample(files, rng.randrange(1, len(files))):
        data = file.read_bytes()
        kind = rng.randrange(7)
        if kind <= 2:
            file.write_bytes(mutated_bytes(rng, data))
        elif kind == 3:  # another's
            other = rng.choice(files)
            file.write_bytes(other.read_bytes() if other.is_file() and not other.is_symlink() else b"")
        else:
            file.unlink()
            if kind == 4:
                file.symlink_to(outside)
            elif kind == 5:
                file.mkdir()
            else:
                os.mkfifo(file)


def mutated_json(rng, data, depth=0):
    """JSON data with one thing changed somewhere inside: a value, a type, a field, an order, a length."""
    if isinstance(data, dict) and data and (depth == 0 or rng.random() < 0.9):
        name = rng.choice(list(data))
        changed = dict(data)
        what = rng.random()
        if what < 0.05:
            del changed[name]
        elif what < 0.08:
            changed["nonsense"] = changed.pop(name)
        else:
            changed[name] = mutated_json(rng, data[name], depth + 1)
        return changed
    if isinstance(data, list) and data and rng.random() < 0.9:
        at = rng.randrange(len(data))
        what = rng.random()
        if what < 0.1:
            return data[:at] + data[at + 1 :]
        if what < 0.2:
            return data[:at] + [data[at]] * 2 + data[at:]
        if what < 0.25:
            return data[::-1]
        if what < 0.3:
            return []
        return [*data[:at], mutated_json(rng, data[at], depth + 1), *data[at + 1 :]]
    wild = (None, True, False, "", "x", "\x00é", [], {}, [data], {"a": data}, 0, 1, -1, 2, 3, 0.5, -0.5, 1e300, 2**31,
            2**63 - 1, -(2**63), 2**64, 10**300, [[[]]], 7, 12)  # fmt: skip
    if isinstance(data, int) and not isinstance(data, bool) and rng.random() < 0.5:
        return data + rng.choice((-1, 1, -2, 2, 10, -10))
    return rng.choice(wild)
