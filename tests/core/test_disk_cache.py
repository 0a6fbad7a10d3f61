"""The disk cache of figures: what it keeps, what it survives, who may share it."""

import pickle
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxsub.core.disk_cache import MARK, MAX_FILES, Store, default_directory, key_of, open_store

KEY = key_of("a stage", "cpu")


def first_file(directory, number=0):
    return directory / f"figures-2-{number}" / "cache.db"


def filled(directory, value=7):
    """A directory with one value under `KEY`, its file closed."""
    store = Store(directory)
    store.put(KEY, value)
    store.close()
    return first_file(directory)


def set_entry(file, **fields):
    """Change the one entry of a file."""
    with sqlite3.connect(file) as database:
        for name, value in fields.items():
            database.execute(f"UPDATE Cache SET {name} = ?", (value,))
    database.close()


def test_a_value_outlives_its_store(tmp_path):
    """What one store keeps another on the same directory finds, and one elsewhere or in memory does not."""
    Store(tmp_path / "a").put(KEY, {"temp_bytes": 4096, "shape": [1, 2.5, None, "x"]})
    assert Store(tmp_path / "a").get(KEY) == {"temp_bytes": 4096, "shape": [1, 2.5, None, "x"]}
    assert Store(tmp_path / "b").get(KEY) is None
    assert open_store(False).get(KEY) is None


def test_a_store_in_memory_writes_nothing(tmp_path, monkeypatch):
    """With the cache off, values are kept and no file is made."""
    monkeypatch.chdir(tmp_path)
    store = open_store(False)
    store.put(KEY, 3)
    assert store.get(KEY) == 3
    assert list(tmp_path.iterdir()) == []


def test_the_argument_says_where(tmp_path):
    """`True` is the user's cache directory, a path is that path, a store is itself."""
    store = Store(tmp_path)
    assert open_store(True).directory == default_directory()
    assert open_store(str(tmp_path)).directory == tmp_path
    assert open_store(store) is store


def test_keys_tell_apart_what_differs():
    """Each part, their division and the schema make another key."""
    keys = [key_of("ab", "c"), key_of("a", "bc"), key_of("ab", "c", "d"), key_of("ab", "c", schema=3)]
    assert len(set(keys)) == 4
    assert key_of("ab", "c") == keys[0]


def test_a_key_holds_the_versions(monkeypatch):
    """Another version of JAX has another key."""
    monkeypatch.setattr("jaxsub.core.disk_cache._versions", lambda: ["0.0", "0.0"])
    assert key_of("a stage", "cpu") != KEY


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_is_finite(value):
    """A number that is not finite is refused when it is put."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        Store(None).put(KEY, value)


def test_a_tuple_comes_back_as_a_list_at_once():
    """A value read from memory is what would be read from disk."""
    store = Store(None)
    store.put(KEY, (1, 2))
    assert store.get(KEY) == [1, 2]


def damage_all(file):
    file.write_bytes(b"no database at all" * 100)


def damage_middle(file):
    data = file.read_bytes()
    file.write_bytes(data[:512] + b"\xff" * (len(data) - 512))


def another_program(file):
    file.unlink()
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE Cache (recipe TEXT)")
    database.close()


def other_settings(file):
    with sqlite3.connect(file) as database:
        database.execute("INSERT INTO Settings VALUES ('disk_colour', 'red')")
    database.close()


@pytest.mark.parametrize("damage", [damage_all, damage_middle, another_program, other_settings])
def test_an_unreadable_file_is_ignored_once_and_a_new_one_begun(tmp_path, damage):
    """A damaged or foreign file is ignored with one warning; values are kept in a new one from then on."""
    file = filled(tmp_path)
    damage(file)
    store = Store(tmp_path)
    with pytest.warns(UserWarning, match="cannot be read and is ignored, a new one is begun") as warned:
        assert store.get(KEY) is None
    assert len(warned) == 1
    store.put(KEY, 8)
    assert Store(tmp_path).get(KEY) == 8


def test_a_file_that_goes_bad_in_use_is_replaced(tmp_path):
    """A file that is damaged while a store has it open is replaced without losing the store's values."""
    store = Store(tmp_path)
    store.put(KEY, 1)
    damage_all(first_file(tmp_path))
    with pytest.warns(UserWarning, match="a new one is begun"):
        store.put(key_of("another"), 2)
    assert (store.get(KEY), Store(tmp_path).get(key_of("another"))) == (1, 2)


