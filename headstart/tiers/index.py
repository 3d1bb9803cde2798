"""The index of a disk store, with each block's slot and worth; functions for the store's folder.

The index is an SQLite file with a rollback journal. Several processes may use it, and it stays
consistent if a process is killed. It is not synced to the disk, so a power loss may damage it. If a
query shows damage, the index is rebuilt from the records in the files of blocks.

The block with the least worth is evicted first, as in GreedyDual-Size (Cao and Irani, 1997). When a
block is saved or used, its worth is set to `clock + seconds to compute / bytes`. The clock is the
worth of the last evicted block. So a block stays if it was used recently, or if it takes long to
compute for its size. A block is never evicted before its children, the blocks that continue its
prefix.
"""

import fcntl
import json
import logging
import os
import re
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from headstart.cache import BlockHash
from headstart.errors import ConfigError
from headstart.tiers.files import SlotFile, is_accepted, open_file, read_file, replace_file
from headstart.tiers.store import ModelRecord, RecordHeader, StoredBlock

INDEX = "index.sqlite"
_LOG = logging.getLogger("headstart.tiers")
_STORE_FILES = re.compile(r"index\.sqlite.*|lock|fingerprints\..*|[0-9a-f]{32}\..*")
_MAX_BLOCK_BYTES = 1 << 40  # a description with larger blocks is damaged
_TIMEOUT = 5.0  # seconds to wait for a transaction or a rebuild of another process
_BATCH = 500  # names in a query
_MAX_SECONDS = 1e6  # seconds to compute a block; a longer time shows damage
_SAMPLE = 64  # blocks in the average of the time to compute a block
_FIRST = 8  # names in the first query of a lookup, which is the only query for most new prompts
_VERSION = 3  # version of the tables; written last, so an incomplete file has none
_MARK = _VERSION * 0x010101  # three copies, so that a flipped bit is not read as another version
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

# SQLite's errors that show no damage: the index is busy, the disk is full, and similar.
_TRANSIENT = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in (
        *("BUSY", "LOCKED", "NOMEM", "READONLY", "INTERRUPT"),
        *("IOERR", "FULL", "CANTOPEN", "PERM", "PROTOCOL"),
    )
)


def is_transient(error: BaseException) -> bool:
    """Return True if the error is SQLite's and shows no damage of the index."""
    return getattr(error, "sqlite_errorcode", -1) & 0xFF in _TRANSIENT


class IndexedModel(NamedTuple):
    """A model that has blocks in the store."""

    id: int
    record: ModelRecord


class IndexedBlock(NamedTuple):
    """A block in the store.

    seconds: the time to compute it. created, used: the times when it was saved and last used,
    in seconds since 1970. text: its text, in UTF-8.
    """

    name: BlockHash
    model: int
    slot: int
    parent: BlockHash
    depth: int
    seconds: float
    created: float
    used: float
    hits: int
    text: bytes


# The columns of an `IndexedBlock`. In a damaged index, `words` may be of type text.
_COLUMNS = "name, model, slot, parent, depth, seconds, made, used, hits, CAST(words AS BLOB)"


