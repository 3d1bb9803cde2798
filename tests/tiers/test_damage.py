"""Damage to the folder of a disk store, one kind a test, and the limit of its cost."""

import errno
import fcntl
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headstart.tiers.files
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import INDEX
from headstart.tiers.store import ModelRecord
from tests.tiers.stores import MODEL, block, blocks, disk, held, names

SLOT = 2560  # bytes that a block of `MODEL` takes in its file
OTHER = ModelRecord("other weights", "another model", 16, 700)


def total(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.kv"))


def works(store: DiskStore, first: int = 9000) -> None:
    """Return True if new blocks are saved and loaded, at the latest at the second try."""
    if store.save(blocks(range(first, first + 3), used=1e9)) < 3:
        store.save(blocks(range(first, first + 3), used=1e9))
    assert held(store, range(first, first + 3)) == 3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """Return a store with forty blocks of two prompts."""
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(20)) + blocks(range(100, 120)))
        yield store


def change(folder: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(folder / INDEX)) as index, index:
        index.execute(statement, values)


def test_a_folder_without_its_index_lists_the_blocks_again(store: DiskStore) -> None:
    with closing(disk(store.folder, model=OTHER)) as other:
        other.save([block(number, model=OTHER) for number in range(500, 510)])
    for name in (INDEX, f"{INDEX}-journal"):
        (store.folder / name).unlink()
    assert held(store, range(20)) == 20
    with closing(disk(store.folder)) as again:
        assert held(again, range(100, 120)) == 20
    with closing(disk(store.folder, model=OTHER)) as other:
        assert other.find(names(range(500, 510))) == 10


@pytest.mark.parametrize("content", [b"", b"\0" * 4096])
def test_an_index_that_is_empty_lists_the_blocks_again(store: DiskStore, content: bytes) -> None:
    (store.folder / INDEX).write_bytes(content)
    held(store, range(20))
    assert held(store, range(20)) == 20
    (store.folder / INDEX).write_bytes(content)
    with closing(disk(store.folder)) as again:
        assert held(again, range(20)) == 20
        works(again)


def test_an_index_with_other_tables_is_rebuilt(store: DiskStore) -> None:
    (store.folder / INDEX).unlink()
    change(store.folder, "CREATE TABLE blocks (something TEXT)")
    held(store, range(20))
    assert held(store, range(20)) == 20
    works(store)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE models SET title = CAST(x'80ff' AS TEXT)",
        "UPDATE models SET fingerprint = 'unknown'",
        "UPDATE models SET block_bytes = 1",
        "UPDATE models SET block_bytes = 1e18",
        "UPDATE models SET block_size = -3",
        "DELETE FROM models",
        "DELETE FROM clock",
        "UPDATE clock SET worth = 'a'",
        "UPDATE clock SET worth = -1e300",
        "UPDATE clock SET worth = 1e300",
        "UPDATE clock SET worth = 9e999",
        "UPDATE blocks SET slot = -1 - slot",
        "UPDATE blocks SET slot = slot + 4000000000000000000",
        "UPDATE blocks SET slot = 'x' || slot",
        "UPDATE blocks SET slot = 39 - slot WHERE slot > 50",
        "UPDATE blocks SET worth = -worth - 1",
        "UPDATE blocks SET worth = 9e999",
        "UPDATE blocks SET model = 77",
        "UPDATE blocks SET used = 1e300",
        "UPDATE blocks SET used = 'late'",
        "UPDATE blocks SET parent = 5, depth = 'deep'",
        "UPDATE blocks SET name = CAST(name AS TEXT)",
        "DROP TABLE clock",
        "DROP INDEX slots",
    ],
)
def test_new_blocks_are_stored_whatever_the_index_contains(tmp_path: Path, statement: str) -> None:
    with closing(disk(tmp_path, 40 * SLOT)) as store:
        store.save(blocks(range(20)) + blocks(range(100, 120)))
        change(tmp_path, statement)
        held(store, range(20))
        works(store)
        assert total(tmp_path) <= 40 * SLOT


def test_rows_missing_from_a_database_index_cause_no_hang(tmp_path: Path) -> None:
    """The order of eviction has a block that the table does not have."""
    with closing(disk(tmp_path, 40 * SLOT)) as store:
        store.save(blocks(range(100, 140)))
        with closing(sqlite3.connect(tmp_path / INDEX)) as index, index:
            index.execute("PRAGMA writable_schema = ON")
            index.execute("DELETE FROM sqlite_schema WHERE name = 'order_of_eviction'")
            index.execute("PRAGMA writable_schema = OFF")
        works(store)


