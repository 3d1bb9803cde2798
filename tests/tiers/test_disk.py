"""The disk store returns blocks exactly as saved, or not at all."""

import gc
import os
import sqlite3
import stat
import tracemalloc
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from headstart.errors import ConfigError
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import INDEX, DiskIndex, described_models, slot_path
from headstart.tiers.store import ModelRecord
from tests.tiers.stores import MODEL, block, blocks, disk, held, names

SLOT = 2560  # bytes that a block of `MODEL` takes in its file


def test_blocks_are_loaded_in_another_process_of_the_same_model(tmp_path: Path) -> None:
    with closing(disk(tmp_path)) as store:
        assert store.find(names(range(9))) == 0
        assert store.save(blocks(range(9))) == 9
        assert store.save(blocks(range(5, 12))) == 3, "those known are not saved again"
    with closing(disk(tmp_path)) as again:
        assert again.find(names(range(20))) == 12
        assert held(again, range(20)) == 12
        assert not again.faults.counts


def test_a_lookup_ends_before_the_first_block_that_is_missing(tmp_path: Path) -> None:
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(4)) + blocks(range(6, 900)))
        assert store.find(names(range(900))) == held(store, range(900)) == 4
        assert store.find(names(range(6, 900))) == held(store, range(6, 900)) == 894


def test_a_later_index_version_is_not_touched_and_an_earlier_one_is_rebuilt(
    tmp_path: Path,
) -> None:
    """Regression: two versions on one folder each took the other's index for damaged."""

    def mark(version: int) -> None:
        with closing(sqlite3.connect(tmp_path / "index.sqlite")) as index:
            index.execute(f"PRAGMA user_version = {version}")

    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(9)))
    mark(4 * 0x010101)
    before = (tmp_path / "index.sqlite").read_bytes()
    with closing(disk(tmp_path)) as store:
        assert store.find(names(range(9))) == 0 and store.save(blocks(range(20, 29))) == 0
        assert "the folder cannot be used" in store.faults.counts
    assert (tmp_path / "index.sqlite").read_bytes() == before
    for version in (2, 3, 5, 0x010101, 0x040404 ^ 0x800000):
        mark(version)
        with closing(disk(tmp_path)) as store:
            assert held(store, range(9)) == 9
    assert "the folder cannot be used" not in store.faults.counts


def test_least_recently_used_prefixes_are_evicted_first_from_their_end(tmp_path: Path) -> None:
    with closing(disk(tmp_path, 20 * SLOT)) as store:
        store.save(blocks(range(100, 110), used=1.0))
        store.save(blocks(range(200, 210), used=2.0))
        assert store.save(blocks(range(300, 304), used=3.0)) == 4
        assert held(store, range(100, 110)) == 6
        assert held(store, range(200, 210)) == 10
        assert (tmp_path / next(tmp_path.glob("*.kv")).name).stat().st_size <= 20 * SLOT


def test_the_beginning_of_a_prompt_that_does_not_fit_is_stored(tmp_path: Path) -> None:
    with closing(disk(tmp_path, 10 * SLOT)) as store:
        for first in range(100, 130, 6):
            store.save(blocks(range(first, first + 6), used=5.0))
        assert held(store, range(100, 130)) == 10


def test_a_block_never_replaces_its_parent(tmp_path: Path) -> None:
    """A prompt arrives in several saves with increasing times; other blocks are worth more."""
    with closing(disk(tmp_path, 20 * SLOT)) as store:
        for number in range(100, 2100, 100):
            store.save([block(number)._replace(seconds=float(number))])
        for number in range(9000, 9006):
            assert store.save([block(number, used=float(number))]) == 1
        assert held(store, range(9000, 9006)) == 6


def test_an_index_with_impossible_slots_is_rebuilt(tmp_path: Path) -> None:
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(9)))
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as index, index:
        index.execute("UPDATE blocks SET slot = slot - 200")
    with closing(disk(tmp_path)) as store:
        assert store.save(blocks(range(9, 12))) == 3
        assert held(store, range(12)) == 12


