"""The disk cache of figures: what it keeps, what it survives, who may share it."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from mutations import STORES, hostile_bytes, mutated_store, peak_bytes, reset_peak_bytes

from jaxsub.core import folder as folders
from jaxsub.core.disk_cache import PATIENCE_SECONDS, Store, default_directory, key_of, open_store
from jaxsub.core.measurement import Measurement

KEY = key_of("a stage", "cpu")
MEASURED = Measurement(4096, 16, 16, 0, None, 0.5, "cpu")
as_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away")


def files(directory):
    return sorted(directory.glob("figures-*/*"))


def filled(directory, value=7):
    """The one file of a directory with one value under `KEY`."""
    Store(directory).put(KEY, value)
    (file,) = files(directory)
    return file


def test_a_value_outlives_its_store(tmp_path):
    """What one store keeps another on the same directory finds, and one elsewhere or in memory does not."""
    Store(tmp_path / "a").put(KEY, MEASURED)
    assert Store(tmp_path / "a").get(KEY, Measurement) == MEASURED
    assert Store(tmp_path / "b").get(KEY, Measurement) is None
    assert open_store(False).get(KEY, Measurement) is None


def test_a_store_in_memory_writes_nothing(tmp_path, monkeypatch):
    """With the cache off, values are kept and no file is made."""
    monkeypatch.chdir(tmp_path)
    store = open_store(False)
    store.put(KEY, 3)
    assert store.get(KEY, int) == 3
    assert list(tmp_path.iterdir()) == []


def test_the_argument_says_where(tmp_path, monkeypatch):
    """`True` is the user's cache directory, a path is that path, `~` the user's home, a store is itself."""
    store = Store(tmp_path)
    assert open_store(True).directory == default_directory()
    assert open_store(str(tmp_path)).directory == tmp_path
    assert open_store(store) is store
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    open_store("~/x").put(KEY, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    with pytest.raises(ValueError, match="no path of a directory"):
        open_store("a\0b")


def test_keys_tell_apart_what_differs():
    """Each part, their division and the schema make another key."""
    keys = [key_of("ab", "c"), key_of("a", "bc"), key_of("ab", "c", "d"), key_of("ab", "c", schema=2)]
    assert len(set(keys)) == 4
    assert key_of("ab", "c") == keys[0]


def test_a_key_holds_the_versions(monkeypatch):
    """Another version of JAX has another key."""
    monkeypatch.setattr("jaxsub.core.disk_cache._versions", lambda: ["0.0", "0.0"])
    assert key_of("a stage", "cpu") != KEY


@pytest.mark.parametrize("value", [float("nan"), float("inf"), replace(MEASURED, flops=float("nan"))])
def test_a_figure_is_finite(value):
    """A number that is not finite is refused when it is put."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        Store(None).put(KEY, value)


@pytest.mark.parametrize("place", [None, "directory"])
def test_a_value_is_of_the_type_that_is_asked_for(tmp_path, place):
    """Of another type, with a field too many or too few, an integer too long or a number for a flag, there is none."""
    store = Store(place and tmp_path / place)
    for value, kind in ((7, bool), (True, int), (2.0, int), ("7", int), (2**63, int), (-(10**300), int), ([1, 2], int),
                        ([1.0], tuple[float, float]), ({"temp_bytes": 3}, Measurement)):  # fmt: skip
        store.put(KEY, value)
        assert store.get(KEY, kind) is None, value
    store.put(KEY, (1, 2))
    assert store.get(KEY, tuple[int, int]) == (1, 2)
    assert store.get(KEY, list[int]) == [1, 2]


def test_a_store_is_plain_data(tmp_path):
    """A store can be pickled."""
    store = Store(tmp_path)
    store.put(KEY, 3)
    assert pickle.loads(pickle.dumps(store)).get(KEY, int) == 3


@pytest.mark.parametrize("make", hostile_bytes().values(), ids=hostile_bytes().keys())
def test_what_is_in_a_file_may_be_anything(tmp_path, make):
    """A file with any content counts as missing, within a second and 200 MB, and is overwritten."""
    file = filled(tmp_path)
    make(file)
    start, before = time.monotonic(), reset_peak_bytes()
    for kind in (int, Measurement, dict[str, int]):
        assert Store(tmp_path).get(KEY, kind) is None
    assert time.monotonic() - start < 1
    assert peak_bytes() - before < 200e6
    Store(tmp_path).put(KEY, 8)
    assert Store(tmp_path).get(KEY, int) == 8


def test_a_foreign_entry_is_not_believed(tmp_path):
    """An entry of another key, with a value or a digest that was changed, is none."""
    file = filled(tmp_path)
    said = json.loads(file.read_bytes())
    other = filled(tmp_path / "other", value=9)
    for changed in (said | {"value": 8}, said | {"key": key_of("b")}, said | {"schema": 2}, said | {"more": 1},
                    json.loads(other.read_bytes()) | {"key": key_of("b")}, [said], {"value": 8}):  # fmt: skip
        file.write_text(json.dumps(changed))
        assert Store(tmp_path).get(KEY, int) is None, changed
    other.replace(file)
    assert Store(tmp_path).get(KEY, int) == 9