class DiskIndex:
    """A connection to the index, for one thread at a time.

    read_only: write nothing, not even a journal. Methods raise sqlite3.Error, and ValueError if the
    index contradicts itself.
    """

    def __init__(self, path: Path, *, create: bool = False, read_only: bool = False) -> None:
        # SQLite would follow a link. Do not open the file to check it: closing it again would
        # release this process's locks on it.
        for name in (path, path.with_name(f"{path.name}-journal")):
            with suppress(FileNotFoundError):
                if not is_accepted(os.lstat(name)):
                    raise ValueError(f"{name} is a link or belongs to another user")
        mode = "rwc" if create else "ro" if read_only else "rw"
        self._begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            timeout=_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        self._execute = self._connection.execute
        try:
            self.inode = os.lstat(path).st_ino
            if not read_only:
                path.chmod(0o600)
                self._execute(f"PRAGMA journal_mode = {'MEMORY' if create else 'TRUNCATE'}")
            self._execute("PRAGMA synchronous = OFF")
            self._execute("PRAGMA secure_delete = ON")  # removes the text of dropped blocks
            if create:
                self._connection.executescript(_SCHEMA)
                return
            [mark] = self._execute("PRAGMA user_version").fetchone()
            if _MARK < mark <= 0xFFFFFF and mark % 0x010101 == 0:  # not damaged: do not rebuild it
                raise ConfigError(
                    "a later version of headstart wrote the index; choose another folder"
                )
            if mark != _MARK:
                raise ValueError("it has no valid version number")
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def is_intact(self) -> bool:
        """Read the whole file; return True if SQLite finds no damage."""
        return bool(self._execute("PRAGMA integrity_check(1)").fetchone() == ("ok",))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a transaction. Other processes cannot change the index meanwhile."""
        try:
            self._execute(self._begin)
            yield
            self._execute("COMMIT")
        except BaseException:  # without ROLLBACK, a failed COMMIT would leave the index locked
            if self._connection.in_transaction:
                self._execute("ROLLBACK")
            raise

    # Models

    def models(self) -> list[IndexedModel]:
        rows = self._execute(
            "SELECT id, fingerprint, title, block_size, block_bytes FROM models ORDER BY id"
        )
        return [IndexedModel(row[0], ModelRecord(*row[1:])) for row in rows]

    def add_model(self, record: ModelRecord) -> int:
        """Add a model; return its id, which is derived from the time so that no id is reused."""
        row = self._execute(
            "INSERT INTO models (id, fingerprint, title, block_size, block_bytes) VALUES "
            "(max(?, (SELECT coalesce(max(id), 0) + 1 FROM models)), ?, ?, ?, ?) RETURNING id",
            (int(time.time()), *record),
        )
        return int(row.fetchone()[0])

    def forget_model(self, model: int) -> None:
        """Forget a model that has no blocks."""
        self._execute("DELETE FROM models WHERE id = ?", (model,))

    def count(self, model: int) -> int:
        """Return the number of a model's blocks, which occupy its slots from 0 on."""
        [last] = self._execute("SELECT max(slot) FROM blocks WHERE model = ?", (model,)).fetchone()
        if last is not None and last < 0:
            raise ValueError(f"the last block is in slot {last}")
        return 0 if last is None else int(last) + 1

    def block_seconds(self, model: int) -> float:
        """Return the average seconds to compute a block of a model; 0 if unknown."""
        row = self._execute(
            "SELECT avg(seconds) FROM (SELECT seconds FROM blocks WHERE model = ? "
            f"ORDER BY slot DESC LIMIT {_SAMPLE}) WHERE seconds > 0 AND seconds < {_MAX_SECONDS}",
            (model,),
        )
        return float(row.fetchone()[0] or 0)

    # Blocks

    def find(self, names: Sequence[BlockHash]) -> list[tuple[BlockHash, int]]:
        """Return the blocks before the first missing block, with their slots."""
        blocks: list[tuple[BlockHash, int]] = []
        for batch in (names[:_FIRST], *_cut(names[_FIRST:])):
            slots = self._slots(batch)
            for name in batch:
                if name not in slots:
                    return blocks
                blocks.append((name, slots[name]))
        return blocks

    def find_any(self, names: Sequence[BlockHash]) -> set[BlockHash]:
        """Return the subset of `names` that the index contains."""
        return {name for batch in _cut(names) for name in self._slots(batch)}

    def _slots(self, names: Sequence[BlockHash]) -> dict[BlockHash, int]:
        marks = ", ".join("?" * len(names))
        rows = self._execute(f"SELECT name, slot FROM blocks WHERE name IN ({marks})", names)
        slots = {BlockHash(name): slot for name, slot in rows}
        if not slots.keys() <= set(names):
            raise ValueError("it has a block under another block's hash")
        return slots

    def block(self, name: BlockHash) -> IndexedBlock | None:
        """Return a block's row; None if the index does not have the block.

        Raises ValueError if lookups by name and by slot find different rows. Removing such a block
        would free a slot that another block occupies.
        """
        row = self._execute(
            f"SELECT {_COLUMNS}, EXISTS (SELECT 1 FROM blocks AS there INDEXED BY slots WHERE "
            "there.model = block.model AND there.slot = block.slot AND there.name = block.name) "
            "FROM blocks AS block WHERE name = ?",
            (name,),
        ).fetchone()
        if row is None:
            return None
        *columns, is_in_slot = row
        block = IndexedBlock(*columns)
        if block.name != name or not is_in_slot or block.slot < 0:
            raise ValueError(f"it finds different blocks by name and by slot {block.slot}")
        return block

    def list_blocks(self, model: int) -> list[IndexedBlock]:
        rows = self._execute(
            f"SELECT {_COLUMNS} FROM blocks WHERE model = ? ORDER BY slot", (model,)
        )
        return [IndexedBlock(*row) for row in rows]

    def insert(self, model: int, slot: int, block: StoredBlock, worth: float) -> None:
        """Add a block; replace the block in the same slot, if any."""
        name, parent, depth, seconds, used, _, text = block
        text_bytes, now = text.encode(errors="replace"), time.time()
        self._execute("DELETE FROM blocks WHERE model = ? AND slot = ?", (model, slot))
        self._execute(
            "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (name, model, slot, parent, depth, seconds, worth, now, used, text_bytes),
        )
        if self.count(model) <= slot:
            raise ValueError("its count of blocks is too low")

    def move(self, model: int, source: int, target: int) -> None:
        """Move a block to the slot `target`; replace the block there, if any."""
        self._execute("DELETE FROM blocks WHERE model = ? AND slot = ?", (model, target))
        self._change_one(
            "UPDATE blocks SET slot = ? WHERE model = ? AND slot = ?", (target, model, source)
        )

    def drop_blocks(self, model: int) -> None:
        self._execute("DELETE FROM blocks WHERE model = ?", (model,))

    def remove(self, name: BlockHash) -> None:
        self._change_one("DELETE FROM blocks WHERE name = ?", (name,))

    def _change_one(self, statement: str, values: tuple[int | bytes, ...]) -> None:
        """Change one row. Raises ValueError if the row is missing: the index is damaged."""
        if self._execute(statement, values).rowcount != 1:
            raise ValueError("a block that it lists is missing")

    # Worth

    def worth(self, seconds: float, nbytes: int) -> float:
        """Return the worth of a block used now, from its seconds to compute and its size."""
        return self._clock() + seconds / max(nbytes, 1)

    def _clock(self) -> float:
        return float(self._execute("SELECT worth FROM clock").fetchone()[0])

    def victim(self, before: float) -> tuple[IndexedBlock, float] | None:
        """Return the block to evict next, and its worth; None if there is no candidate.

        A candidate has no children, because a lookup could not reach them without their parent. It
        was last used before the time `before`, or in the future if the clock was set back.
        """
        parents: list[tuple[int, BlockHash]] = []
        rows = self._execute(  # reads only columns of the index `order_of_eviction`
            "SELECT name, worth, depth, EXISTS "
            "(SELECT 1 FROM blocks AS next WHERE next.parent = block.name) AS has_children "
            "FROM blocks AS block WHERE has_children OR used < ? OR used > ? "
            "ORDER BY worth, used, depth DESC",
            (before, time.time()),
        )
        for name, worth, depth, has_children in rows:
            if has_children:
                parents.append((depth, name))
                continue
            rows.close()  # an open query would see the changes below
            self._place_behind(parents)
            block = self.block(name)
            if block is None:
                raise ValueError("the eviction order lists a missing block")
            return block, worth
        return None

    def _place_behind(self, parents: list[tuple[int, BlockHash]]) -> None:
        """Place `parents`, given as (depth, name), after their children in the eviction order.

        Otherwise each eviction would read the rows of all parents that precede its victim.
        """
        for _, name in sorted(parents, reverse=True):  # the deepest blocks first
            self._execute(
                "UPDATE blocks AS block SET (worth, used) = "
                "(SELECT max(block.worth, max(next.worth)), max(block.used, max(next.used)) "
                "FROM blocks AS next WHERE next.parent = block.name) WHERE name = ?",
                (name,),
            )

    def advance(self, worth: float) -> None:
        """Set the clock to the worth of an evicted block, but never back."""
        self._execute("UPDATE clock SET worth = max(worth, ?)", (worth,))

    def use(self, name: BlockHash, used: float) -> None:
        """Record that a block was used at this time, but do not change its worth."""
        self._execute("UPDATE blocks SET used = max(used, ?) WHERE name = ?", (used, name))

    def touch(self, names: Iterable[BlockHash], block_bytes: int) -> None:
        """Record that these blocks were used now."""
        clock, now = self._clock(), time.time()
        self._connection.executemany(
            "UPDATE blocks SET worth = ? + seconds / ?, used = ?, hits = hits + 1 WHERE name = ?",
            [(clock, max(block_bytes, 1), now, name) for name in names],
        )