def test_an_index_older_than_the_blocks_limits_them(tmp_path: Path) -> None:
    old = tmp_path / "old"
    folder = tmp_path / "kept"
    with closing(disk(folder, 30 * SLOT)) as store:
        store.save(blocks(range(5)))
    shutil.copy(folder / INDEX, old)
    with (
        closing(disk(folder, 30 * SLOT, OTHER)) as other,
        closing(disk(folder, 30 * SLOT)) as store,
    ):
        other.save([block(number, model=OTHER) for number in range(500, 520)])
        store.save(blocks(range(5, 20)))
        shutil.copy(old, folder / INDEX)
        works(store)
    with closing(disk(folder, 30 * SLOT)) as store:
        for first in range(1000, 2000, 100):
            store.save(blocks(range(first, first + 10), used=first))
            assert total(folder) <= 30 * SLOT
        works(store)


def test_blocks_that_are_older_than_the_index_are_misses(store: DiskStore) -> None:
    [file] = store.folder.glob("*.kv")
    shutil.copy(file, store.folder / "old")
    store.remove(names(range(5, 15)))
    store.save(blocks(range(200, 230)))
    shutil.copy(store.folder / "old", file)
    for first in (0, 100, 200):
        held(store, range(first, first + 30))
    works(store)


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_that_is_removed_or_replaced_is_opened_again(
    store: DiskStore, replace: bool
) -> None:
    [file] = store.folder.glob("*.kv")
    copy = file.read_bytes()
    file.unlink()
    if replace:
        file.write_bytes(copy)
    held(store, range(20))
    works(store)
    with closing(disk(store.folder)) as again:
        assert held(again, range(9000, 9003)) == 3, "it is in the file that others see"
        assert held(again, range(100, 120)) == (20 if replace else 0)


def test_a_removed_folder_is_created_again(store: DiskStore) -> None:
    shutil.rmtree(store.folder)
    assert held(store, range(20)) == 0
    works(store)
    with closing(disk(store.folder)) as again:
        assert held(again, range(9000, 9003)) == 3


@pytest.mark.parametrize(
    "content", ["", "[1]", "[" * 50_000, '{"fingerprint": "a"', "Infinity", "null"]
)
def test_a_damaged_description_is_written_again(store: DiskStore, content: str) -> None:
    [path] = store.folder.glob("*.json")
    original = json.loads(path.read_text())
    path.write_text(content)
    (store.folder / INDEX).write_bytes(b"nothing of it")
    held(store, range(20))
    assert held(store, range(20)) == 20
    assert json.loads(path.read_text()) == original
    path.write_text(json.dumps({**original, "block_bytes": float("inf")}))
    with closing(disk(store.folder)) as again:
        assert held(again, range(20)) == 20
    assert json.loads(path.read_text()) == original


def test_an_unknown_file_takes_no_space(store: DiskStore) -> None:
    store.close()
    for path in (*store.folder.glob("*.json"), store.folder / INDEX):
        path.unlink()
    with closing(disk(store.folder, 10 * SLOT, OTHER)) as other:
        other.save([block(number, model=OTHER) for number in range(600, 605)])
        assert total(store.folder) <= 10 * SLOT


def test_one_model_in_blocks_of_two_sizes_has_a_file_for_each(tmp_path: Path) -> None:
    small = MODEL._replace(block_size=8, block_bytes=1000)
    with closing(disk(tmp_path)) as a, closing(disk(tmp_path, model=small)) as b:
        assert a.save(blocks(range(20))) == 20
        assert b.save([block(number, model=small) for number in range(500, 520)]) == 20
        assert held(a, range(20)) == 20
        assert b.find(names(range(500, 520))) == len(list(b.load(names(range(500, 520))))) == 20


def test_a_block_offered_twice_takes_one_slot(store: DiskStore) -> None:
    assert store.save(blocks(range(200, 203)) + blocks(range(200, 203))) == 3
    assert total(store.folder) <= 43 * SLOT


def test_a_block_of_another_size_overwrites_no_block(store: DiskStore) -> None:
    large = MODEL._replace(block_bytes=9000)
    assert store.save([block(300, model=large)]) == 0
    assert held(store, range(100, 120)) == 20


def test_a_smaller_budget_applies_from_the_next_save_on(store: DiskStore) -> None:
    with closing(disk(store.folder, 10 * SLOT)) as small:
        assert small.save(blocks(range(300, 302), used=2.0)) == 2
        assert total(store.folder) <= 10 * SLOT
        assert held(small, range(300, 302)) == 2


def test_a_clock_that_was_set_back_stops_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(disk(tmp_path, 10 * SLOT)) as store:
        now = time.time()
        store.save(blocks(range(100, 110), used=now + 1e9))
        with monkeypatch.context() as patch:
            patch.setattr("headstart.tiers.index.time", SimpleNamespace(time=lambda: now + 1e9))
            store.touch(names(range(100, 110)))
        assert store.save(blocks(range(200, 210), used=now)) == 10