def links_to(target):
    """Make the things that a folder may have in place of a file."""
    return {
        "symlink": lambda file: file.symlink_to(target),
        "pipe": lambda file: os.mkfifo(file),
        "directory": lambda file: file.mkdir(),
        "loop": lambda file: file.symlink_to(file.name),
    }


@pytest.mark.parametrize("what", links_to(None))
def test_only_regular_files_are_read(tmp_path, what):
    """A link out of the folder is not followed, a pipe does not keep anybody waiting."""
    file = filled(tmp_path)
    outside = tmp_path / "outside.json"
    file.rename(outside)
    links_to(outside)[what](file)
    start = time.monotonic()
    assert Store(tmp_path).get(KEY, int) is None
    assert time.monotonic() - start < PATIENCE_SECONDS / 2
    if what != "directory":
        Store(tmp_path).put(KEY, 8)
        assert Store(tmp_path).get(KEY, int) == 8
    assert json.loads(outside.read_bytes())["value"] == 7


def by_mode(directory, store):
    store.chmod(0o777)


def parent_by_mode(directory, store):
    directory.chmod(0o777)


def by_owner(directory, store):
    os.chown(store, 12345, -1)


def parent_by_owner(directory, store):
    os.chown(directory, 12345, -1)


def by_link(directory, store):
    store.rename(directory / "elsewhere")
    store.symlink_to(directory / "elsewhere")
    os.chown(store, 12345, -1, follow_symlinks=False)


GIVEN = [by_mode, parent_by_mode, *(pytest.param(g, marks=as_root) for g in (by_owner, parent_by_owner, by_link))]


@pytest.mark.parametrize("give", GIVEN)
def test_a_folder_that_others_may_write_is_refused(tmp_path, give):
    """Where others could have put files nothing is read or written: a warning says so, and what to do."""
    file = filled(tmp_path)
    give(tmp_path, file.parent)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    store = Store(tmp_path)
    with pytest.warns(UserWarning, match=r"others could put anything there\. Pass cache= .* in memory only") as warned:
        assert store.get(KEY, int) is None
    assert len(warned) == 1
    store.put(KEY, 8)
    assert store.get(KEY, int) == 8
    assert before == {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}


@pytest.mark.parametrize("mode", [0o1777, 0o775, 0o755], ids=oct)
def test_a_directory_that_is_shared_holds_a_folder_that_is_not(tmp_path, mode):
    """In `/tmp`, or beside what a group may write, the folder is the user's alone."""
    tmp_path.chmod(mode)
    file = filled(tmp_path)
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert Store(tmp_path).get(KEY, int) == 7


def test_a_link_of_the_users_own_is_followed(tmp_path):
    """A cache directory may be a link to another drive."""
    (tmp_path / "drive").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "drive")
    Store(tmp_path / "cache").put(KEY, 7)
    assert Store(tmp_path / "drive").get(KEY, int) == 7


def test_a_cache_that_can_only_be_read_is_read(tmp_path, monkeypatch):
    """Figures are found, new ones are kept in memory, with one warning."""
    filled(tmp_path)
    really = os.open

    def read_only(path, flags, *more):
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system", str(path))
        return really(path, flags, *more)

    monkeypatch.setattr(folders.os, "open", read_only)
    store = Store(tmp_path)
    with pytest.warns(UserWarning, match=r"cannot be written: .*Read-only.* New figures are kept in memory") as warned:
        store.put("another", 1)
    store.put("a third", 2)
    assert len(warned) == 1
    assert [store.get(key, int) for key in (KEY, "another", "a third")] == [7, 1, 2]


@pytest.mark.parametrize("at", ["file/cache", "file"])
def test_a_directory_that_cannot_be_made_is_no_hindrance(tmp_path, at):
    """Where the directory cannot be made, values are kept in memory with one warning."""
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / at)
    with pytest.warns(UserWarning, match="kept in memory only"):
        store.put(KEY, 1)
    assert store.get(KEY, int) == 1
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("seconds", [60.0, 0.2])
def test_a_drive_that_does_not_answer_costs_a_second_in_all(tmp_path, monkeypatch, seconds):
    """All stores of a process wait a second together, then memory must do; later ones do not wait at all."""
    filled(tmp_path)
    really = os.lstat
    monkeypatch.setattr(folders.os, "lstat", lambda path: time.sleep(seconds) or really(path))

    def use(number):
        store = Store(tmp_path)
        store.put(f"{number}", number)
        return store.get(f"{number}", int)

    start = time.monotonic()
    with pytest.warns(UserWarning, match=r"does not answer within 1 s\. New figures are kept in memory only"):
        assert [use(number) for number in range(20)] == list(range(20))
    assert time.monotonic() - start < 1.5 * PATIENCE_SECONDS


