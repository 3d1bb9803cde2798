"""The index of a disk store: which block lies in which slot of which file, and what it is worth.

SQLite, with a journal file and no shared memory: several processes may use one index, a process
that is killed leaves it whole, and a damaged file is an exception and never a crash. It is not
synced to the disk. After a power loss it may be damaged, and is made anew from the records.

A block's worth is GreedyDual-Size (Cao and Irani, 1997): `clock + seconds to compute / bytes`,
where the clock is the worth of the last block that was evicted. So what was used lately stays, and
among models what is costly for its size stays longer. Of a prefix only the last block may go.
"""

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from headstart.cache import BlockHash
from headstart.errors import ConfigError
from headstart.tiers.safe_files import is_accepted
from headstart.tiers.store import ModelRecord, StoredBlock

__all__ = ["DiskIndex", "KeptBlock", "KeptModel", "is_passing"]

_PATIENCE = 5.0  # seconds to wait for another process's transaction
_AT_ONCE = 500  # names in a query
_LONGEST = 1e6  # seconds that computing a block may have taken
_SOME = 64  # blocks that tell what computing takes
_FIRST = 8  # of a lookup: most prompts that are new miss there
_VERSION = 3  # of the tables, written last: a file without it is no index
_MARK = _VERSION * 0x010101  # three times, so that no flipped bit makes another version of it
_SCHEMA = f"""
CREATE TABLE models (
    id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, title TEXT NOT NULL,
    block_size INTEGER NOT NULL, block_bytes INTEGER NOT NULL,
    UNIQUE (fingerprint, block_size, block_bytes));
CREATE TABLE blocks (
    name BLOB PRIMARY KEY, model INTEGER NOT NULL, slot INTEGER NOT NULL, parent BLOB NOT NULL,
    depth INTEGER NOT NULL, seconds REAL NOT NULL, worth REAL NOT NULL, made REAL NOT NULL,
    used REAL NOT NULL, hits INTEGER NOT NULL, words BLOB NOT NULL) WITHOUT ROWID;
CREATE UNIQUE INDEX slots ON blocks (model, slot);
CREATE INDEX parents ON blocks (parent);
CREATE INDEX order_of_eviction ON blocks (worth, used, depth DESC);
CREATE TABLE clock (one INTEGER PRIMARY KEY CHECK (one = 1), worth REAL NOT NULL);
INSERT INTO clock VALUES (1, 0);
PRAGMA user_version = {_MARK};
"""


# Errors that say nothing against the index: it is busy, the disk is full, and the like.
_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
    }
)


def is_passing(error: BaseException) -> bool:
    """True if an error of SQLite says nothing against the index itself."""
    return getattr(error, "sqlite_errorcode", -1) & 0xFF in _PASSING


class KeptModel(NamedTuple):
    """A model that has blocks in the store."""

    id: int
    record: ModelRecord


class KeptBlock(NamedTuple):
    """A block in the store. made and used: seconds since 1970. words: its text, in UTF-8."""

    name: BlockHash
    model: int
    slot: int
    parent: BlockHash
    depth: int
    seconds: float
    made: float
    used: float
    hits: int
    words: bytes


_COLUMNS = ", ".join(KeptBlock._fields[:-1]) + ", CAST(words AS BLOB)"  # if it is damaged, too


