"""Blocks in one file, to take a prefix to another machine.

headstart blocks VERSION \\n | the model, in JSON \\n | records | "end" and how many, in 11 bytes

Each record is as long as its header says.
"""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Self

from headstart.cache import BlockHash
from headstart.errors import CacheError
from headstart.tiers.disk import DiskStore
from headstart.tiers.folder import parse_description
from headstart.tiers.index import KeptBlock
from headstart.tiers.records import HEADER_BYTES, VERSION, make_header, payload_of, read_header
from headstart.tiers.store import ModelRecord, StoredBlock

__all__ = ["export_blocks", "import_blocks", "read_model"]

_KIND = b"headstart blocks "
_MAGIC = _KIND + b"%d\n" % VERSION
_END = b"end"  # and how many blocks there were, in 8 bytes
_LONGEST = 1 << 16  # bytes of the line about the model
_BATCH = 32


def export_blocks(store: DiskStore, blocks: Iterable[KeptBlock], path: Path) -> int:
    """Write blocks to a new file, parents before children; how many were whole.

    Raises CacheError if the file is there or cannot be written; none is left behind then.
    """
    try:
        with path.open("xb") as file:
            try:
                return _write(file, store, blocks)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError as error:
        raise CacheError(f"{path} exists; allowed: a new file") from error
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror}") from error


def _write(file: BinaryIO, store: DiskStore, blocks: Iterable[KeptBlock]) -> int:
    """Write the model, the blocks that are whole, and the end; how many blocks those are."""
    count = 0
    file.write(_MAGIC + json.dumps(store.model._asdict()).encode() + b"\n")
    for block in sorted(blocks, key=lambda one: one.depth):
        for loaded in store.load([block.name]):
            file.write(make_header(_stored(block, loaded.payload)))
            file.write(loaded.payload)
            count += 1
    file.write(_END + count.to_bytes(8, "little"))
    file.flush()
    return count


def _stored(block: KeptBlock, payload: bytes | memoryview) -> StoredBlock:
    return StoredBlock(block.name, block.parent, block.depth, block.seconds, block.used, payload)


def read_model(path: Path) -> ModelRecord:
    """Whose blocks a file holds. Raises CacheError."""
    try:
        with path.open("rb") as file:
            return _read_model(file, path)
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error


def import_blocks(store: DiskStore, path: Path, now: float) -> int:
    """Keep the blocks of a file up to the first that is not whole; how many are new.

    now: when they count as used, in seconds since 1970. Raises CacheError if the file is of
    another model, or no such file; and, when the whole ones are kept, if it lacks others, or the
    folder has no room for all.
    """
    if read_model(path)._replace(title="") != store.model._replace(title=""):
        raise CacheError(f"{path} holds blocks of another model than {store.model.title}")
    count = num_read = num_kept = 0
    try:
        with path.open("rb") as file:
            model = _read_model(file, path)
            blocks = _BlockReader(file, model, now)
            while batch := list(islice(blocks, _BATCH)):
                count += store.save(batch)
                num_read += len(batch)
                num_kept += sum(store.find([block.name]) for block in batch)
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error
    if not blocks.is_whole:
        raise CacheError(
            f"{path} is damaged or cut after {num_read * model.block_size:,} tokens; these are "
            f"kept, {count * model.block_size:,} of them are new here"
        )
    if num_kept < num_read:
        raise CacheError(
            f"{path} holds {num_read * model.block_size:,} tokens, and {store.folder} keeps "
            f"{num_kept * model.block_size:,} of them: there is no room for the others"
        )
    return count


def _read_model(file: BinaryIO, path: Path) -> ModelRecord:
    begins = file.read(len(_MAGIC))
    if begins != _MAGIC:
        if begins.startswith(_KIND):
            raise CacheError(f"{path} is of another version of headstart; export its blocks anew")
        raise CacheError(f"{path} is no file that `headstart cache export` wrote")
    try:
        model = parse_description(file.readline(_LONGEST))
    except Exception as error:  # of any kind: a damaged file may say anything
        raise CacheError(f"{path} does not tell of which model it is") from error
    if model is None:
        raise CacheError(f"{path} tells of blocks of a size that none has")
    return model


class _BlockReader:
    """The blocks of a file up to the first that is not whole."""

    def __init__(self, file: BinaryIO, model: ModelRecord, now: float) -> None:
        self.is_whole = False  # once all were read
        self._file, self._model, self._now = file, model, now
        self._count = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StoredBlock:
        head = self._file.read(HEADER_BYTES)
        self.is_whole |= head == _END + self._count.to_bytes(8, "little")
        header = read_header(head)
        if header is None or header.length != self._model.block_bytes:
            raise StopIteration
        record = memoryview(head + self._file.read(header.length))
        payload = payload_of(record, header.name)
        if payload is None:
            raise StopIteration
        self._count += 1
        name, parent, depth, seconds = header[:4]
        return StoredBlock(BlockHash(name), parent, depth, seconds, self._now, payload)
