"""The check of a cache folder: every record is read, and whole and damaged blocks are reported.

Other processes may use the folder meanwhile: a block that does not read well is read again while no
process may write, since it may have been moved.
"""

import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

from headstart.cache import BlockHash
from headstart.errors import ConfigError
from headstart.tiers.disk import DiskStore
from headstart.tiers.files import SlotFile
from headstart.tiers.folder import INDEX, described_models, make_folder, rebuild_index, slot_path
from headstart.tiers.index import DiskIndex, is_passing
from headstart.tiers.store import ModelRecord

_AT_ONCE = 64  # blocks that are read again while no process may write


class Counts(NamedTuple):
    """Blocks by their state.

    damaged: listed, and the record is not that block. lost: listed beyond the file's end.
    overwritten: listed, and another block is there, since a process ended while it saved.
    unlisted: whole, and not listed; the next save overwrites it. gaps: slots without a block.
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
        columns = zip(Counts(), *(model.counts for model in self.models), strict=True)
        return Counts(*map(sum, columns))

    @property
    def is_whole(self) -> bool:
        """True if no block is damaged or lost."""
        total = self.total
        return self.index_is_sound and not (total.damaged or total.lost or total.gaps)


def verify(
    folder: Path, *, repair: bool = False, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Read all records of a folder; safe while others use it.

    repair: forget the blocks that are damaged or lost, and rebuild a damaged index; the report has
    the state before. progress: called with the records read, and the number of all. Raises
    ConfigError if the folder cannot be read, or its index is in use for long.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no cache folder {folder}")
    if not make_folder(folder) and repair:
        raise ConfigError(f"cache folder {folder} cannot be written, and so not be repaired")
    try:
        with ExitStack() as stack:
            index = _open_index(folder, stack)
            checks = list(_list_checks(folder, index))
            count = sum(len(check.steps) for check in checks)
            steps = (step for check in checks for step in check.run())
            for done, _ in enumerate(steps, 1):
                if progress is not None:
                    progress(done, count)
            is_sound = index is not None or not checks
        if repair:
            for check in checks:
                if check.bad:
                    with closing(DiskStore(folder, check.record, sys.maxsize)) as store:
                        store.forget_damaged(check.bad)
            if not is_sound or any(check.counts["gaps"] for check in checks):
                path = folder / INDEX
                rebuild_index(folder, [os.stat(path).st_ino] if path.exists() else [])
    except (OSError, sqlite3.OperationalError) as error:
        raise ConfigError(f"cache folder {folder} cannot be read now: {error}") from error
    models = [ModelReport(check.record, Counts(**check.counts)) for check in checks]
    return VerifyReport(is_sound, models)


def _open_index(folder: Path, stack: ExitStack) -> DiskIndex | None:
    """Open the folder's index; None if there is none, or it is damaged. Raises if it is in use."""
    try:
        if (folder / INDEX).exists():
            index = DiskIndex(folder / INDEX, read_only=not os.access(folder, os.W_OK))
            stack.callback(index.close)
            return index if index.is_sound() else None
    except Exception as error:  # any kind, from a damaged index
        if is_passing(error):
            raise
    return None


def _list_checks(folder: Path, index: DiskIndex | None) -> Iterator["_Check"]:
    """Yield a check for each model that the index lists, or a description names."""
    listed = {slot_path(folder, kept.record): kept for kept in index.models()} if index else {}
    described = {slot_path(folder, record): record for record in described_models(folder)}
    described |= {path: kept.record for path, kept in listed.items()}
    for path, record in described.items():
        if index is not None and path in listed:
            yield _Check(path, record, index, listed[path].id)
        elif os.path.lexists(path):
            yield _Check(path, record)


class _Check:
    """The check of one model's records.

    steps: the blocks that the index lists, with their slots, then the other slots, without a name.
    bad: blocks to forget.
    """

    def __init__(
        self, path: Path, record: ModelRecord, index: DiskIndex | None = None, model: int = 0
    ) -> None:
        self.record = record
        self.counts = Counter[str]()
        self.bad: list[BlockHash] = []
        self._index, self._model = index, model
        self._file: SlotFile | None = None
        with suppress(FileNotFoundError):
            self._file = SlotFile(path, record.block_bytes, read_only=True)
        blocks = index.list_blocks(model) if index is not None else []
        others = sorted(set(range(self._num_slots)) - {block.slot for block in blocks})
        self._listed = [(block.name, block.slot) for block in blocks]
        self.steps = [*self._listed, *((None, slot) for slot in others)]

    @property
    def _num_slots(self) -> int:
        return self._file.num_slots if self._file is not None else 0

    def run(self) -> Iterator[None]:
        """Read all records; yield after each."""
        doubtful: list[BlockHash] = []
        for (name, _), is_whole in zip(self._listed, self._read(self._listed), strict=True):
            if is_whole:
                self.counts["whole"] += 1
            else:
                doubtful.append(name)
            yield
        unlisted = []
        for _, slot in self.steps[len(self._listed) :]:
            header = self._file.header(slot) if self._file is not None else None
            if header is not None and next(self._read([(header.name, slot)])):
                unlisted.append(slot)
            yield
        for start in range(0, len(doubtful), _AT_ONCE):
            self._look_again(doubtful[start : start + _AT_ONCE])
        if self._index is not None:
            with self._index.changing():
                slots = {block.slot for block in self._index.list_blocks(self._model)}
                unlisted = [s for s in unlisted if s not in slots and s < self._num_slots]
                self.counts["gaps"] = self._index.count(self._model) - len(slots)
        self.counts["unlisted"] = len(unlisted)

    def _read(self, blocks: Sequence[tuple[BlockHash, int]]) -> Iterator[bool]:
        """Yield True for each block whose record is whole."""
        if self._file is None:
            yield from [False] * len(blocks)
            return
        for payload in self._file.read(blocks):
            yield payload is not None and payload.nbytes == self.record.block_bytes

    def _look_again(self, names: Sequence[BlockHash]) -> None:
        """Judge blocks that did not read well, while no process may write."""
        assert self._index is not None
        with self._index.changing():
            for name in names:
                if (block := self._index.block(name)) is None:
                    continue  # it was removed meanwhile
                if next(self._read([(name, block.slot)])):
                    self.counts["whole"] += 1
                    continue
                self.bad.append(name)
                if self._file is None or block.slot >= self._num_slots:
                    self.counts["lost"] += 1
                elif self._file.holds_another(block.slot, name):
                    self.counts["overwritten"] += 1
                else:
                    self.counts["damaged"] += 1
