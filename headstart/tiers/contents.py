r"""Commands on the blocks of a folder: verify, list, export, import.

Other processes may use a folder while it is verified. They may move a block while it is read. So a
block that cannot be read is read again inside a transaction, during which no process writes.

An exported file takes a prefix to another machine:

    headstart blocks VERSION \n | the model, in JSON \n | records | "end" and the number of records

The last field has 11 bytes. The header of each record contains the length of its payload.
"""

import json
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headstart.cache import BlockHash
from headstart.errors import CacheError, ConfigError
from headstart.tiers.disk import DiskStore
from headstart.tiers.files import SlotFile
from headstart.tiers.index import (
    INDEX,
    DiskIndex,
    IndexedBlock,
    IndexedModel,
    described_models,
    is_transient,
    make_folder,
    parse_description,
    rebuild_index,
    reopen,
    slot_path,
)
from headstart.tiers.store import (
    HEADER_BYTES,
    VERSION,
    ModelRecord,
    StoredBlock,
    make_header,
    payload_of,
    read_header,
)

_REREAD_BATCH = 64  # blocks that are read again in one transaction


class Counts(NamedTuple):
    """Blocks by their state.

    intact: listed in the index and readable. damaged: listed, but unreadable. lost: listed beyond
    the file's end. overwritten: listed, but the slot contains another block, because a process was
    killed during a save. unlisted: readable, but not listed; the next save overwrites it. gaps:
    slots without a listed block, before the last listed block.
    """

    intact: int = 0
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
    """The state of a folder. If the index is damaged, all blocks count as unlisted."""

    index_is_intact: bool
    models: list[ModelReport]

    @property
    def total(self) -> Counts:
        """The blocks of all models."""
        columns = zip(Counts(), *(model.counts for model in self.models), strict=True)
        return Counts(*map(sum, columns))

    @property
    def is_whole(self) -> bool:
        """True if the index is intact, the files have no gaps, and no block is damaged or lost."""
        total = self.total
        return self.index_is_intact and not (total.damaged or total.lost or total.gaps)