def test_the_oldest_files_go_first_and_no_others(tmp_path, monkeypatch):
    """Beyond its limits the oldest figures go, and what was left half-written; what is not ours stays as it is."""
    file = filled(tmp_path)
    store, names = Store(tmp_path), [f"{number:064x}" for number in range(12)]
    found = folders.Folder(tmp_path, file.parent.name)
    for age, name in enumerate(names):
        found.write(name, b"x" * 100)
        os.utime(file.parent / f"jaxsub-{name}.json", (age, age))
    left = file.parent / f"jaxsub-{names[0]}.json.{'0' * 16}.tmp"
    outside = tmp_path / f"jaxsub-{names[0]}.json"
    mine = [file.parent / "thesis.json", file.parent / f"{names[0]}.json", file.parent / f"jaxsub-{names[0]}.json.old",
            file.parent / f"jaxsub-{'f' * 64}.json", outside]  # fmt: skip
    for path in (*mine[:3], left, outside):
        path.write_text("mine")
        os.utime(path, (0, 0))
    mine[3].symlink_to(outside)
    (file.parent / f"jaxsub-{'e' * 64}.json").mkdir()
    monkeypatch.setattr(folders, "MOST_FILES", 8)
    found.sweep()
    there = set(files(tmp_path))
    assert [(file.parent / f"jaxsub-{name}.json") in there for name in names] == [False] * 7 + [True] * 5
    assert file in there
    assert left not in there
    assert all(path.read_text() == "mine" for path in mine)
    monkeypatch.setattr(folders, "MOST_BYTES", 400)
    monkeypatch.setattr(folders, "SWEPT", "")
    store.put("large", "x" * 200)
    assert sum(path.stat().st_size for path in files(tmp_path) if path.name.startswith("jaxsub-") and path.is_file(
        ) and path not in mine) <= 400  # fmt: skip


def test_a_value_too_large_for_a_file_is_kept_in_memory(tmp_path, monkeypatch):
    """What takes more than a file may is not written."""
    monkeypatch.setattr(folders, "MOST_FILE_BYTES", 300)
    store = Store(tmp_path)
    store.put(KEY, "x" * 400)
    assert store.get(KEY, str) == "x" * 400
    assert Store(tmp_path).get(KEY, str) is None


WRITER = """
    import sys, warnings
    warnings.simplefilter("error")
    from jaxsub.core.disk_cache import Store
    store = Store(sys.argv[1])
    for number in range(60):
        store.put(f"{sys.argv[2]}-{number}", [number])
        store.put("shared", list(range(20)))
        assert Store(sys.argv[1]).get("shared", list[int]) == list(range(20))
"""


def start(code, *args):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_two_processes_write_at_once(tmp_path):
    """Two processes that write the same directory lose nothing, read nothing half-written and warn of nothing."""
    writers = [start(WRITER, tmp_path, name) for name in ("a", "b")]
    said = [writer.communicate(timeout=60)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], said
    store = Store(tmp_path)
    found = [store.get(f"{name}-{n}", list[int]) for name in "ab" for n in range(60)]
    assert found == [[n] for _ in "ab" for n in range(60)]
    assert not list(tmp_path.rglob("*.tmp"))


ENDLESS = """
    import sys
    from jaxsub.core.disk_cache import Store
    store = Store(sys.argv[1])
    print("begun", flush=True)
    while True:
        store.put("shared", list(range(100_000)))
"""


def test_a_process_that_is_killed_leaves_whole_files(tmp_path):
    """Killed in mid-write, a process leaves the old value or the new, and what it had begun is no hindrance."""
    writer = start(ENDLESS, tmp_path)
    writer.stdout.readline()
    time.sleep(0.3)
    writer.kill()
    writer.communicate(timeout=60)
    assert Store(tmp_path).get("shared", list[int]) == list(range(100_000))
    for begun in tmp_path.rglob("*.tmp"):
        os.utime(begun, (0, 0))
    (store,) = tmp_path.iterdir()
    folders.Folder(tmp_path, store.name).sweep()
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(files(tmp_path)) == 1


def test_threads_share_a_store(tmp_path):
    """Eight threads on one store lose nothing."""
    store = Store(tmp_path)

    def write(name):
        for number in range(20):
            store.put(f"{name}-{number}", number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, "abcdefgh"))
    fresh = Store(tmp_path)
    assert [fresh.get(f"{name}-{n}", int) for name in "abcdefgh" for n in range(20)] == list(range(20)) * 8


@pytest.mark.parametrize(
    "number", [*range(20), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(20, STORES))]
)
def test_changed_stores(tmp_path, number):
    """However a folder's files are changed, moved, cut and linked, figures are those put or none, and nobody waits."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    directory = tmp_path / "cache"
    values = {f"{n}": MEASURED if n % 2 else replace(MEASURED, temp_bytes=n) for n in range(8)}
    for key, value in values.items():
        Store(directory).put(key, value)
    mutated_store(number, files(directory), outside)
    there = set(tmp_path.rglob("*"))
    begun, before, store = time.monotonic(), reset_peak_bytes(), Store(directory)
    for key, value in values.items():
        assert store.get(key, Measurement) in (value, None)
    assert time.monotonic() - begun < 1
    assert peak_bytes() - before < 200e6
    assert set(tmp_path.rglob("*")) == there
    assert outside.read_text() == "mine"
