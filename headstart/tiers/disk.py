"""The disk tier: blocks of K/V in files of a folder, shared by the processes of one user.

    FOLDER/index.sqlite       which block lies where, and what it is worth
    FOLDER/MODEL.kv           the records of a model's blocks, in slots of one size
    FOLDER/MODEL.json         what the model is, so that the index can be made anew

A slot's record says which block it is and has a checksum, so the index may be wrong: two processes
may write at once, one may be killed, files may be cut or damaged, and the worst is a miss. Files
have no gaps: where a block goes, the last one of its file takes its place.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headstart.cache import BlockHash
from headstart.tiers.faults import Faults
from headstart.tiers.files import SlotFile
from headstart.tiers.folder import (
    OpenIndex,
    describe_model,
    make_folder,
    rebuild_index,
    reopen,
    slot_path,
)
from headstart.tiers.index import DiskIndex, KeptBlock, KeptModel
from headstart.tiers.store import LoadedBlock, ModelRecord, StoredBlock

__all__ = ["DiskStore"]

_LEAST_FREE = 256 << 20  # bytes of the disk that are left to others


class DiskStore:
    """The blocks of one model in a folder; a `BlockStore`.

    max_bytes bounds the files of all models in the folder together. Raises ConfigError if the
    folder cannot be made or written.
    """

    tier = "disk"

    def __init__(self, folder: Path, model: ModelRecord, max_bytes: int) -> None:
        self.folder = folder
        self.faults = Faults(f"cache folder {folder}")
        self.model = model  # whose blocks they are
        self._max_bytes = max_bytes
        self._files: dict[str, SlotFile] = {}
        # Two connections, so that a lookup does not wait for what is being written.
        self._reading, self._writing = threading.RLock(), threading.RLock()
        self._reader: OpenIndex | None = None
        self._writer: OpenIndex | None = None
        make_folder(folder)
        with self._guard(), self._writing:
            index = self._open_writer()
            with index.changing():
                self._model_id(index)

    def find(self, names: Sequence[BlockHash]) -> int:
        with self._guard(), self._reading:
            return len(self._open_reader().find(names))
        return 0

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        with self._guard():
            with self._reading:
                slots = self._open_reader().find(names)
                file = self._file(self.model)
            for (name, _), payload in zip(slots, file.read(slots), strict=True):
                if payload is None or payload.nbytes != self.model.block_bytes:
                    self._drop_damaged(name)
                    return
                yield LoadedBlock(self.tier, payload)

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        saved = 0
        with self._guard(), self._writing:
            index = self._open_writer()
            with index.changing():
                model = self._model_id(index)
                known = index.known([block.name for block in blocks])
                for block in blocks:
                    if block.name not in known:
                        if not self._save_one(index, model, block):
                            break
                        saved += 1
        return saved

    def _save_one(self, index: DiskIndex, model: int, block: StoredBlock) -> bool:
        """Save a block; False if there is no room, or the disk is full."""
        file = self._file(self.model)
        worth = index.worth(block.seconds, file.slot_bytes)
        slot = self._find_room(index, model, block.used, worth)
        if slot is None:
            return False
        try:
            file.write(slot, block)
        except OSError as error:
            self.faults.note("a block cannot be written", error)
            return False
        index.insert(model, slot, block, worth)
        return True

    def _find_room(self, index: DiskIndex, model: int, used: float, worth: float) -> int | None:
        """A slot for a block of this worth; None if what would go is worth more, or used since."""
        own = self._file(self.model)
        while True:
            taken = sum(self._bytes_of(index, kept) for kept in index.models())
            if taken + own.slot_bytes <= self._max_bytes and self._has_space(own.slot_bytes):
                return index.count(model)
            found = index.victim(used)
            if found is None or found[1] > worth:
                return None
            index.advance(found[1])
            if found[0].model == model:
                return found[0].slot
            self._take_out(index, found[0])

    def _bytes_of(self, index: DiskIndex, model: KeptModel) -> int:
        """Bytes that a model's blocks take. Raises ValueError if its file has no such slots."""
        file, count = self._file(model.record), index.count(model.id)
        if count > file.num_slots:
            raise ValueError(f"it tells of {count:,} blocks, and {file.num_slots:,} are there")
        return count * file.slot_bytes

    def _has_space(self, nbytes: int) -> bool:
        state = os.statvfs(self.folder)
        return state.f_bavail * state.f_frsize >= nbytes + _LEAST_FREE

    def _take_out(self, index: DiskIndex, block: KeptBlock) -> None:
        """Forget a block; the last one of its file takes its slot."""
        record = next(kept.record for kept in index.models() if kept.id == block.model)
        file, last = self._file(record), index.count(block.model) - 1
        if block.slot == last:
            index.remove(block.name)
        else:
            file.move(last, block.slot)
            index.move(block.model, last, block.slot)
        file.cut(last)

    def touch(self, names: Sequence[BlockHash]) -> None:
        with self._guard(), self._writing:
            index = self._open_writer()
            with index.changing():
                index.touch(names, self._file(self.model).slot_bytes)

    def remove(self, names: Sequence[BlockHash]) -> int:
        """Forget blocks; how many there were."""
        removed = 0
        with self._guard(), self._writing:
            index = self._open_writer()
            with index.changing():
                for name in names:
                    if (block := index.block(name)) is not None:
                        self._take_out(index, block)
                        removed += 1
        return removed

    def _drop_damaged(self, name: BlockHash) -> None:
        """Forget a block that cannot be read, unless another process moved it meanwhile."""
        with self._writing:
            index = self._open_writer()
            with index.changing():
                block = index.block(name)
                if block is None:
                    return
                [payload] = self._file(self.model).read([(name, block.slot)])
                if payload is None or payload.nbytes != self.model.block_bytes:
                    self.faults.note("a block is damaged", name.hex())
                    self._take_out(index, block)

    def close(self) -> None:
        with self._reading, self._writing:
            self._close_indexes()
            for file in self._files.values():
                file.close()
            self._files.clear()

    # Opening

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """What goes wrong inside is noted; a damaged index is made anew."""
        try:
            yield
        except sqlite3.OperationalError as error:
            self.faults.note("the index cannot be used", error)
        except OSError as error:
            self.faults.note("a file cannot be used", error)
        except Exception as error:  # of any kind: what a damaged index says may be anything
            self.faults.note("the index is damaged", error)
            self._make_anew()

    def _open_reader(self) -> DiskIndex:
        self._reader = reopen(self.folder, self._reader)
        return self._reader.connection

    def _open_writer(self) -> DiskIndex:
        self._writer = reopen(self.folder, self._writer)
        return self._writer.connection

    def _model_id(self, index: DiskIndex) -> int:
        for kept in index.models():
            if kept.record.fingerprint == self.model.fingerprint:
                return kept.id
        describe_model(self.folder, self.model)
        return index.add_model(self.model)

    def _file(self, record: ModelRecord) -> SlotFile:
        file = self._files.get(record.fingerprint)
        if file is None:
            file = SlotFile(slot_path(self.folder, record), record.block_bytes)
            self._files[record.fingerprint] = file
        return file

    def _make_anew(self) -> None:
        try:
            with self._reading, self._writing:
                broken = self._writer or self._reader
                self._close_indexes()
                rebuild_index(self.folder, None if broken is None else broken.inode)
        except (sqlite3.Error, OSError) as error:
            self.faults.note("the index cannot be made anew", error)

    def _close_indexes(self) -> None:
        for opened in (self._reader, self._writer):
            if opened is not None:
                opened.connection.close()
        self._reader = self._writer = None