def test_a_block_that_was_hit_stays_longer(tmp_path: Path) -> None:
    with closing(disk(tmp_path, 8 * SLOT)) as store:
        store.save(blocks(range(100, 104), used=1.0))
        store.save(blocks(range(200, 204), used=2.0))
        store.touch(names(range(100, 104)))
        store.save(blocks(range(300, 304), used=3.0))
        assert held(store, range(100, 104)) == 4
        assert held(store, range(200, 204)) == 0
        assert held(store, range(300, 304)) == 4


def test_an_eviction_does_not_visit_blocks_that_must_stay(tmp_path: Path) -> None:
    """Regression: with 40,000 blocks, each eviction visited all such blocks, in 17 ms.

    The ends of prompts are hit, and the pool has their beginnings, so these are worth less.
    """
    ticks = 0

    def tick() -> int:
        nonlocal ticks
        ticks += 1
        return 0

    with closing(disk(tmp_path, 2000 * SLOT)) as store:
        for first in range(0, 2000, 100):
            store.save(blocks(range(first, first + 100)))
        for first in range(50, 2000, 100):
            store.touch(names(range(first, first + 50)))
        assert store.save(blocks(range(9000, 9010), used=1e12)) == 10
        store._open("changes")._connection.set_progress_handler(tick, 1000)
        assert store.save(blocks(range(9010, 9074), used=1e12)) == 64
        assert ticks < 200, "thousands of steps of SQLite"
        left = [store.find(names(range(first, first + 100))) for first in range(0, 2000, 100)]
        assert sum(left) == 2000 - 74, "each prompt was evicted from its end"


def test_a_store_opens_no_files_of_other_models(tmp_path: Path) -> None:
    """Regression: it opened a file for each model of the folder, until descriptors ran out."""
    for number in range(40):
        other = ModelRecord(f"weights {number}", "another model", 16, 700)
        with closing(disk(tmp_path, model=other)) as store:
            assert store.save([block(1000 * number + 5000, model=other)]) == 1
    with closing(disk(tmp_path)) as store:
        assert store.save(blocks(range(9))) == 9
        assert len(store._files) == 1


def test_models_share_the_folder_but_no_blocks(tmp_path: Path) -> None:
    other = ModelRecord("other weights", "another model", 16, 700)
    with (
        closing(disk(tmp_path, 10 * SLOT)) as store,
        closing(disk(tmp_path, 10 * SLOT, other)) as b,
    ):
        store.save(blocks(range(100, 110), used=1.0))
        assert b.save([block(number, 2.0, other) for number in range(200, 206)]) == 6
        assert b.find(names(range(200, 206))) == 6
        assert store.find(names(range(100, 110))) < 10, "the budget is one"
        assert sum(file.stat().st_size for file in tmp_path.glob("*.kv")) <= 10 * SLOT
        assert held(store, range(100, 110)) == store.find(names(range(100, 110)))
        assert not store.faults.counts and not b.faults.counts


@pytest.mark.parametrize("at", [0, 5, 60, 90, 128, 1500, 2100])
def test_a_damaged_block_is_a_miss_and_is_forgotten(tmp_path: Path, at: int) -> None:
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(6)))
        [file] = tmp_path.glob("*.kv")
        data = bytearray(file.read_bytes())
        data[3 * SLOT + at] ^= 16
        file.write_bytes(data)
        assert held(store, range(6)) == 3
        assert store.faults.counts == {"a block is damaged": 1}
        assert held(store, range(4, 6)) == 2, "the others stay, wherever they lie now"
        assert store.save(blocks(range(3, 4))) == 1
        assert held(store, range(6)) == 6


def test_a_damaged_index_is_rebuilt_from_the_blocks(tmp_path: Path) -> None:
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(40)))
    index = tmp_path / "index.sqlite"
    data = bytearray(index.read_bytes())
    data[100:-100] = bytes(len(data) - 200)
    index.write_bytes(data)
    with closing(disk(tmp_path)) as again:
        assert held(again, range(40)) in (0, 40)  # the first call may only find the damage
        assert held(again, range(40)) == 40
        assert again.save(blocks(range(40, 50))) == 10
        assert held(again, range(50)) == 50


def test_only_the_owner_can_read_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "kept"
    with closing(disk(folder)) as store:
        store.save(blocks(range(2)))
        store.find(names(range(2)))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    data = [path for path in folder.iterdir() if path.suffix in (".kv", ".sqlite")]
    assert len(data) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in data} == {0o600}


