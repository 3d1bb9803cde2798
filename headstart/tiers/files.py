"""The files of a disk store, which hold a model's blocks in slots of equal size.

Another user with access to the folder may replace a file by a link, to make the store overwrite the
link's target. So only regular files with a single hard link that belong to this user or to root are
accepted. Before a write, anything else with the file's name is removed.
"""

import ctypes
import logging
import mmap
import os
import stat
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from threading import Thread

from headstart.cache import BlockHash
from headstart.tiers.store import (
    HEADER_BYTES,
    RecordHeader,
    StoredBlock,
    make_header,
    payload_of,
    read_header,
)

_LOG = logging.getLogger("headstart.tiers")
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_ATTEMPTS = 5  # attempts to open a file that other processes replace
_ALIGN = 512
_READ_BYTES = 2 << 20  # bytes that one call reads; they stay in the CPU's cache for the checksums
_NUM_BUFFERS = 8  # unused buffers of `_READ_BYTES` bytes that are retained


def is_accepted(state: os.stat_result) -> bool:
    """Return True for a regular file with one hard link that belongs to this user or to root."""
    return stat.S_ISREG(state.st_mode) and state.st_nlink <= 1 and state.st_uid in (os.geteuid(), 0)


def open_file(path: Path, flags: int, *, create: bool = False) -> int:
    """Return the descriptor of an accepted file.

    create: replace anything but an accepted file by a new file; a link's target is not changed.
    Raises OSError. Without `create`, raises FileNotFoundError if there is no accepted file.
    """
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):
            state = os.lstat(path)
            if is_accepted(state):
                fd = os.open(path, flags | _FLAGS)
                with ExitStack() as closing:
                    closing.callback(os.close, fd)
                    if os.path.samestat(os.fstat(fd), state):
                        closing.pop_all()
                        return fd
                continue
            if create:
                _LOG.warning("%s is a link or belongs to another user, so it is removed", path)
                path.unlink()
        if not create:
            raise FileNotFoundError(f"{path} is missing, or it is a link or another user's file")
        with suppress(FileExistsError):
            return os.open(path, flags | _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    raise OSError(f"{path} is replaced repeatedly")


def read_file(path: Path) -> bytes:
    """Return the content of an accepted file. Raises OSError."""
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


class ReadBuffers:
    """Buffers of one size. A buffer is reused when no view of it is left. Thread-safe.

    The system clears each page of new memory at its first use, which takes longer than reading a
    file from the page cache. max_unused: number of unused buffers to retain.
    """

    def __init__(self, nbytes: int, max_unused: int) -> None:
        self._nbytes = nbytes
        self._max_unused = max_unused
        self._free: deque[mmap.mmap] = deque(maxlen=max_unused)

    def fill(self) -> None:
        """Allocate all buffers and their pages in advance."""
        while len(self._free) < self._max_unused:
            memory = self._allocate()
            pages = (ctypes.c_char * self._nbytes).from_buffer(memory)
            ctypes.memset(pages, 0, self._nbytes)  # releases the GIL
            del pages
            self._free.append(memory)

    def take(self, nbytes: int) -> memoryview:
        """Return `nbytes` bytes of uninitialized memory."""
        # A small view would retain a large buffer.
        if not self._nbytes // 4 <= nbytes <= self._nbytes:
            return memoryview(bytearray(nbytes))
        try:
            memory = self._free.pop()
        except IndexError:
            memory = self._allocate()
        # When the last view of `array` is gone, `memory` returns to `_free`.
        array = (ctypes.c_char * self._nbytes).from_buffer(memory)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return memoryview(array).cast("B")[:nbytes]

    def _allocate(self) -> mmap.mmap:
        """Return new memory, in huge pages where the system has them."""
        memory = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory


_buffers = ReadBuffers(_READ_BYTES, _NUM_BUFFERS)


class SlotFile:
    """Records in slots. May be used by several threads and processes. Raises OSError.

    Another process may overwrite a slot during a read; then the name or a checksum of the record
    does not match. read_only: the file must exist, and is not written.
    """

    def __init__(self, path: Path, block_bytes: int, *, read_only: bool = False) -> None:
        self._fd = -1  # `__del__` needs it if a line below raises
        self.slot_bytes = slot_bytes(block_bytes)
        self._path = path
        self._fd = open_file(path, os.O_RDONLY if read_only else os.O_RDWR, create=not read_only)
        self._inode = os.fstat(self._fd).st_ino

    def __del__(self) -> None:
        self.close()  # a store does not close a replaced file: another thread may be reading it

    @property
    def is_in_place(self) -> bool:
        """False once the file was removed or replaced."""
        try:
            return os.lstat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def num_slots(self) -> int:
        """Number of slots in the file; the last slot may be incomplete."""
        return -(-os.fstat(self._fd).st_size // self.slot_bytes)

    @staticmethod
    def prepare_reading() -> None:
        """Allocate read buffers in a separate thread, so that the first load finds them ready."""
        with suppress(RuntimeError):  # the machine has no more threads
            Thread(target=_buffers.fill, name="headstart-buffers", daemon=True).start()

    def write(self, slot: int, block: StoredBlock) -> None:
        """Write a block's record. Raises OSError if the disk is full."""
        record = (make_header(block), block.payload)
        written = os.pwritev(self._fd, record, slot * self.slot_bytes)
        if written != HEADER_BYTES + memoryview(block.payload).nbytes:
            raise OSError(f"only {written:,} bytes of a block were written: the disk is full")

    def read(self, blocks: Sequence[tuple[BlockHash, int]]) -> Iterator[memoryview | None]:
        """Yield the payload of each (name, slot); None if the slot does not contain this block."""
        batch_size = max(1, _READ_BYTES // self.slot_bytes)
        for offset in range(0, len(blocks), batch_size):
            batch = blocks[offset : offset + batch_size]
            buffer = _buffers.take(len(batch) * self.slot_bytes)
            for first, stop in _runs([slot for _, slot in batch]):
                if not 0 <= batch[first][1] < self.num_slots:
                    yield from [None] * (stop - first)
                    continue
                target = buffer[first * self.slot_bytes : stop * self.slot_bytes]
                data = self._pread(batch[first][1], target)
                for index, (name, _) in enumerate(batch[first:stop]):
                    start = index * self.slot_bytes
                    yield payload_of(data[start : start + self.slot_bytes], name)

    def _pread(self, slot: int, target: memoryview) -> memoryview:
        """Read consecutive slots into `target`; return the part of `target` that was filled."""
        filled = 0
        while filled < len(target):
            read = os.preadv(self._fd, [target[filled:]], slot * self.slot_bytes + filled)
            if not read:
                break  # the end of the file, which another process may have truncated
            filled += read
        return target[:filled]

    def move(self, source: int, target: int) -> None:
        """Copy the record of one slot to another."""
        data = self._pread(source, memoryview(bytearray(self.slot_bytes)))
        if os.pwrite(self._fd, data, target * self.slot_bytes) != len(data):
            raise OSError("a block could not be moved: the disk is full")

    def truncate(self, slots: int) -> None:
        if os.fstat(self._fd).st_size > slots * self.slot_bytes:
            os.truncate(self._fd, slots * self.slot_bytes)

    def header(self, slot: int) -> RecordHeader | None:
        """Return the header of a slot; None if it is damaged or missing."""
        return read_header(os.pread(self._fd, HEADER_BYTES, slot * self.slot_bytes))

    def has_other_block(self, slot: int, name: BlockHash) -> bool:
        """Return True if the slot has the header of another block."""
        header = self.header(slot)
        return header is not None and header.name != name


def slot_bytes(block_bytes: int) -> int:
    """Return the bytes of a slot for blocks of `block_bytes` bytes."""
    return -(-(HEADER_BYTES + block_bytes) // _ALIGN) * _ALIGN


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of consecutive slots in the list."""
    first = 0
    for index, (left, right) in enumerate(pairwise(slots), start=1):
        if right != left + 1:
            yield first, index
            first = index
    if slots:
        yield first, len(slots)
