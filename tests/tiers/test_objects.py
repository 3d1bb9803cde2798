"""Objects of any size over a store of blocks are loaded whole, or not at all."""

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.tiers.disk import DiskStore
from headstart.tiers.store import Faults
from headstart.tiers.transfers import OBJECT_BLOCK, OBJECTS, ObjectStore, Saver, _name
from headstart.tiers.worker import GuardedStore, StoreChain
from tests.tiers.stores import payload
from tests.tiers.test_threads import call

SIZES = [0, 1, 1000, OBJECT_BLOCK - 9, OBJECT_BLOCK - 8, OBJECT_BLOCK, 300_000]


def save_all(folder: Path) -> None:
    with closing(DiskStore(folder, OBJECTS, 1 << 30)) as store:
        saver = Saver(StoreChain([GuardedStore(store)]), 1 << 30, Faults("a test"))
        objects = ObjectStore([GuardedStore(store)], saver)
        for size in SIZES:
            assert call(partial(objects.load, b"%d" % size)) is None
            objects.save(b"%d" % size, payload(size, size), 0.5)
        saver.close(60)


def loaded(folder: Path) -> list[int]:
    """Return the sizes of stored objects, after a check of their bytes."""
    sizes = []
    with closing(DiskStore(folder, OBJECTS, 1 << 30)) as store:
        saver = Saver(StoreChain([GuardedStore(store)]), 1 << 30, Faults("a test"))
        for size in SIZES:
            data = call(partial(ObjectStore([GuardedStore(store)], saver).load, b"%d" % size))
            if data is not None:
                assert bytes(data) == payload(size, size)
                sizes.append(size)
        saver.close(60)
    return sizes


def test_objects_are_loaded_as_saved(tmp_path: Path) -> None:
    save_all(tmp_path)
    assert loaded(tmp_path) == SIZES


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_an_object_that_lost_a_part_is_a_miss(tmp_path: Path, lost: int) -> None:
    save_all(tmp_path)
    with closing(DiskStore(tmp_path, OBJECTS, 1 << 30)) as store:
        assert store.remove([_name(b"300000", lost)]) == 1
    assert loaded(tmp_path) == SIZES[:-1]


def test_an_object_from_a_farther_tier_is_stored_in_the_nearer_one(tmp_path: Path) -> None:
    """Regression: only blocks were shared, so every process queried the server for an image."""
    near, far = tmp_path / "near", tmp_path / "far"
    save_all(far)
    assert loaded(near) == []
    with (
        closing(DiskStore(near, OBJECTS, 1 << 30)) as disk,
        closing(DiskStore(far, OBJECTS, 1 << 30)) as server,
    ):
        saver = Saver(StoreChain([GuardedStore(disk)]), 1 << 30, Faults("a test"))
        both = ObjectStore([GuardedStore(disk), GuardedStore(server)], saver)
        for size in SIZES:
            content = call(partial(both.load, b"%d" % size))
            assert content is not None and bytes(content) == payload(size, size)
        assert call(partial(both.load, b"unknown")) is None
        saver.close(60)
    assert loaded(near) == SIZES
    with closing(DiskStore(near, OBJECTS, 1 << 30)) as disk:
        assert 0 < disk.block_seconds < 1, "their costs were stored too"


@given(st.lists(st.tuples(st.binary(max_size=9), st.integers(0, 99)), min_size=2, unique=True))
def test_no_two_parts_share_a_name(parts: list[tuple[bytes, int]]) -> None:
    assert len({_name(key, at) for key, at in parts}) == len(parts)
