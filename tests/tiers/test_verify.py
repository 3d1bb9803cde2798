"""`verify` reads every record and reports damage; `repair` removes damaged blocks."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headstart.errors import ConfigError
from headstart.tiers.contents import Counts, verify
from headstart.tiers.index import INDEX
from headstart.tiers.store import ModelRecord
from tests.tiers.stores import MODEL, block, blocks, disk, held, names

SLOT = 2560
OTHER = ModelRecord("other weights", "another model", 16, 700)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models of 20 and 10 blocks."""
    with closing(disk(tmp_path)) as store, closing(disk(tmp_path, model=OTHER)) as other:
        store.save(blocks(range(20)))
        other.save([block(number, model=OTHER) for number in range(500, 510)])
    return tmp_path


def file_of(folder: Path) -> Path:
    return max(folder.glob("*.kv"), key=lambda path: path.stat().st_size)


def test_an_intact_folder(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = verify(folder, progress=lambda done, count: calls.append((done, count)))
    assert {one.model: one.counts for one in report.models} == {
        MODEL: Counts(intact=20),
        OTHER: Counts(intact=10),
    }
    assert report.total == Counts(intact=30) and report.is_whole and report.index_is_intact
    assert calls == [(at, 30) for at in range(1, 31)]
    with pytest.raises(ConfigError, match="there is no cache folder"):
        verify(folder / "none")
    (folder / "empty").mkdir()
    assert verify(folder / "empty") == (True, [])


def test_damaged_and_lost_blocks_are_counted_and_forgotten(folder: Path) -> None:
    data = bytearray(file_of(folder).read_bytes())
    for slot in (3, 7):
        data[slot * SLOT + 500] ^= 1
    del data[18 * SLOT :]
    file_of(folder).write_bytes(data)
    for repair in (False, True):
        report = verify(folder, repair=repair)
        assert report.total == Counts(intact=26, damaged=2, lost=2) and not report.is_whole
    after = verify(folder)
    assert after.is_whole and after.total.intact == 26
    with closing(disk(folder)) as store:
        assert held(store, range(20)) == 3 and held(store, range(8, 18)) == 10


def test_blocks_that_the_index_does_not_list(folder: Path) -> None:
    shutil.copy(folder / INDEX, folder / "old")
    with closing(disk(folder)) as store:
        store.save(blocks(range(20, 25)))
    shutil.copy(folder / "old", folder / INDEX)
    assert verify(folder).total == Counts(intact=30, unlisted=5)
    with closing(sqlite3.connect(folder / INDEX)) as index, index:
        index.execute("DELETE FROM blocks WHERE depth = 4")
    assert verify(folder, repair=True).total == Counts(intact=28, unlisted=7, gaps=2)
    assert verify(folder).total == Counts(intact=35)


@pytest.mark.parametrize("content", [b"", b"nothing of it" * 1000, None])
def test_a_damaged_index(folder: Path, content: bytes | None) -> None:
    (folder / INDEX).unlink()
    if content is not None:
        (folder / INDEX).write_bytes(content)
    for repair in (False, True):
        report = verify(folder, repair=repair)
        assert not report.index_is_intact and report.total == Counts(unlisted=30)
    assert verify(folder).total == Counts(intact=30)


def test_blocks_moved_or_evicted_during_a_read_are_not_damaged(folder: Path) -> None:
    with closing(disk(folder)) as store:

        def change(done: int, count: int) -> None:
            if done == 5:
                store.remove(names(range(1, 8)))
            if done == 8:
                store.save(blocks(range(100, 104)))

        report = verify(folder, repair=True, progress=change)
        assert report.is_whole
        assert held(store, range(8, 20)) == 12