class DiskIndex:
    """One connection to the index; belongs to one thread at a time.

    Raises sqlite3.Error; ValueError where the index says what cannot be. read_only: nothing is
    written, not even a journal.
    """

    def __init__(self, path: Path, *, create: bool = False, read_only: bool = False) -> None:
        _require_accepted(path)
        _require_accepted(path.with_name(f"{path.name}-journal"))
        mode = "rwc" if create else "ro" if read_only else "rw"
        self._begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            timeout=_PATIENCE,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        try:
            if not read_only:
                journal = "MEMORY" if create else "TRUNCATE"
                self._connection.execute(f"PRAGMA journal_mode = {journal}")
            self._connection.execute("PRAGMA synchronous = OFF")
            self._connection.execute("PRAGMA secure_delete = ON")  # no words of what was dropped
            if create:
                self._connection.executescript(_SCHEMA)
            else:
                self._require_version()
        except BaseException:
            self._connection.close()
            raise

    def _require_version(self) -> None:
        """Raise ConfigError for a later version's index, which is left to it; ValueError for any
        other that is not ours."""
        [found] = self._connection.execute("PRAGMA user_version").fetchone()
        if found > _MARK and found % 0x010101 == 0 and found <= 0xFFFFFF:
            raise ConfigError(
                "its index is of a later version of headstart; allowed: another folder"
            )
        if found != _MARK:
            raise ValueError("these are not the tables of an index")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def is_sound(self) -> bool:
        """True if SQLite finds no damage; reads all of the file."""
        return bool(self._connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A transaction: all of it, or nothing. Other processes change nothing meanwhile."""
        try:
            self._connection.execute(self._begin)
            yield
            self._connection.execute("COMMIT")
        except BaseException:  # COMMIT too: one that fails would leave the index locked
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    # Models

    def models(self) -> list[KeptModel]:
        """All models, oldest first."""
        rows = self._connection.execute(
            "SELECT id, fingerprint, title, block_size, block_bytes FROM models ORDER BY id"
        )
        return [KeptModel(row[0], ModelRecord(*row[1:])) for row in rows]

    def add_model(self, record: ModelRecord) -> int:
        """The id of a new model: from the time, so that none gets one that was another's before."""
        row = self._connection.execute(
            "INSERT INTO models (id, fingerprint, title, block_size, block_bytes) VALUES "
            "(max(?, (SELECT coalesce(max(id), 0) + 1 FROM models)), ?, ?, ?, ?) RETURNING id",
            (int(time.time()), *record),
        )
        return int(row.fetchone()[0])

    def forget_model(self, model: int) -> None:
        """A model that has no blocks is known no more."""
        self._connection.execute("DELETE FROM models WHERE id = ?", (model,))

    # Blocks

    def count(self, model: int) -> int:
        """Number of blocks of a model; they lie in as many slots, from 0 on."""
        row = self._connection.execute("SELECT max(slot) FROM blocks WHERE model = ?", (model,))
        last = row.fetchone()[0]
        if last is not None and last < 0:
            raise ValueError(f"the last block lies in slot {last}")
        return 0 if last is None else int(last) + 1

    def block_seconds(self, model: int) -> float:
        """Seconds that computing a block of a model took, of some; 0 if none of them tells."""
        row = self._connection.execute(
            "SELECT avg(seconds) FROM (SELECT seconds FROM blocks WHERE model = ? "
            f"ORDER BY slot DESC LIMIT {_SOME}) WHERE seconds > 0 AND seconds < {_LONGEST}",
            (model,),
        )
        return float(row.fetchone()[0] or 0)

    def find(self, names: Sequence[BlockHash]) -> list[tuple[BlockHash, int]]:
        """The blocks from the first on, with their slots, up to one that is missing."""
        known: list[tuple[BlockHash, int]] = []
        for some in (names[:_FIRST], *_cut(names[_FIRST:])):
            slots = self._slots(some)
            for name in some:
                if name not in slots:
                    return known
                known.append((name, slots[name]))
        return known

    def known(self, names: Sequence[BlockHash]) -> set[BlockHash]:
        """Those of the names that are there."""
        return {name for some in _cut(names) for name in self._slots(some)}

    def _slots(self, names: Sequence[BlockHash]) -> dict[BlockHash, int]:
        marks = ", ".join("?" * len(names))
        rows = self._connection.execute(
            f"SELECT name, slot FROM blocks WHERE name IN ({marks})", names
        )
        slots = {BlockHash(name): slot for name, slot in rows}
        if not slots.keys() <= set(names):
            raise ValueError("it finds a block under another's name")
        return slots

    def block(self, name: BlockHash) -> KeptBlock | None:
        """A block's row; None if there is none.

        In a damaged index it may be found in one slot by its name, and in another by slots. Were it
        taken out then, the last block of the file would be moved to where another one lies.
        """
        row = self._connection.execute(
            f"SELECT {_COLUMNS}, EXISTS (SELECT 1 FROM blocks AS there INDEXED BY slots WHERE "
            "there.model = block.model AND there.slot = block.slot AND there.name = block.name) "
            "FROM blocks AS block WHERE name = ?",
            (name,),
        ).fetchone()
        if row is None:
            return None
        if row[0] != name:
            raise ValueError("it finds a block under another's name")
        if not row[-1]:
            raise ValueError("it finds a block by its name that its slot does not have")
        return _kept(row[:-1])

    def list_blocks(self, model: int) -> list[KeptBlock]:
        """All blocks of a model, by slot."""
        rows = self._connection.execute(
            f"SELECT {_COLUMNS} FROM blocks WHERE model = ? ORDER BY slot", (model,)
        )
        return [KeptBlock(*row) for row in rows]

    def insert(self, model: int, slot: int, block: StoredBlock, worth: float) -> None:
        """A block lies in this slot from now on, instead of what was there."""
        name, parent, depth, seconds, used, _, text = block
        words, now = text.encode(errors="replace"), time.time()
        self._connection.execute("DELETE FROM blocks WHERE model = ? AND slot = ?", (model, slot))
        self._connection.execute(
            "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (name, model, slot, parent, depth, seconds, worth, now, used, words),
        )
        if self.count(model) <= slot:
            raise ValueError("it counts less blocks than there are")

    def move(self, model: int, source: int, target: int) -> None:
        """The block in one slot lies in another now, instead of what was there."""
        self._connection.execute("DELETE FROM blocks WHERE model = ? AND slot = ?", (model, target))
        self._change_one(
            "UPDATE blocks SET slot = ? WHERE model = ? AND slot = ?", (target, model, source)
        )

    def drop_blocks(self, model: int) -> None:
        """Forget all blocks of a model."""
        self._connection.execute("DELETE FROM blocks WHERE model = ?", (model,))

    def remove(self, name: BlockHash) -> None:
        """Forget a block that is there."""
        self._change_one("DELETE FROM blocks WHERE name = ?", (name,))

    def _change_one(self, statement: str, values: tuple[int | bytes, ...]) -> None:
        """Change one row. In a damaged index a row may be found one way, and not another."""
        if self._connection.execute(statement, values).rowcount != 1:
            raise ValueError("a block that it tells of is not there")

    # Worth

    def worth(self, seconds: float, nbytes: int) -> float:
        """The worth of a block that is used now, from its seconds to compute and its size."""
        return self._clock() + seconds / max(nbytes, 1)

    def _clock(self) -> float:
        return float(self._connection.execute("SELECT worth FROM clock").fetchone()[0])

    def victim(self, before: float) -> tuple[KeptBlock, float] | None:
        """Which block goes first of those that were last used before a time; and its worth.

        One that others continue stays, since without it they cannot be found. A block that was
        used in the future was used before the clock was set back.
        """
        continued: list[tuple[int, BlockHash]] = []
        rows = self._connection.execute(  # of columns that the order of eviction has by itself
            "SELECT name, worth, depth, EXISTS "
            "(SELECT 1 FROM blocks AS next WHERE next.parent = block.name) AS is_continued "
            "FROM blocks AS block WHERE is_continued OR used < ? OR used > ? "
            "ORDER BY worth, used, depth DESC",
            (before, time.time()),
        )
        for name, worth, depth, is_continued in rows:
            if is_continued:
                continued.append((depth, name))
                continue
            rows.close()  # it would see what is changed now
            self._place_behind(continued)
            block = self.block(name)
            if block is None:
                raise ValueError("the order of eviction tells of a block that is not there")
            return block, worth
        return None

    def _place_behind(self, continued: list[tuple[int, BlockHash]]) -> None:
        """Have blocks, with their depths, go right after those that continue them.

        They stay until then. Where they were worth less, each eviction would pass all of them.
        """
        for _, name in sorted(continued, reverse=True):  # the end of a prompt first
            self._connection.execute(
                "UPDATE blocks AS block SET (worth, used) = "
                "(SELECT max(block.worth, max(next.worth)), max(block.used, max(next.used)) "
                "FROM blocks AS next WHERE next.parent = block.name) WHERE name = ?",
                (name,),
            )

    def advance(self, worth: float) -> None:
        """A block of this worth was evicted."""
        self._connection.execute("UPDATE clock SET worth = max(worth, ?)", (worth,))

    def use(self, name: BlockHash, used: float) -> None:
        """A block was used at this time, or later; its worth stays."""
        self._connection.execute(
            "UPDATE blocks SET used = max(used, ?) WHERE name = ?", (used, name)
        )

    def touch(self, names: Iterable[BlockHash], block_bytes: int) -> None:
        """These blocks were used now."""
        clock, now = self._clock(), time.time()
        self._connection.executemany(
            "UPDATE blocks SET worth = ? + seconds / ?, used = ?, hits = hits + 1 WHERE name = ?",
            [(clock, max(block_bytes, 1), now, name) for name in names],
        )


def _require_accepted(path: Path) -> None:
    """Raise ValueError for a link or another user's file, which SQLite would follow and write.

    The file is not opened: closing a second descriptor would end this process's locks on it.
    """
    with suppress(FileNotFoundError):
        if not is_accepted(os.lstat(path)):
            raise ValueError(f"{path} is a link or belongs to another user")


def _kept(row: Sequence[Any]) -> KeptBlock:
    block = KeptBlock(*row)
    if block.slot < 0:
        raise ValueError(f"a block lies in slot {block.slot}")
    return block


def _cut(names: Sequence[BlockHash]) -> Iterator[Sequence[BlockHash]]:
    for at in range(0, len(names), _AT_ONCE):
        yield names[at : at + _AT_ONCE]
