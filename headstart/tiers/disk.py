"""The disk tier: blocks of K/V in files of a folder, shared by the processes of one user.

    FOLDER/index.sqlite       the slot of each block, and its worth for eviction
    FOLDER/MODEL.kv           the records of a model's blocks, in slots of one size
    FOLDER/MODEL.json         the model, for rebuilding the index; remains when the model has no
                              blocks any more

A record contains the block's name and a checksum, so a wrong index causes at most a miss. The index
may be wrong because two processes wrote at the same time, a process was killed, or files were
truncated or damaged. Files have no gaps: when a block is removed, the last block of the file moves
to the free slot. Files are truncated last, after the transaction that changes the index. So a
killed process loses at most the stored blocks whose slots it overwrote in its last transaction.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headstart.cache import BlockHash
from headstart.errors import ConfigError
from headstart.tiers.files import SlotFile, slot_bytes
from headstart.tiers.index import (
    INDEX,
    DiskIndex,
    IndexedBlock,
    describe_model,
    is_transient,
    make_folder,
    rebuild_index,
    reopen,
    slot_files,
    slot_path,
)
from headstart.tiers.store import Faults, LoadedBlock, ModelRecord, StoredBlock

_MIN_FREE = 256 << 20  # bytes of the disk that a save must leave free
_INDEX_RESERVE = 8 << 20  # bytes of the disk that a transaction of the index may need


class _Closed(Exception):
    """A method of the store was called after `close`."""


class DiskStore:
    """The blocks of one model in a folder; a `BlockStore`.

    max_bytes: maximum total size of the files of all models in the folder. A folder that is not
    writable is only read. Raises ConfigError if the folder cannot be made or read.
    """

    tier = "disk"

    def __init__(self, folder: Path, model: ModelRecord, max_bytes: int) -> None:
        self.folder = folder.absolute()
        self.faults = Faults(f"cache folder {folder}")
        self.model = model
        self.num_stored = 0
        self.block_seconds = 0.0
        self._max_bytes = self._limit = max_bytes
        self._num_rebuilds = 0
        self._new: set[BlockHash] = set()  # blocks that the current save has listed
        self._surplus = 0  # bytes at the ends of files, after the last block in the index
        self._to_truncate: set[ModelRecord] = set()  # models whose files must be truncated
        self._files: dict[Path, SlotFile] = {}
        # Two connections, so that a lookup does not wait for a save.
        self._lookup_lock, self._change_lock = threading.RLock(), threading.RLock()
        self._files_lock = threading.Lock()
        self._indexes: dict[str, DiskIndex] = {}  # by purpose, "lookups" or "changes"
        self._closed = False
        self._is_read_only = not make_folder(folder)
        with self._guard():
            self._check_files()

    @property
    def _lacks_index(self) -> bool:
        """True for a read-only folder without an index."""
        return self._is_read_only and not (self.folder / INDEX).exists()

    def find(self, names: Sequence[BlockHash]) -> int:
        if not self._lacks_index:
            with self._guard(), self._lookup_lock:
                return len(self._open("lookups").find(names))
        return 0

    def first(self, names: Sequence[BlockHash]) -> int:
        if not self._lacks_index:
            with self._guard(), self._lookup_lock:
                stored = self._open("lookups").find_any(names)
                return next((i for i, name in enumerate(names) if name in stored), len(names))
        return len(names)

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        with self._guard():
            with self._lookup_lock:
                slots = self._open("lookups").find(names)
                if not slots:
                    return
                file = self._file(self.model)
            for (name, _), payload in zip(slots, file.read(slots), strict=True):
                if not self._is_whole(payload):
                    payload = self._read_again(name)
                if payload is None:
                    return
                yield LoadedBlock(self.tier, payload)

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        if self._is_read_only:
            saved = None
        else:
            rebuilds, saved = self._num_rebuilds, self._save(blocks)
            if rebuilds != self._num_rebuilds:
                saved = self._save(blocks)
        if saved is None:
            self.faults.num_unsaved += len(blocks)
        return saved or 0

    def _save(self, blocks: Sequence[StoredBlock]) -> int | None:
        """Save blocks; return the number of new blocks, or None after an error of the folder."""
        with self._guard(), self._change_lock:
            saved = 0
            self._limit = self._max_bytes
            self._new.clear()
            with self._transaction() as index:
                if (model := self._model_id(index)) is None:
                    describe_model(self.folder, self.model)
                    model = index.add_model(self.model)
                for block in blocks:
                    if index.block(block.name) is not None:
                        index.use(block.name, block.used)  # so that no later block evicts it
                        continue
                    index.use(block.parent, block.used)  # so that this block does not evict it
                    if not self._save_one(index, model, block):
                        break
                    saved += 1
                if index.find_any(list(self._new)) != self._new:
                    raise ValueError("it lacks blocks that were just listed")
            return saved
        return None

    def _save_one(self, index: DiskIndex, model: int, block: StoredBlock) -> bool:
        """Save a block; return False if it has the wrong size or no space is left."""
        file = self._file(self.model)
        if memoryview(block.payload).nbytes != self.model.block_bytes:
            self.faults.note("a block has the wrong size", block.name.hex())
            return False
        for _ in range(2):
            slot = self._find_slot(index, model, block.used)
            if slot is None:
                return False
            try:
                file.write(slot, block)
            except OSError as error:
                self.faults.note("a block cannot be written", error)
                self._limit = self._count_bytes(index)  # the disk is full: evict from now on
            else:
                index.insert(model, slot, block, index.worth(block.seconds, file.slot_bytes))
                self._new.add(block.name)
                return True
        return False

    def _find_slot(self, index: DiskIndex, model: int, used: float) -> int | None:
        """Return a slot for a block that was last used at `used`; evict other blocks if necessary.

        Return None if the blocks that may be evicted do not free enough space. Also return None if
        the disk is too full to change the index, because the new block could not be listed.
        """
        size = slot_bytes(self.model.block_bytes)
        if self._free_space() < _INDEX_RESERVE:
            self.faults.note("the disk is full", f"less than {_INDEX_RESERVE:,} bytes are free")
            return None
        while True:
            taken = self._count_bytes(index)
            free = self._free_space() + self._surplus
            if taken + size <= self._limit and free >= size + _MIN_FREE:
                return index.count(model)
            victim = index.victim(used)
            if victim is None or size > self._limit:
                return None
            block, worth = victim
            index.advance(worth)
            self._new.discard(block.name)
            if block.model == model and taken <= self._limit:
                return block.slot
            self._remove_block(index, block)

    def _count_bytes(self, index: DiskIndex) -> int:
        """Return the bytes that the blocks of all models take; collect the files to truncate.

        Opens no file, since there may be hundreds. Raises ValueError if a file lacks listed slots.
        """
        self._surplus = total = 0
        for model, record in index.models():
            count, size = index.count(model), slot_bytes(record.block_bytes)
            length = 0
            with suppress(FileNotFoundError):
                length = slot_path(self.folder, record).lstat().st_size
            if count * size > -(-length // size) * size:
                raise ValueError(f"it lists {count:,} blocks, and the file has {length // size:,}")
            if length > count * size:  # blocks were removed, or a process was killed
                self._surplus += length - count * size
                self._to_truncate.add(record)
            total += count * size
        return total

    def _free_space(self) -> int:
        state = os.statvfs(self.folder)
        return state.f_bavail * state.f_frsize

    def _remove_block(self, index: DiskIndex, block: IndexedBlock) -> None:
        """Remove a block from the index, and move the last block of the file to its slot.

        `_transaction` truncates the file afterwards.
        """
        record = dict(index.models())[block.model]
        file, last = self._file(record), index.count(block.model) - 1
        if block.slot == last:
            index.remove(block.name)
        else:
            file.move(last, block.slot)
            index.move(block.model, last, block.slot)
        self._to_truncate.add(record)

    @contextmanager
    def _transaction(self) -> Iterator[DiskIndex]:
        """Open a transaction of the index; after it, truncate files to the listed blocks.

        For a model without blocks, remove its index entry and its .kv file; the .json file stays.
        Other processes may have the removed file open, so they check `SlotFile.is_in_place` before
        each use.
        """
        index = self._open("changes")
        self._to_truncate.clear()
        with index.transaction():
            yield index
            self._to_truncate.update(record for id, record in index.models() if not index.count(id))
        if not self._to_truncate:
            return
        with index.transaction():  # another process may have saved blocks since
            for model, record in index.models():
                if record not in self._to_truncate:
                    continue
                if count := index.count(model):
                    self._file(record).truncate(count)
                    continue
                path = slot_path(self.folder, record)
                with self._files_lock:
                    self._files.pop(path, None)
                path.unlink(missing_ok=True)
                index.forget_model(model)

    def touch(self, names: Sequence[BlockHash]) -> None:
        if not self._is_read_only:
            with self._guard(), self._change_lock:
                index = self._open("changes")
                with index.transaction():
                    index.touch(names, slot_bytes(self.model.block_bytes))

    def remove(self, names: Sequence[BlockHash]) -> int:
        """Remove blocks; return the number of blocks that were stored."""
        removed = 0
        with self._guard(), self._change_lock, self._transaction() as index:
            for name in names:
                if (block := index.block(name)) is not None:
                    self._remove_block(index, block)
                    removed += 1
        return removed

    def clear(self) -> bool:
        if not self._is_read_only:
            with self._guard(), self._change_lock:
                with self._transaction() as index:
                    if (model := self._model_id(index)) is not None:
                        index.drop_blocks(model)
                return True
        return False

    def forget_damaged(self, names: Sequence[BlockHash]) -> None:
        """Read each of these blocks again; remove a block that cannot be read."""
        for name in names:
            with self._guard():
                self._read_again(name)

    def _is_whole(self, payload: memoryview | None) -> bool:
        return payload is not None and payload.nbytes == self.model.block_bytes

    def _read_again(self, name: BlockHash) -> memoryview | None:
        """Read a block that another process may have moved; remove it if it cannot be read."""
        if self._is_read_only:
            return None
        with self._change_lock, self._transaction() as index:
            block = index.block(name)
            if block is None:
                return None
            file = self._file(self.model)
            [payload] = file.read([(name, block.slot)])
            if self._is_whole(payload):
                return payload
            if not file.has_other_block(block.slot, name):
                self.faults.note("a block is damaged", name.hex())
            self._remove_block(index, block)
            return None

    def close(self) -> None:
        with self._lookup_lock, self._change_lock:
            self._closed = True
            self._close_indexes()
            for file in self._files.values():
                file.close()
            self._files.clear()

    # Opening

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Count and suppress exceptions; rebuild the index if they show that it is damaged."""
        try:
            yield
        except _Closed:
            pass
        except (OSError, MemoryError) as error:
            self.faults.note("a file cannot be used", error)
        except ConfigError as error:
            self.faults.note("the folder cannot be used", error)
        except Exception as error:  # a damaged index raises exceptions of many types
            if is_transient(error):
                self.faults.note("the index cannot be used", error)
                return
            self.faults.note("the index is damaged", error)
            if not self._is_read_only:
                self._rebuild()

    def _rebuild(self) -> None:
        try:
            with self._lookup_lock, self._change_lock:
                self._require_open()
                broken = {index.inode for index in self._indexes.values()}
                self._close_indexes()
                describe_model(self.folder, self.model)
                rebuild_index(self.folder, broken)
                self._num_rebuilds += 1
        except _Closed:
            pass
        except Exception as error:  # a damaged folder raises exceptions of many types
            self.faults.note("the index cannot be rebuilt", error)

    def _check_files(self) -> None:
        """Write the model's .json file; raise ValueError if the index lacks a model with blocks."""
        if self._lacks_index:
            return
        with self._change_lock:
            index = self._open("changes")
            with index.transaction():
                if not self._is_read_only:
                    describe_model(self.folder, self.model)
                    listed = {slot_path(self.folder, record) for _, record in index.models()}
                    for path in slot_files(self.folder) - listed:
                        if path.lstat().st_size:
                            raise ValueError(f"it lacks {path.name}")
                if (model := self._model_id(index)) is not None:
                    self.num_stored = index.count(model)
                    self.block_seconds = index.block_seconds(model)
                if self.num_stored:
                    SlotFile.prepare_reading()

    def _open(self, name: str) -> DiskIndex:
        """Return the connection for "lookups" or "changes". Call with its lock held."""
        self._require_open()
        self._indexes[name] = reopen(self.folder, self._indexes.pop(name, None))
        return self._indexes[name]

    def _require_open(self) -> None:
        if self._closed:
            raise _Closed

    def _close_indexes(self) -> None:
        for index in self._indexes.values():
            index.close()
        self._indexes.clear()

    def _model_id(self, index: DiskIndex) -> int | None:
        """Return the model's id; None while it has no blocks."""
        path = slot_path(self.folder, self.model)
        ids = {slot_path(self.folder, record): id for id, record in index.models()}
        return ids.get(path)

    def _file(self, record: ModelRecord) -> SlotFile:
        path = slot_path(self.folder, record)
        with self._files_lock:
            file = self._files.get(path)
            if file is None or not file.is_in_place:
                file = SlotFile(path, record.block_bytes, read_only=self._is_read_only)
                self._files[path] = file
        return file