def _cut(names: Sequence[BlockHash]) -> Iterator[Sequence[BlockHash]]:
    return (names[start : start + _BATCH] for start in range(0, len(names), _BATCH))


def default_folder() -> Path:
    """Return the default folder, in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return caches / "headstart" / "prefixes"


def make_folder(folder: Path) -> bool:
    """Make a folder that only its owner may enter; return True if it can be written.

    If other users could write an existing folder, its files are removed. Raises ConfigError if the
    folder cannot be used. A folder with only files of other programs is refused and not changed.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        names = os.listdir(folder)
        if names and not any(_STORE_FILES.fullmatch(name) for name in names):
            raise ConfigError(
                f"cache folder {folder} holds other files, such as {sorted(names)[0]}; allowed: "
                "a new folder, or an empty one"
            )
        if state.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"cache folder {folder} belongs to another user; allowed: a folder of this user"
            )
        is_writable = os.access(folder, os.W_OK | os.X_OK) and state.st_uid == os.geteuid()
        if state.st_mode & 0o022 and not is_writable:
            raise ConfigError(
                f"cache folder {folder} has mode {state.st_mode & 0o777:04o}; allowed: a folder "
                "that only its owner can write"
            )
        if state.st_mode & 0o077 and is_writable:
            folder.chmod(state.st_mode & 0o700)
        if state.st_mode & 0o022 and names:
            _LOG.warning("%s was writable by other users, so it is emptied", folder)
            for path in folder.iterdir():
                if _STORE_FILES.fullmatch(path.name) and (path.is_symlink() or not path.is_dir()):
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cache folder {folder} cannot be used: {error.strerror}") from error
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"cache folder {folder} cannot be read")
    return is_writable