def test_costly_blocks_are_evicted_in_the_end(tmp_path: Path) -> None:
    """A machine that was slow once fills the store, and then is ten times as fast."""
    with closing(disk(tmp_path, 10 * SLOT)) as store:
        store.save([one._replace(seconds=5.0) for one in blocks(range(100, 110))])
        for first in range(200, 6000, 100):
            store.save(
                [one._replace(seconds=0.5) for one in blocks(range(first, first + 5), first)]
            )
        assert held(store, range(5900, 5905)) == 5
        assert held(store, range(100, 110)) == 0


def test_a_prefix_is_evicted_from_its_end_even_if_that_was_used_more(tmp_path: Path) -> None:
    """The pool has the beginning, so only the end is read from the store."""
    with closing(disk(tmp_path, 20 * SLOT)) as store:
        store.save(blocks(range(100, 110)))
        store.touch(names(range(105, 110)))
        store.save([one._replace(seconds=9.0) for one in blocks(range(110, 115))])
        for first in range(200, 900, 100):
            store.save(blocks(range(first, first + 9), used=1e12))
            left = [number for number in range(100, 115) if store.find(names(range(number, 115)))]
            assert left == list(range(100, 100 + len(left)))


def test_a_full_disk_replaces_stored_blocks(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a quota the disk is full although there seems to be free space."""
    real, size = os.pwritev, total(store.folder)

    def write(fd: int, data: Any, offset: int) -> int:
        if offset >= size:
            raise OSError(errno.EDQUOT, "the quota is exceeded")
        return real(fd, data, offset)

    monkeypatch.setattr(headstart.tiers.files.os, "pwritev", write)
    assert store.save(blocks(range(300, 310), used=2.0)) == 10
    assert held(store, range(300, 310)) == 10
    assert total(store.folder) <= size


def test_a_reader_that_never_ends_locks_out_no_call(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a transaction that could not be committed left the index locked.

    It is rolled back.
    """
    monkeypatch.setattr("headstart.tiers.index._TIMEOUT", 0.01)
    with closing(disk(store.folder)) as other:
        with closing(sqlite3.connect(store.folder / INDEX, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM blocks").fetchone()
            assert other.save(blocks(range(300, 303))) == 0
            assert set(other.faults.counts) == {"the index cannot be used"}
        works(other)
        works(store)


def test_the_lock_of_a_rebuild_is_not_waited_for_long(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.tiers.index._TIMEOUT", 0.01)
    with (store.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (store.folder / INDEX).write_bytes(b"nothing of it")
        with closing(disk(store.folder)) as again:
            assert held(again, range(20)) == 0
            fcntl.flock(lock, fcntl.LOCK_UN)
            held(again, range(20))
            assert held(again, range(20)) == 20


def test_blocks_moved_during_a_load_are_loaded(store: DiskStore) -> None:
    loading = store.load(names(range(100, 120)))
    next(loading)
    store.remove(names(range(1, 12)))
    assert len(list(loading)) == 19
    assert not store.faults.counts


def test_a_record_with_an_invalid_cost_is_skipped(tmp_path: Path) -> None:
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(5)))
        store.save([block(6)._replace(seconds=float("nan"))])
        works(store)
        assert held(store, range(5)) == 5


def test_a_save_evicts_no_block_of_its_own_prefix(tmp_path: Path) -> None:
    """Regression: block 3 is stored when 4 needs space, and was evicted for it."""
    with closing(disk(tmp_path, 3 * SLOT)) as store:
        store.save(blocks(range(3, 6), used=1.0))
        store.save(blocks(range(1, 5), used=2.0))
        assert held(store, range(1, 5)) == 3


def test_a_slot_that_differs_between_two_database_indexes(tmp_path: Path) -> None:
    """Regression: after one flipped byte, removing that block moved others, for ever."""
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(20)))
        with closing(sqlite3.connect(tmp_path / INDEX)) as index:
            [slots] = index.execute("SELECT sql FROM sqlite_schema WHERE name = 'slots'").fetchone()
            root = index.execute(
                "SELECT rootpage FROM sqlite_schema WHERE name = 'slots'"
            ).fetchone()
            with index:
                index.execute("PRAGMA writable_schema = ON")
                index.execute("DELETE FROM sqlite_schema WHERE name = 'slots'")
        with closing(sqlite3.connect(tmp_path / INDEX)) as index, index:
            index.execute("UPDATE blocks SET slot = 23 WHERE slot = 19")
            index.execute("PRAGMA writable_schema = ON")
            index.execute(
                "INSERT INTO sqlite_schema VALUES ('index', 'slots', 'blocks', ?, ?)",
                (*root, slots),
            )
        works(store)
        held(store, range(20))
        works(store)
    with closing(disk(tmp_path)) as again:
        assert held(again, range(9000, 9003)) == 3, "another process sees it too"
        assert held(again, range(20)) == 20