def verify(
    folder: Path, *, repair: bool = False, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Read all records of a folder, which other processes may use meanwhile.

    repair: afterwards forget damaged and lost blocks, and rebuild an index that is damaged or has
    gaps. The report describes the folder before the repair. progress: called with the number of
    records read so far, and the number of all records. Raises ConfigError if the folder cannot be
    read, or if another process uses its index for too long.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no cache folder {folder}")
    if not make_folder(folder) and repair:
        raise ConfigError(f"cache folder {folder} cannot be repaired, as it is not writable")
    try:
        with ExitStack() as stack:
            index = _open_index(folder, stack)
            checks = list(_list_checks(folder, index))
            count = sum(len(check.steps) for check in checks)
            steps = (step for check in checks for step in check.run())
            for done, _ in enumerate(steps, 1):
                if progress is not None:
                    progress(done, count)
            is_intact = index is not None or not checks
        if repair:
            for check in checks:
                if check.bad:
                    with closing(DiskStore(folder, check.record, sys.maxsize)) as store:
                        store.forget_damaged(check.bad)
            if not is_intact or any(check.counts["gaps"] for check in checks):
                path = folder / INDEX
                rebuild_index(folder, [os.stat(path).st_ino] if path.exists() else [])
    except (OSError, sqlite3.OperationalError) as error:
        raise ConfigError(f"cache folder {folder} cannot be read now: {error}") from error
    models = [ModelReport(check.record, Counts(**check.counts)) for check in checks]
    return VerifyReport(is_intact, models)


def _open_index(folder: Path, stack: ExitStack) -> DiskIndex | None:
    """Return the folder's index; None if it is missing or damaged.

    Raises a transient error of SQLite if the index cannot be read now.
    """
    try:
        if (folder / INDEX).exists():
            index = DiskIndex(folder / INDEX, read_only=not os.access(folder, os.W_OK))
            stack.callback(index.close)
            return index if index.is_intact() else None
    except Exception as error:  # a damaged index raises exceptions of many types
        if is_transient(error):
            raise
    return None


def _list_checks(folder: Path, index: DiskIndex | None) -> Iterator["_Check"]:
    """Yield a check for each model in the index, and each other model with .json and .kv files."""
    listed = {slot_path(folder, model.record): model for model in index.models()} if index else {}
    described = {slot_path(folder, record): record for record in described_models(folder)}
    described |= {path: model.record for path, model in listed.items()}
    for path, record in described.items():
        if index is not None and path in listed:
            yield _Check(path, record, index, listed[path].id)
        elif os.path.lexists(path):
            yield _Check(path, record)


class _Check:
    """The check of one model's records.

    steps: name and slot of each listed block, then None and slot of each other record. bad:
    unreadable blocks.
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
        """Read all records; yield after each record."""
        to_reread: list[BlockHash] = []
        for (name, _), is_whole in zip(self._listed, self._read(self._listed), strict=True):
            if is_whole:
                self.counts["intact"] += 1
            else:
                to_reread.append(name)
            yield
        unlisted = []
        for _, slot in self.steps[len(self._listed) :]:
            header = self._file.header(slot) if self._file is not None else None
            if header is not None and next(self._read([(header.name, slot)])):
                unlisted.append(slot)
            yield
        for start in range(0, len(to_reread), _REREAD_BATCH):
            self._read_again(to_reread[start : start + _REREAD_BATCH])
        if self._index is not None:
            with self._index.transaction():
                slots = {block.slot for block in self._index.list_blocks(self._model)}
                unlisted = [s for s in unlisted if s not in slots and s < self._num_slots]
                self.counts["gaps"] = self._index.count(self._model) - len(slots)
        self.counts["unlisted"] = len(unlisted)

    def _read(self, blocks: Sequence[tuple[BlockHash, int]]) -> Iterator[bool]:
        """Read the records of blocks in order; yield True for each undamaged record, else False."""
        if self._file is None:
            yield from [False] * len(blocks)
            return
        for payload in self._file.read(blocks):
            yield payload is not None and payload.nbytes == self.record.block_bytes

    def _read_again(self, names: Sequence[BlockHash]) -> None:
        """Read blocks again while no process writes, and count them by their state."""
        assert self._index is not None
        with self._index.transaction():
            for name in names:
                if (block := self._index.block(name)) is None:
                    continue  # the block was removed meanwhile
                if next(self._read([(name, block.slot)])):
                    self.counts["intact"] += 1
                    continue
                self.bad.append(name)
                if self._file is None or block.slot >= self._num_slots:
                    self.counts["lost"] += 1
                elif self._file.has_other_block(block.slot, name):
                    self.counts["overwritten"] += 1
                else:
                    self.counts["damaged"] += 1


_TEXT_BLOCKS = 16  # maximum number of blocks from which `StoredPrefix.text` takes text
_KIND = b"headstart blocks "
_MAGIC = _KIND + b"%d\n" % VERSION
_END = b"end"  # followed by the number of blocks, in 8 bytes
_MAX_MODEL_LINE = 1 << 16  # bytes
_BATCH = 32


class ModelState(NamedTuple):
    """A model's blocks in a folder.

    hits: number of loads of the blocks. saved_seconds: the time that these loads saved. created:
    the time when the oldest block was saved. used: the time of the last use of any block. Both
    times are in seconds since 1970.
    """

    model: IndexedModel
    num_blocks: int
    nbytes: int
    hits: int
    saved_seconds: float
    created: float
    used: float


@dataclass
class StoredPrefix:
    """Consecutive blocks up to a fork. children: the prefixes that continue this prefix."""

    segment: list[IndexedBlock]
    children: list["StoredPrefix"] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The beginning of the prefix's text, on one line; empty if no text is stored."""
        text_bytes = b"".join(block.text for block in self.segment[:_TEXT_BLOCKS])
        # A block may end within a character.
        text = text_bytes.decode("utf-8", "replace").replace("\ufffd", "")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())

    @property
    def name(self) -> BlockHash:
        return self.segment[0].name

    def all_blocks(self) -> Iterator[IndexedBlock]:
        """Yield the blocks of this prefix and of all prefixes that continue it."""
        todo = [self]
        while todo:
            prefix = todo.pop()
            yield from prefix.segment
            todo += prefix.children


def read_models(folder: Path) -> list[ModelState]:
    """Return the models that have blocks in a folder, largest first.

    Raises sqlite3.Error or OSError.
    """
    if not (folder / INDEX).exists() and not make_folder(folder):
        return []
    states = []
    with closing(reopen(folder, None)) as index:
        for model in index.models():
            if blocks := index.list_blocks(model.id):
                state = ModelState(
                    model,
                    num_blocks=len(blocks),
                    nbytes=len(blocks) * model.record.block_bytes,
                    hits=sum(block.hits for block in blocks),
                    saved_seconds=sum(block.hits * block.seconds for block in blocks),
                    created=min(block.created for block in blocks),
                    used=max(block.used for block in blocks),
                )
                states.append(state)
    return sorted(states, key=lambda state: -state.nbytes)


