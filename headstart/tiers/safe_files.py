"""Files that are opened without following a link, as every file of a disk store is.

Someone who could write to the folder may have put a link in a file's place, so that the store
overwrites the link's target. A file is accepted only if it is a regular file with one name that
belongs to this user or to root. Whatever else has its name is removed before a file is written.
"""

import logging
import os
import stat
from pathlib import Path

__all__ = ["is_accepted", "open_file", "read_file", "replace_file"]

_LOG = logging.getLogger("headstart.tiers")
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_ATTEMPTS = 5  # to open a file that other processes remove and create meanwhile


def is_accepted(state: os.stat_result) -> bool:
    """True for a regular file with one name that belongs to this user or to root."""
    return stat.S_ISREG(state.st_mode) and state.st_nlink <= 1 and state.st_uid in (os.geteuid(), 0)


def open_file(path: Path, flags: int, *, create: bool = False) -> int:
    """Return a descriptor of a file that is accepted.

    create: create the file if it is missing. Anything else that has its name is removed; a link's
    target stays as it is. Raises OSError; FileNotFoundError if no such file is there.
    """
    for _ in range(_ATTEMPTS):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            if not create:
                raise
        else:
            if is_accepted(found):
                fd = os.open(path, flags | _FLAGS)
                if _is_same(fd, found):
                    return fd
                continue
            if not create:
                raise FileNotFoundError(f"{path} is a link or belongs to another user")
            _LOG.warning("%s is a link or belongs to another user: it is removed", path)
            path.unlink(missing_ok=True)
        try:
            return os.open(path, flags | _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
    raise OSError(f"{path} is replaced again and again")


def _is_same(fd: int, expected: os.stat_result) -> bool:
    """Return True if the descriptor is of this file; close it otherwise."""
    is_same = False
    try:
        is_same = os.path.samestat(os.fstat(fd), expected)
    finally:
        if not is_same:
            os.close(fd)
    return is_same


def read_file(path: Path) -> bytes:
    """Return the content of a file that is accepted. Raises OSError."""
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read()


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it. Raises OSError."""
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        partial.unlink(missing_ok=True)
        with open(open_file(partial, os.O_WRONLY, create=True), "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
