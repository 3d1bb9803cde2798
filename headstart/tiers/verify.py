"""Reads every record of a cache folder, and reports what is whole and what is not.

Other processes may use the folder meanwhile: a block that does not read as it should is read again
while nobody may write, since it may have been moved.
"""

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from headstart.cache import BlockHash
from headstart.errors import ConfigError
from headstart.tiers.disk import DiskStore
from headstart.tiers.files import SlotFile
from headstart.tiers.folder import INDEX, described_models, make_folder, rebuild_index, slot_path
from headstart.tiers.index import DiskIndex, KeptModel, is_passing
from headstart.tiers.store import ModelRecord

__all__ = ["Counts", "ModelReport", "VerifyReport", "verify"]

_AT_ONCE = 64  # blocks that are read again while nobody may write


class Counts(NamedTuple):
    """Blocks by their state.

    damaged: listed, and the record is not that block, whole. lost: listed beyond the file's end.
    overwritten: listed, and another block is there, since a process ended while it saved.
    unlisted: whole, and not listed; the next save overwrites it. gaps: slots that nobody lists.
    """

    whole: int = 0
    damaged: int = 0
    lost: int = 0
    unlisted: int = 0
    gaps: int = 0
    overwritten: int = 0


class ModelReport(NamedTuple):
    """The blocks of one model."""

    model: ModelRecord
    counts: Counts


class VerifyReport(NamedTuple):
    """The state of a folder. Without a sound index no block is listed."""

    index_is_sound: bool
    models: list[ModelReport]

    @property
    def total(self) -> Counts:
        """The blocks of all models."""
        return Counts(
            *map(sum, zip(Counts(), *(model.counts for model in self.models), strict=True))
        )

    @property
    def is_whole(self) -> bool:
        """True if no block is damaged or lost."""
        total = self.total
        return self.index_is_sound and not (total.damaged or total.lost or total.gaps)