def test_a_file_in_place_of_the_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        disk(tmp_path / "file")


def test_a_full_disk_loses_no_stored_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a slot was overwritten by a new block that the full index could not list."""
    free = [1 << 28]
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=free[-1], f_frsize=1))
    with closing(disk(tmp_path)) as store:
        free.append(1 << 40)
        assert store.save(blocks(range(9))) == 9
        for room, saved in ((80_000, 0), (1 << 27, 5)):
            free.append(room)
            assert store.save(blocks(range(100, 105), used=2.0)) == saved
            assert held(store, range(100, 105)) == saved
            assert held(store, range(9)) == 9 - saved
        assert store.faults.counts == {"the disk is full": 1}


def test_a_model_is_forgotten_with_its_last_block(tmp_path: Path) -> None:
    """Regression: it stayed in the index, and every save read the size of its empty file."""
    other = ModelRecord("other weights", "another", 16, MODEL.block_bytes)
    slots = 3 * SLOT

    def models() -> list[ModelRecord]:
        with closing(DiskIndex(tmp_path / INDEX)) as index:
            return [model.record for model in index.models()]

    with closing(disk(tmp_path, slots)) as store, closing(disk(tmp_path, slots)) as twin:
        assert models() == [], "it was opened, and has nothing"
        assert store.save(blocks(range(3))) == 3 == held(twin, range(3))
        with closing(disk(tmp_path, slots, other)) as evicting:
            new = [block(number, used=9.0, model=other) for number in range(100, 103)]
            assert evicting.save(new) == 3
            assert models() == [other], "all blocks of the first model were evicted"
            assert not slot_path(tmp_path, MODEL).exists()
            assert held(store, range(3)) == held(twin, range(3)) == 0
            assert evicting.remove([one.name for one in new]) == 3
            assert models() == [] and not list(tmp_path.glob("*.kv"))
        for one, again in ((store, twin), (twin, store)):
            assert one.save(blocks(range(2))) == 2 == held(again, range(2))
            assert models() == [MODEL]
            assert again.clear() and models() == [] and not list(tmp_path.glob("*.kv"))
        assert not store.faults.counts and not twin.faults.counts
    assert MODEL in described_models(tmp_path), "its description remains for an import"


def test_a_rebuilt_index_has_no_models_without_blocks(tmp_path: Path) -> None:
    with closing(disk(tmp_path)) as store:
        slot_path(tmp_path, MODEL).touch()
        (tmp_path / INDEX).unlink()
        assert store.find(names(range(3))) == 0
    with closing(DiskIndex(tmp_path / INDEX)) as index:
        assert index.models() == []
        first = index.add_model(MODEL)
        index.forget_model(first)
        assert index.add_model(MODEL) >= first > 1_700_000_000, "a number from the time"


def test_endless_saves_and_evictions_do_not_grow_memory(tmp_path: Path) -> None:
    """Neither the process nor the index grows with the blocks that are saved and evicted."""

    def measure() -> tuple[int, int, int]:
        gc.collect()
        index = sum(path.stat().st_size for path in tmp_path.glob("index.sqlite*"))
        return tracemalloc.get_traced_memory()[0], index, len(os.listdir("/proc/self/fd"))

    def come_and_go(prompts: range, store: DiskStore) -> None:
        for prompt in prompts:
            numbers = range(100 * prompt, 100 * prompt + 40)
            assert store.save(blocks(numbers, used=1e12 + prompt)) == 40
            assert store.find(names(numbers)) == 40
            assert len(list(store.load(names(numbers)))) == 40
            store.touch(names(numbers[:20]))

    with closing(disk(tmp_path, 60 * SLOT)) as store:
        come_and_go(range(1, 20), store)
        tracemalloc.start()
        try:
            come_and_go(range(20, 30), store)
            first = measure()
            come_and_go(range(30, 80), store)
            last = measure()
        finally:
            tracemalloc.stop()
        assert last[0] < first[0] + 60_000, "a name alone, of each of the 2,000, takes 130,000"
        assert last[1:] == first[1:]
        assert store.faults.counts == {}
