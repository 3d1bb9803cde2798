"""The prefixes of a folder, for people: listed from fork to fork, exported, and imported.

An exported file takes a prefix to another machine:

    headstart blocks VERSION \\n | the model, in JSON \\n | records | "end" and their number

The last field has 11 bytes. Each record is as long as its header says.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headstart.cache import BlockHash
from headstart.errors import CacheError
from headstart.tiers.disk import DiskStore
from headstart.tiers.folder import INDEX, make_folder, parse_description, reopen
from headstart.tiers.index import DiskIndex, KeptBlock, KeptModel
from headstart.tiers.store import (
    HEADER_BYTES,
    VERSION,
    ModelRecord,
    StoredBlock,
    make_header,
    payload_of,
    read_header,
)

_BLOCKS_OF_WORDS = 16
_KIND = b"headstart blocks "
_MAGIC = _KIND + b"%d\n" % VERSION
_END = b"end"  # and the number of blocks, in 8 bytes
_LONGEST = 1 << 16  # bytes of the line about the model
_BATCH = 32


class ModelState(NamedTuple):
    """A model's blocks in a folder.

    hits: blocks that were loaded. saved_seconds: the time to compute those. made and used: of the
    oldest block, and of the block used last, in seconds since 1970.
    """

    model: KeptModel
    num_blocks: int
    nbytes: int
    hits: int
    saved_seconds: float
    made: float
    used: float


@dataclass
class KeptPrefix:
    """Blocks one after another, up to where prompts part. `then`: the prefixes that continue it."""

    stretch: list[KeptBlock]
    then: list["KeptPrefix"] = field(default_factory=list)

    @property
    def words(self) -> str:
        """The beginning of its text, on one line; empty where no text is stored."""
        some = b"".join(block.words for block in self.stretch[:_BLOCKS_OF_WORDS])
        text = some.decode("utf-8", "replace").replace("\ufffd", "")  # halves of characters
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())

    @property
    def name(self) -> BlockHash:
        return self.stretch[0].name

    def all_blocks(self) -> Iterator[KeptBlock]:
        """Yield its blocks, and those of all prefixes that continue it."""
        todo = [self]
        while todo:
            prefix = todo.pop()
            yield from prefix.stretch
            todo += prefix.then


def read_models(folder: Path) -> list[ModelState]:
    """Return the models that have blocks in a folder, largest first.

    Raises sqlite3.Error or OSError.
    """
    if not (folder / INDEX).exists() and not make_folder(folder):
        return []
    states = []
    with closing(reopen(folder, None).connection) as index:
        for model in index.models():
            if blocks := index.list_blocks(model.id):
                state = ModelState(
                    model,
                    num_blocks=len(blocks),
                    nbytes=len(blocks) * model.record.block_bytes,
                    hits=sum(block.hits for block in blocks),
                    saved_seconds=sum(block.hits * block.seconds for block in blocks),
                    made=min(block.made for block in blocks),
                    used=max(block.used for block in blocks),
                )
                states.append(state)
    return sorted(states, key=lambda state: -state.nbytes)


def read_prefixes(index: DiskIndex, model: int) -> list[KeptPrefix]:
    """Return a model's prefixes as trees, largest first.

    A prefix whose beginning is lost begins later.
    """
    blocks = {block.name: block for block in index.list_blocks(model)}
    children: dict[BlockHash, list[KeptBlock]] = {}
    for block in blocks.values():
        children.setdefault(block.parent, []).append(block)
    roots = [KeptPrefix([block]) for block in blocks.values() if block.parent not in blocks]
    todo = list(roots)
    while todo:
        prefix = todo.pop()
        following = children.get(prefix.stretch[-1].name, [])
        while len(following) == 1:
            prefix.stretch.append(following[0])
            following = children.get(following[0].name, [])
        prefix.then = [KeptPrefix([block]) for block in following]
        todo += prefix.then
    return sorted(roots, key=lambda prefix: -sum(1 for _ in prefix.all_blocks()))


def export_blocks(store: DiskStore, blocks: Iterable[KeptBlock], path: Path) -> int:
    """Write blocks to a new file, parents before children; return how many were whole.

    Raises CacheError if the file exists or cannot be written; no part of it is left then.
    """
    try:
        with path.open("xb") as file:
            try:
                count = 0
                file.write(_MAGIC + json.dumps(store.model._asdict()).encode() + b"\n")
                for kept in sorted(blocks, key=lambda block: block.depth):
                    about = (kept.name, kept.parent, kept.depth, kept.seconds, kept.used)
                    for _, payload in store.load([kept.name]):
                        file.write(make_header(StoredBlock(*about, payload)))
                        file.write(payload)
                        count += 1
                file.write(_END + count.to_bytes(8, "little"))
                file.flush()
                return count
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError as error:
        raise CacheError(f"{path} exists; allowed: a new file") from error
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
    """Save the blocks of a file up to the first damaged one; return how many are new.

    now: the time of their use, in seconds since 1970. Raises CacheError if the file is of another
    model, or not an export; and, after saving, if blocks are missing, or the folder has no room for
    all.
    """
    size = store.model.block_size
    num_new = num_read = num_held = 0
    try:
        with path.open("rb") as file:
            model = _read_model(file, path)
            if model._replace(title="") != store.model._replace(title=""):
                raise CacheError(f"{path} holds blocks of another model than {store.model.title}")
            is_last = False
            while not is_last:
                blocks: list[StoredBlock] = []
                while len(blocks) < _BATCH and (block := _read_block(file, model, now)) is not None:
                    blocks.append(block)
                is_last = len(blocks) < _BATCH
                num_new += store.save(blocks)
                num_read += len(blocks)
                num_held += sum(store.find([block.name]) for block in blocks)
            file.seek(-len(_END) - 8, 2)
            is_whole = file.read() == _END + num_read.to_bytes(8, "little")
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error
    if not is_whole:
        raise CacheError(
            f"{path} is damaged or cut after {num_read * size:,} tokens; these are kept, "
            f"{num_new * size:,} of them are new here"
        )
    if num_held < num_read:
        raise CacheError(
            f"{path} holds {num_read * size:,} tokens, and {store.folder} keeps "
            f"{num_held * size:,} of them: there is no room for the others"
        )
    return num_new


def _read_model(file: BinaryIO, path: Path) -> ModelRecord:
    begins = file.read(len(_MAGIC))
    if begins != _MAGIC:
        if begins.startswith(_KIND):
            raise CacheError(f"{path} is of another version of headstart; export its blocks again")
        raise CacheError(f"{path} is no file that `headstart cache export` wrote")
    try:
        model = parse_description(file.readline(_LONGEST))
    except Exception as error:  # any kind, from a damaged file
        raise CacheError(f"{path} does not name its model") from error
    if model is None:
        raise CacheError(f"{path} has blocks of an impossible size")
    return model


def _read_block(file: BinaryIO, model: ModelRecord, now: float) -> StoredBlock | None:
    """Return the next block of a file; None at the end, and for a damaged block."""
    head = file.read(HEADER_BYTES)
    header = read_header(head)
    if header is None or header.length != model.block_bytes:
        return None
    payload = payload_of(memoryview(head + file.read(header.length)), header.name)
    if payload is None:
        return None
    name, parent, depth, seconds, _, _ = header
    return StoredBlock(name, parent, depth, seconds, now, payload)