class Boom:
    """Does harm when it is unpickled."""

    def __reduce__(self):
        return (sys.exit, ("unpickled",))


@pytest.mark.parametrize("fields", [{"value": "{broken"}, {"value": 3}, {"mode": 4, "value": pickle.dumps(Boom())}])
def test_an_entry_that_is_no_json_is_ignored_and_rewritten(tmp_path, fields):
    """A foreign entry is a warning and a miss, a pickle is never loaded, and the next value takes its place."""
    set_entry(filled(tmp_path), **fields)
    store = Store(tmp_path)
    with pytest.warns(UserWarning, match="entry of jaxsub's cache .* is ignored"):
        assert store.get(KEY) is None
    store.put(KEY, 9)
    assert Store(tmp_path).get(KEY) == 9


def test_after_many_bad_files_memory_must_do(tmp_path):
    """When every file is marked unreadable the store says so once and works on in memory."""
    for number in range(MAX_FILES):
        first_file(tmp_path, number).parent.mkdir()
        (first_file(tmp_path, number).parent / MARK).touch()
    store = Store(tmp_path)
    with pytest.warns(UserWarning, match="kept in memory only") as warned:
        store.put(KEY, 1)
    assert len(warned) == 1
    assert store.get(KEY) == 1


def test_a_directory_that_cannot_be_made_is_no_hindrance(tmp_path):
    """Where the directory cannot be made, values are kept in memory with one warning."""
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="kept in memory only"):
        store.put(KEY, 1)
    assert store.get(KEY) == 1


WRITER = """
    import sys, warnings
    warnings.simplefilter("error")
    from jaxsub.core.disk_cache import Store
    store = Store(sys.argv[1])
    for number in range(60):
        store.put(f"{sys.argv[2]}-{number}", [number])
        store.put("shared", list(range(20)))
        assert Store(sys.argv[1]).get("shared") == list(range(20))
"""


def start_writer(directory, name, warn="error"):
    code = textwrap.dedent(WRITER).replace('"error"', repr(warn))
    return subprocess.Popen([sys.executable, "-c", code, str(directory), name], stderr=subprocess.PIPE, text=True)


def test_two_processes_write_at_once(tmp_path):
    """Two processes that write the same directory lose nothing and warn of nothing."""
    writers = [start_writer(tmp_path, name) for name in ("a", "b")]
    said = [writer.communicate(timeout=60)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], said
    store = Store(tmp_path)
    assert [store.get(f"{name}-{n}") for name in "ab" for n in range(60)] == [[n] for _ in "ab" for n in range(60)]


def test_two_processes_meet_a_damaged_file(tmp_path):
    """Two processes that find the same damaged file agree on the new one."""
    damage_all(filled(tmp_path))
    writers = [start_writer(tmp_path, name, warn="default") for name in ("a", "b")]
    said = [writer.communicate(timeout=60)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], said
    store = Store(tmp_path)
    assert [store.get(f"{name}-{n}") for name in "ab" for n in range(60)] == [[n] for _ in "ab" for n in range(60)]
    assert not first_file(tmp_path, 2).exists()


def test_threads_share_a_store(tmp_path):
    """Eight threads on one store lose nothing, also while its file turns out to be damaged."""
    damage_all(filled(tmp_path))
    store = Store(tmp_path)

    def write(name):
        for number in range(20):
            store.put(f"{name}-{number}", number)

    with ThreadPoolExecutor(8) as threads, pytest.warns(UserWarning, match="a new one is begun"):
        list(threads.map(write, "abcdefgh"))
    fresh = Store(tmp_path)
    assert [fresh.get(f"{name}-{n}") for name in "abcdefgh" for n in range(20)] == list(range(20)) * 8