def verify(
    folder: Path, *, repair: bool = False, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Read all records of a folder; safe while others use it.

    repair: forget the blocks that are damaged or lost, and make a damaged index anew; the report
    says what was found before. progress: called with the records read, and all there are. Raises
    ConfigError if the folder cannot be read, or its index is in use for long.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no cache folder {folder}")
    if not make_folder(folder) and repair:
        raise ConfigError(f"cache folder {folder} cannot be written, and so not be repaired")
    try:
        return _verify(folder, repair, progress or (lambda done, count: None))
    except (OSError, sqlite3.OperationalError) as error:
        raise ConfigError(f"cache folder {folder} cannot be read now: {error}") from error


def _verify(folder: Path, repair: bool, progress: Callable[[int, int], None]) -> VerifyReport:
    with _opened(folder) as index:
        readers = list(_readers(folder, index))
        done, count = 0, sum(reader.num_steps for reader in readers)
        for reader in readers:
            for _ in reader.steps():
                done += 1
                progress(done, count)
        is_sound = index is not None or not readers
    if repair:
        for reader in readers:
            reader.forget_bad(folder)
        if not is_sound or any(reader.gaps for reader in readers):
            path = folder / INDEX
            rebuild_index(folder, [os.stat(path).st_ino] if path.exists() else [])
    return VerifyReport(is_sound, [reader.report() for reader in readers])


@contextmanager
def _opened(folder: Path) -> Iterator[DiskIndex | None]:
    """The folder's index; None if there is none, or it is damaged. Raises if it is in use."""
    index: DiskIndex | None = None
    try:
        if (folder / INDEX).exists():
            index = DiskIndex(folder / INDEX, read_only=not os.access(folder, os.W_OK))
            if not index.is_sound():
                raise sqlite3.DatabaseError("the index is damaged")
    except Exception as error:  # of any kind: what a damaged index says may be anything
        if index is not None:
            index.close()
        if is_passing(error):
            raise
        index = None
    try:
        yield index
    finally:
        if index is not None:
            index.close()


def _readers(folder: Path, index: DiskIndex | None) -> Iterator["_Reader"]:
    """A reader for each model that the index lists, or a description tells of."""
    listed = {slot_path(folder, kept.record): kept for kept in index.models()} if index else {}
    described = {slot_path(folder, record): record for record in described_models(folder)}
    described |= {path: kept.record for path, kept in listed.items()}
    for path, record in described.items():
        if os.path.lexists(path) or path in listed:
            yield _Reader(path, record, index, listed.get(path))


class _Reader:
    """Reads the records of one model, those that are listed first."""

    def __init__(
        self, path: Path, record: ModelRecord, index: DiskIndex | None, kept: KeptModel | None
    ) -> None:
        self._record = record
        self._index = index if kept is not None else None
        self._model = kept.id if kept is not None else 0
        self._file: SlotFile | None = None
        with suppress(FileNotFoundError):
            self._file = SlotFile(path, record.block_bytes, read_only=True)
        blocks = self._index.list_blocks(self._model) if self._index is not None else []
        self._listed = [(block.name, block.slot) for block in blocks]
        slots = {block.slot for block in blocks}
        num_slots = self._file.num_slots if self._file is not None else 0
        self._others = [slot for slot in range(num_slots) if slot not in slots]
        self._whole = self._damaged = self._lost = self._overwritten = 0
        self._unlisted: list[int] = []
        self._bad: list[BlockHash] = []
        self.gaps = 0

    @property
    def num_steps(self) -> int:
        """Number of records to read."""
        return len(self._listed) + len(self._others)

    def report(self) -> ModelReport:
        """The counts so far."""
        found = (self._whole, self._damaged, self._lost, len(self._unlisted), self.gaps)
        return ModelReport(self._record, Counts(*found, self._overwritten))

    def steps(self) -> Iterator[None]:
        """Read one record after the other."""
        doubtful: list[BlockHash] = []
        for (name, _), payload in zip(self._listed, self._read(self._listed), strict=True):
            if payload is not None:
                self._whole += 1
            else:
                doubtful.append(name)
            yield
        for slot in self._others:
            if self._file is not None and self._holds_a_block(self._file, slot):
                self._unlisted.append(slot)
            yield
        for at in range(0, len(doubtful), _AT_ONCE):
            self._look_again(doubtful[at : at + _AT_ONCE])
        self._count_gaps()

    def _read(self, blocks: Sequence[tuple[BlockHash, int]]) -> Iterator[memoryview | None]:
        if self._file is None:
            yield from [None] * len(blocks)
            return
        for payload in self._file.read(blocks):
            is_whole = payload is not None and payload.nbytes == self._record.block_bytes
            yield payload if is_whole else None

    def _holds_a_block(self, file: SlotFile, slot: int) -> bool:
        header = file.header(slot)
        return header is not None and next(self._read([(header.name, slot)])) is not None

    def _look_again(self, names: Sequence[BlockHash]) -> None:
        """Judge blocks that did not read well, while nobody may write."""
        assert self._index is not None
        with self._index.changing():
            for name in names:
                block = self._index.block(name)
                if block is None:
                    continue  # it went meanwhile
                if next(self._read([(name, block.slot)])) is not None:
                    self._whole += 1
                    continue
                self._bad.append(name)
                if self._file is None or block.slot >= self._file.num_slots:
                    self._lost += 1
                elif self._file.holds_another(block.slot, name):
                    self._overwritten += 1
                else:
                    self._damaged += 1

    def _count_gaps(self) -> None:
        if self._index is None:
            return
        with self._index.changing():
            slots = {block.slot for block in self._index.list_blocks(self._model)}
            num_slots = self._file.num_slots if self._file is not None else 0
            self._unlisted = [at for at in self._unlisted if at not in slots and at < num_slots]
            self.gaps = self._index.count(self._model) - len(slots)

    def forget_bad(self, folder: Path) -> None:
        """Have the store forget what is damaged or lost."""
        if self._bad:
            with closing(DiskStore(folder, self._record, sys.maxsize)) as store:
                store.forget_damaged(self._bad)
