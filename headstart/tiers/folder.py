"""The folder of a disk store, for its owner alone: its index is opened, or rebuilt."""

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from headstart.cache import BlockHash
from headstart.errors import ConfigError
from headstart.tiers.files import SlotFile, open_file, read_file, replace_file
from headstart.tiers.index import DiskIndex, is_passing
from headstart.tiers.store import ModelRecord, RecordHeader, StoredBlock

INDEX = "index.sqlite"
_LOG = logging.getLogger("headstart.tiers")
_OURS = re.compile(r"index\.sqlite.*|lock|fingerprints\..*|[0-9a-f]{32}\..*")
_LARGEST = 1 << 40  # bytes of a block that a description may name
_PATIENCE = 5.0  # seconds to wait for another process that rebuilds the index


class OpenIndex(NamedTuple):
    """A connection, and the inode of its file."""

    connection: DiskIndex
    inode: int


def default_folder() -> Path:
    """Return the default folder, in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return caches / "headstart" / "prefixes"


def make_folder(folder: Path) -> bool:
    """Make a folder that its owner alone may enter; return True if it can be written.

    A folder with other files is refused, since its mode would change for them too. If other users
    could write the folder, its files are removed. Raises ConfigError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        names = os.listdir(folder)
        if names and not any(_OURS.fullmatch(name) for name in names):
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
            _LOG.warning("%s could be written by other users: it is emptied", folder)
            for path in folder.iterdir():
                if _OURS.fullmatch(path.name) and (path.is_symlink() or not path.is_dir()):
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cache folder {folder} cannot be used: {error.strerror}") from error
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"cache folder {folder} cannot be read")
    return is_writable


@lru_cache(maxsize=256)  # called for every model with every block that is saved
def slot_path(folder: Path, record: ModelRecord) -> Path:
    """Return the file of a model's blocks; its name covers all that its slots depend on."""
    key = f"{record.fingerprint} {record.block_size} {record.block_bytes}"
    return folder / f"{sha256(key.encode()).hexdigest()[:32]}.kv"


def slot_files(folder: Path) -> set[Path]:
    return {path for path in folder.glob("*.kv") if _OURS.fullmatch(path.name)}


def describe_model(folder: Path, record: ModelRecord) -> None:
    """Write a description of a model's file, for `rebuild_index`. Raises OSError."""
    path = slot_path(folder, record).with_suffix(".json")
    if _read_description(path) != record:
        replace_file(path, json.dumps(record._asdict()).encode())


def reopen(folder: Path, opened: OpenIndex | None) -> OpenIndex:
    """Return a connection to the current index; it only reads in a folder that is read-only.

    Raises sqlite3.Error, ValueError, ConfigError or OSError.
    """
    inode = _inode(folder)
    if opened is not None:
        if inode == opened.inode:
            return opened
        opened.connection.close()
    is_writable = make_folder(folder)
    if inode is None and is_writable:
        rebuild_index(folder, ())
    path = folder / INDEX
    index = DiskIndex(path, read_only=not is_writable)
    try:
        if is_writable:
            path.chmod(0o600)
        return OpenIndex(index, os.lstat(path).st_ino)
    except BaseException:
        index.close()
        raise


def rebuild_index(folder: Path, broken: Collection[int]) -> None:
    """Rebuild a damaged index from the records, one process at a time.

    broken: inodes of damaged indexes. Another process may have been faster: its index stays if it
    is sound. Raises sqlite3.Error or OSError.
    """
    with _locked(folder):
        if _inode(folder) not in (None, *broken):
            try:
                with closing(DiskIndex(folder / INDEX)) as index:
                    is_sound = index.is_sound()
            except Exception as error:  # any kind, from a damaged file
                is_sound = is_passing(error)
            if is_sound:
                return
        partial = folder / f"{INDEX}.tmp"
        partial.unlink(missing_ok=True)
        os.close(open_file(partial, os.O_RDWR, create=True))
        records = list(described_models(folder))
        for path in slot_files(folder) - {slot_path(folder, record) for record in records}:
            path.unlink(missing_ok=True)  # its blocks cannot be found, nor its size bounded
        with closing(DiskIndex(partial, create=True)) as index, index.changing():
            for record in records:
                if (path := slot_path(folder, record)).exists():
                    with closing(SlotFile(path, record.block_bytes)) as file:
                        _add_records(index, record, file)
        # In this order: a journal of the old index would be played back into the new one.
        for name in (INDEX, f"{INDEX}-journal"):
            (folder / name).unlink(missing_ok=True)
        partial.replace(folder / INDEX)


def _add_records(index: DiskIndex, record: ModelRecord, file: SlotFile) -> None:
    """List a model, and the records of its file that are whole by their headers, without gaps."""
    headers: dict[BlockHash, tuple[int, RecordHeader]] = {}
    for slot in range(file.num_slots):
        header = file.header(slot)
        if header is not None and header.length == record.block_bytes:
            headers[header.name] = slot, header
    whole = sorted(headers.values())
    gaps = sorted(set(range(len(whole))) - {slot for slot, _ in whole})
    for gap in gaps:  # the last one fills the first gap
        slot, header = whole.pop()
        file.move(slot, gap)
        whole.insert(0, (gap, header))
    file.cut(len(whole))
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
    """Yield the models whose descriptions can be read."""
    for path in sorted(folder.glob("*.json")):
        record = _read_description(path)
        if record is not None and slot_path(folder, record).stem == path.stem:
            yield record


def _read_description(path: Path) -> ModelRecord | None:
    try:
        return parse_description(read_file(path))
    except Exception:  # any kind, from a damaged file
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
    fits = record.block_size > 0 and 0 < record.block_bytes < _LARGEST
    return record if fits else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process that has it."""
    fd = open_file(folder / "lock", os.O_RDWR, create=True)
    until = time.monotonic() + _PATIENCE
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError("another process rebuilds the index, slowly") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)
