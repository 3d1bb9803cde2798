"""Damaged or hostile files of exported blocks harm no stored block."""

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headstart.errors import CacheError
from headstart.tiers.contents import import_blocks
from headstart.tiers.disk import DiskStore
from headstart.tiers.index import INDEX
from headstart.tiers.store import VERSION, ModelRecord, StoredBlock, make_header
from tests.tiers.stores import MODEL, block, blocks, disk, held, names


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """Return a store of twenty blocks, five of which were hit."""
    with closing(disk(tmp_path / "kept")) as store:
        store.save(blocks(range(20)))
        store.touch(names(range(5)))
        yield store


def write(path: Path, model: ModelRecord, stored_blocks: list[StoredBlock]) -> Path:
    """Write a file as `export_blocks` does."""
    head = b"headstart blocks %d\n%s\n" % (VERSION, json.dumps(model._asdict()).encode())
    records = b"".join(make_header(one) + bytes(one.payload) for one in stored_blocks)
    path.write_bytes(head + records + b"end" + len(stored_blocks).to_bytes(8, "little"))
    return path


def hits(store: DiskStore) -> list[int]:
    with closing(sqlite3.connect(store.folder / INDEX)) as index:
        return [n for (n,) in index.execute("SELECT hits FROM blocks WHERE hits > 0")]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
def test_a_block_with_an_invalid_cost_is_damaged(
    store: DiskStore, tmp_path: Path, seconds: float
) -> None:
    """Regression: NaN made the index be rebuilt without its hits and times.

    With infinity, the block would never have been evicted.
    """
    odd = block(101)._replace(seconds=seconds)
    path = write(tmp_path / "moved", MODEL, [block(100), odd, block(102)])
    with pytest.raises(CacheError, match="damaged or cut off after 16 tokens"):
        import_blocks(store, path, 1.0)
    assert held(store, range(100, 103)) == 1 and held(store, range(20)) == 20
    assert hits(store) == [1] * 5 and not store.faults.counts


@pytest.mark.parametrize(
    "other", [{"fingerprint": "another"}, {"block_size": 32}, {"block_bytes": 1 << 39}]
)
def test_blocks_of_another_size_are_another_model_s(
    store: DiskStore, tmp_path: Path, other: dict[str, int | str]
) -> None:
    """Regression: the file sets the size of its blocks, so 512 GB were allocated for one block."""
    path = write(tmp_path / "moved", MODEL._replace(**other), [block(100)])
    with pytest.raises(CacheError, match="of another model; allowed: blocks of a model"):
        import_blocks(store, path, 1.0)
    assert import_blocks(store, write(path, MODEL._replace(title="moved"), [block(100)]), 1.0) == 1
