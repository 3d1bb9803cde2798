"""Blocks in one file, to take a prefix to another machine.

headstart blocks 1 \\n | the model, in JSON \\n | records, each as long as its header says
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from headstart.cache import BlockHash
from headstart.errors import CacheError
from headstart.tiers.disk import DiskStore
from headstart.tiers.folder import parse_description
from headstart.tiers.index import KeptBlock
from headstart.tiers.records import HEADER_BYTES, make_header, payload_of, read_header
from headstart.tiers.store import ModelRecord, StoredBlock

__all__ = ["export_blocks", "import_blocks", "read_model"]

_MAGIC = b"headstart blocks 1\n"
_LONGEST = 1 << 16  # bytes of the line about the model
_BATCH = 32


def export_blocks(store: DiskStore, blocks: Iterable[KeptBlock], path: Path) -> int:
    """Write blocks to a new file, parents before children; how many were whole.

    Raises CacheError if the file is there or cannot be written.
    """
    count = 0
    try:
        with path.open("xb") as file:
            file.write(_MAGIC + json.dumps(store.model._asdict()).encode() + b"\n")
            for block in sorted(blocks, key=lambda one: one.depth):
                for loaded in store.load([block.name]):
                    file.write(make_header(_stored(block, loaded.payload)))
                    file.write(loaded.payload)
                    count += 1
    except FileExistsError as error:
        raise CacheError(f"{path} exists; allowed: a new file") from error
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror}") from error
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
    """Keep the blocks of a file that are whole; how many are new.

    now: when they count as used, in seconds since 1970. Raises CacheError if the file is of
    another model, or no such file.
    """
    if read_model(path).fingerprint != store.model.fingerprint:
        raise CacheError(f"{path} holds blocks of another model than {store.model.title}")
    count = 0
    try:
        with path.open("rb") as file:
            model = _read_model(file, path)
            batch: list[StoredBlock] = []
            for block in _read_blocks(file, model, now):
                batch.append(block)
                if len(batch) == _BATCH:
                    count += store.save(batch)
                    batch = []
            return count + store.save(batch)
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error


def _read_model(file: BinaryIO, path: Path) -> ModelRecord:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise CacheError(f"{path} is no file that `headstart cache export` wrote")
    try:
        model = parse_description(file.readline(_LONGEST))
    except Exception as error:  # of any kind: a damaged file may say anything
        raise CacheError(f"{path} does not tell of which model it is") from error
    if model is None:
        raise CacheError(f"{path} tells of blocks of a size that none has")
    return model


def _read_blocks(file: BinaryIO, model: ModelRecord, now: float) -> Iterator[StoredBlock]:
    """The blocks up to the first that is not whole."""
    while len(head := file.read(HEADER_BYTES)) == HEADER_BYTES:
        header = read_header(head)
        if header is None or header.length != model.block_bytes:
            return
        record = memoryview(head + file.read(header.length))
        payload = payload_of(record, header.name)
        if payload is None:
            return
        name, parent, depth, seconds = header[:4]
        yield StoredBlock(BlockHash(name), parent, depth, seconds, now, payload)
