"""The contents of a folder, for people: its models, and their prefixes from fork to fork."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headstart.cache import BlockHash
from headstart.tiers.folder import INDEX, make_folder, reopen
from headstart.tiers.index import DiskIndex, KeptBlock, KeptModel

__all__ = ["KeptPrefix", "ModelState", "read_models", "read_prefixes"]

_BLOCKS_OF_WORDS = 16


class ModelState(NamedTuple):
    """A model's blocks in a folder.

    hits: blocks that were loaded. saved_seconds: what computing those would have taken. made and
    used: of the oldest block, and of the one used last, in seconds since 1970.
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
    """Blocks one after another, up to where prompts part. `then`: what they go on with."""

    stretch: list[KeptBlock]
    then: list["KeptPrefix"] = field(default_factory=list)

    @property
    def words(self) -> str:
        """The beginning of its text, on one line; empty where none is kept."""
        some = b"".join(block.words for block in self.stretch[:_BLOCKS_OF_WORDS])
        text = some.decode("utf-8", "replace").replace("\ufffd", "")  # halves of characters
        return " ".join("".join(one if one.isprintable() else " " for one in text).split())

    @property
    def name(self) -> BlockHash:
        """The name of its first block."""
        return self.stretch[0].name

    def all_blocks(self) -> Iterator[KeptBlock]:
        """Its blocks, and those of all that goes on from there."""
        todo = [self]
        while todo:
            prefix = todo.pop()
            yield from prefix.stretch
            todo += prefix.then


def read_models(folder: Path) -> list[ModelState]:
    """The models that have blocks in a folder, largest first. Raises sqlite3.Error or OSError."""
    if not (folder / INDEX).exists() and not make_folder(folder):
        return []
    with closing(reopen(folder, None).connection) as index:
        states = (_summarise(model, index.list_blocks(model.id)) for model in index.models())
        return sorted((one for one in states if one.num_blocks), key=lambda one: -one.nbytes)


def _summarise(model: KeptModel, blocks: list[KeptBlock]) -> ModelState:
    return ModelState(
        model,
        len(blocks),
        len(blocks) * model.record.block_bytes,
        sum(block.hits for block in blocks),
        sum(block.hits * block.seconds for block in blocks),
        min((block.made for block in blocks), default=0.0),
        max((block.used for block in blocks), default=0.0),
    )


def read_prefixes(index: DiskIndex, model: int) -> list[KeptPrefix]:
    """A model's prefixes as trees, largest first; one whose beginning is lost begins later."""
    blocks = {block.name: block for block in index.list_blocks(model)}
    children: dict[BlockHash, list[KeptBlock]] = {}
    for block in blocks.values():
        children.setdefault(block.parent, []).append(block)
    roots = [block for block in blocks.values() if block.parent not in blocks]
    found = [KeptPrefix([root]) for root in roots]
    todo = list(found)
    while todo:
        prefix = todo.pop()
        following = children.get(prefix.stretch[-1].name, [])
        while len(following) == 1:
            prefix.stretch.append(following[0])
            following = children.get(following[0].name, [])
        prefix.then = [KeptPrefix([block]) for block in following]
        todo += prefix.then
    return _largest_first(found)


def _largest_first(prefixes: list[KeptPrefix]) -> list[KeptPrefix]:
    return sorted(prefixes, key=lambda prefix: -sum(1 for _ in prefix.all_blocks()))