@lru_cache(maxsize=256)  # called for each model whenever a block is saved
def slot_path(folder: Path, record: ModelRecord) -> Path:
    """Return the file of a model's blocks, named by a hash of the model and the block's size."""
    key = f"{record.fingerprint} {record.block_size} {record.block_bytes}"
    return folder / f"{sha256(key.encode()).hexdigest()[:32]}.kv"


def slot_files(folder: Path) -> set[Path]:
    """Return the files with the blocks of all models."""
    return {path for path in folder.glob("*.kv") if _STORE_FILES.fullmatch(path.name)}


def describe_model(folder: Path, record: ModelRecord) -> None:
    """Write the model's .json file, which `rebuild_index` reads. Raises OSError."""
    path = slot_path(folder, record).with_suffix(".json")
    if _read_description(path) != record:
        replace_file(path, json.dumps(record._asdict()).encode())


def reopen(folder: Path, index: DiskIndex | None) -> DiskIndex:
    """Return `index` if its file was not replaced; otherwise close it and open the current file.

    The connection is read-only if the folder is. Raises sqlite3.Error, ValueError, ConfigError or
    OSError.
    """
    inode = _inode(folder)
    if index is not None:
        if inode == index.inode:
            return index
        index.close()
    is_writable = make_folder(folder)
    if inode is None and is_writable:
        rebuild_index(folder, ())
    return DiskIndex(folder / INDEX, read_only=not is_writable)