def read_prefixes(index: DiskIndex, model: int) -> list[StoredPrefix]:
    """Return a model's prefixes as trees, largest first.

    If the first blocks of a prefix are lost, its tree begins after them.
    """
    blocks = {block.name: block for block in index.list_blocks(model)}
    children: dict[BlockHash, list[IndexedBlock]] = {}
    for block in blocks.values():
        children.setdefault(block.parent, []).append(block)
    roots = [StoredPrefix([block]) for block in blocks.values() if block.parent not in blocks]
    todo = list(roots)
    while todo:
        prefix = todo.pop()
        following = children.get(prefix.segment[-1].name, [])
        while len(following) == 1:
            prefix.segment.append(following[0])
            following = children.get(following[0].name, [])
        prefix.children = [StoredPrefix([block]) for block in following]
        todo += prefix.children
    return sorted(roots, key=lambda prefix: -sum(1 for _ in prefix.all_blocks()))


def export_blocks(store: DiskStore, blocks: Iterable[IndexedBlock], path: Path) -> int:
    """Write the undamaged blocks to a new file, parents before children; return their number.

    Raises CacheError if the file exists or cannot be written, and leaves no partial file.
    """
    try:
        with path.open("xb") as file:
            try:
                count = 0
                file.write(_MAGIC + json.dumps(store.model._asdict()).encode() + b"\n")
                for block in sorted(blocks, key=lambda block: block.depth):
                    fields = (block.name, block.parent, block.depth, block.seconds, block.used)
                    for _, payload in store.load([block.name]):
                        file.write(make_header(StoredBlock(*fields, payload)))
                        file.write(payload)
                        count += 1
                file.write(_END + count.to_bytes(8, "little"))
                file.flush()
                return count
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError as error:
        raise CacheError(f"{path} exists already; choose another file name") from error
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror}") from error


def read_model(path: Path) -> ModelRecord:
    """Return the model of an exported file. Raises CacheError."""
    try:
        with path.open("rb") as file:
            return _read_model(file, path)
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error


def import_blocks(store: DiskStore, path: Path, now: float) -> int:
    """Save the blocks of a file up to the first damaged block; return the number of new blocks.

    now: the time of the blocks' last use, in seconds since 1970. Raises CacheError if the file is
    not an export or is of another model. Also raises CacheError, after saving, if blocks of the
    file are missing or the folder has too little space.
    """
    size = store.model.block_size
    num_new = num_read = num_stored = 0
    try:
        with path.open("rb") as file:
            model = _read_model(file, path)
            if model._replace(title="") != store.model._replace(title=""):
                raise CacheError(
                    f"{path} has blocks of another model; allowed: blocks of {store.model.title}"
                )
            is_last = False
            while not is_last:
                blocks: list[StoredBlock] = []
                while len(blocks) < _BATCH and (block := _read_block(file, model, now)) is not None:
                    blocks.append(block)
                is_last = len(blocks) < _BATCH
                num_new += store.save(blocks)
                num_read += len(blocks)
                num_stored += sum(store.find([block.name]) for block in blocks)
            file.seek(-len(_END) - 8, 2)
            is_whole = file.read() == _END + num_read.to_bytes(8, "little")
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error
    if not is_whole:
        raise CacheError(
            f"{path} is damaged or cut off after {num_read * size:,} tokens; these were imported, "
            f"{num_new * size:,} of them new"
        )
    if num_stored < num_read:
        raise CacheError(
            f"{path} has {num_read * size:,} tokens, and {store.folder} has space for "
            f"{num_stored * size:,} of them; increase --cache-dir-bytes"
        )
    return num_new


def _read_model(file: BinaryIO, path: Path) -> ModelRecord:
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        if magic.startswith(_KIND):
            raise CacheError(
                f"{path} was exported by another version of headstart; export its blocks again"
            )
        raise CacheError(f"{path} was not written by `headstart cache export`")
    try:
        model = parse_description(file.readline(_MAX_MODEL_LINE))
    except Exception as error:  # a damaged file raises exceptions of many types
        raise CacheError(f"{path} has no readable description of its model") from error
    if model is None:
        raise CacheError(f"{path} has blocks of an impossible size")
    return model


def _read_block(file: BinaryIO, model: ModelRecord, now: float) -> StoredBlock | None:
    """Return the next block of a file; None at the file's end, or if the block is damaged."""
    head = file.read(HEADER_BYTES)
    header = read_header(head)
    if header is None or header.length != model.block_bytes:
        return None
    payload = payload_of(memoryview(head + file.read(header.length)), header.name)
    if payload is None:
        return None
    name, parent, depth, seconds, _, _ = header
    return StoredBlock(name, parent, depth, seconds, now, payload)
