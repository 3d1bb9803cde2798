"""A process that ends at any write to a disk store leaves no damaged block in the index."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from headstart.tiers.contents import verify
from headstart.tiers.disk import DiskStore
from headstart.tiers.store import ModelRecord
from tests.tiers.stores import block, blocks, disk, held, names

SLOT = 2560
BUDGET = 20 * SLOT
OTHER = ModelRecord("other weights", "another model", 16, 700)


def evict(store: DiskStore) -> None:
    """Overwrite blocks of the same model."""
    store.save(blocks(range(300, 310), used=9.0))


def evict_another_model(store: DiskStore) -> None:
    """Take the space of another model, whose last blocks move."""
    with closing(disk(store.folder, BUDGET, OTHER)) as other:
        other.save([block(number, 9.0, OTHER) for number in range(500, 512)])


def remove(store: DiskStore) -> None:
    store.remove(names(range(103, 108)))


def clear(store: DiskStore) -> None:
    store.clear()


def shrink(store: DiskStore) -> None:
    """Save with a smaller budget than before."""
    with closing(disk(store.folder, 8 * SLOT)) as small:
        small.save(blocks(range(300, 302), used=9.0))


def end_at(number: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that ends at a write; return False if it has fewer writes.

    Each write counts as three: before it, in its middle and after it.
    """
    left = number

    def dying(real: Callable[..., Any], is_write: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                os._exit(9)
            if left == 1 and is_write:
                fd, parts, offset = arguments
                data = b"".join(parts) if isinstance(parts, tuple) else bytes(parts)
                os.lseek(fd, offset, os.SEEK_SET)
                os.write(fd, data[: len(data) // 2])
                os._exit(9)
            result = real(*arguments, **options)
            if left in (1, 2):
                os._exit(9)
            left -= 3
            return result

        return call

    child = os.fork()
    if child == 0:
        try:
            with (
                patch("os.pwritev", dying(os.pwritev, True)),
                patch("os.pwrite", dying(os.pwrite, True)),
                patch("os.truncate", dying(os.truncate, False)),
                patch("os.unlink", dying(os.unlink, False)),
            ):
                work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("change", [evict, evict_another_model, remove, clear, shrink])
def test_no_block_is_damaged_wherever_a_process_ends(
    tmp_path: Path, change: Callable[[DiskStore], None]
) -> None:
    """Regression: `verify` reported blocks that were overwritten before the index forgot them."""
    number, ended = 0, True
    while ended:
        folder = tmp_path / str(number)
        with closing(disk(folder, BUDGET)) as store:
            store.save(blocks(range(100, 120)))

        def work(folder: Path = folder) -> None:
            with closing(disk(folder, BUDGET)) as store:
                change(store)

        ended = end_at(number, work)
        report = verify(folder)
        assert report.is_whole, report
        assert not (report.total.damaged or report.total.lost or report.total.gaps)
        with closing(disk(folder, BUDGET)) as store:
            if change is clear:
                assert held(store, range(100, 120)) == 0, "they are not loaded"
            if change is remove:
                assert held(store, range(100, 103)) == 3
                assert held(store, range(108, 120)) == 12, "these were to stay"
            for first in (100, 300):
                held(store, range(first, first + 20))
            if change is not evict_another_model:  # the index may lack its first file
                assert not store.faults.counts
            assert store.save(blocks(range(400, 410), used=1e9)) == 10
            assert held(store, range(400, 410)) == 10
        assert sum(file.stat().st_size for file in folder.glob("*.kv")) <= BUDGET
        number += 1
    assert number >= 3