def rebuild_index(folder: Path, broken: Collection[int]) -> None:
    """Rebuild a damaged index from the records, one process at a time.

    broken: inodes of damaged index files. An intact index that another process has rebuilt stays.
    Raises sqlite3.Error or OSError.
    """
    with _locked(folder):
        if _inode(folder) not in (None, *broken):
            try:
                with closing(DiskIndex(folder / INDEX)) as index:
                    is_intact = index.is_intact()
            except Exception as error:  # a damaged file raises exceptions of many types
                is_intact = is_transient(error)
            if is_intact:
                return
        partial = folder / f"{INDEX}.tmp"
        partial.unlink(missing_ok=True)
        os.close(open_file(partial, os.O_RDWR, create=True))
        records = list(described_models(folder))
        for path in slot_files(folder) - {slot_path(folder, record) for record in records}:
            path.unlink(missing_ok=True)  # records cannot be read without the .json file
        with closing(DiskIndex(partial, create=True)) as index, index.transaction():
            for record in records:
                if (path := slot_path(folder, record)).exists():
                    with closing(SlotFile(path, record.block_bytes)) as file:
                        _add_records(index, record, file)
        # First remove the old journal: SQLite would play it back into the new index.
        for name in (INDEX, f"{INDEX}-journal"):
            (folder / name).unlink(missing_ok=True)
        partial.replace(folder / INDEX)


def _add_records(index: DiskIndex, record: ModelRecord, file: SlotFile) -> None:
    """Add a model, and its records with an undamaged header; move records to close gaps."""
    headers: dict[BlockHash, tuple[int, RecordHeader]] = {}
    for slot in range(file.num_slots):
        header = file.header(slot)
        if header is not None and header.length == record.block_bytes:
            headers[header.name] = slot, header
    whole = sorted(headers.values())
    gaps = sorted(set(range(len(whole))) - {slot for slot, _ in whole})
    for gap in gaps:  # the last record fills the first gap
        slot, header = whole.pop()
        file.move(slot, gap)
        whole.insert(0, (gap, header))
    file.truncate(len(whole))
    if whole:
        model = index.add_model(record)
        for slot, (name, parent, depth, seconds, _, _) in whole:
            block = StoredBlock(name, parent, depth, seconds, 0.0, b"")
            index.insert(model, slot, block, index.worth(seconds, file.slot_bytes))


def _inode(folder: Path) -> int | None:
    try:
        return os.lstat(folder / INDEX).st_ino
    except FileNotFoundError:
        return None


def described_models(folder: Path) -> Iterator[ModelRecord]:
    """Yield the models that have a readable .json file."""
    for path in sorted(folder.glob("*.json")):
        record = _read_description(path)
        if record is not None and slot_path(folder, record).stem == path.stem:
            yield record


def _read_description(path: Path) -> ModelRecord | None:
    try:
        return parse_description(read_file(path))
    except Exception:  # a damaged file raises exceptions of many types
        return None


def parse_description(data: bytes) -> ModelRecord | None:
    """Return the model that JSON describes; None if it has no valid sizes.

    Raises ValueError, TypeError, KeyError, OverflowError or RecursionError.
    """
    fields = json.loads(data)
    record = ModelRecord(
        str(fields["fingerprint"]),
        str(fields["title"]),
        int(fields["block_size"]),
        int(fields["block_bytes"]),
    )
    fits = record.block_size > 0 and 0 < record.block_bytes < _MAX_BLOCK_BYTES
    return record if fits else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when the process ends."""
    fd = open_file(folder / "lock", os.O_RDWR, create=True)
    until = time.monotonic() + _TIMEOUT
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(
                        "another process takes too long to rebuild the index"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)
