"""The files of a disk store: one for each model, with its blocks in slots of one size."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from headstart.cache import BlockHash
from headstart.tiers.buffers import ReadBuffers
from headstart.tiers.records import HEADER_BYTES, RecordHeader, make_header, payload_of, read_header
from headstart.tiers.safe_files import open_file
from headstart.tiers.store import StoredBlock

__all__ = ["SlotFile", "slot_bytes"]

_ALIGN = 512
_AT_ONCE = 2 << 20  # bytes that one call reads; checked while they are in the CPU's cache
_KEPT = 8  # buffers of so many bytes that wait for the next read

_buffers = ReadBuffers(_AT_ONCE, _KEPT)


class SlotFile:
    """Records in slots. May be used by several threads and processes. Raises OSError.

    Somebody else may overwrite a slot that is read: a record says whose it is, and that it is
    whole. read_only: the file must exist, and is not written.
    """

    def __init__(self, path: Path, block_bytes: int, *, read_only: bool = False) -> None:
        self._fd = -1  # first, for `__del__`: a damaged index may tell no number of bytes
        self.slot_bytes = slot_bytes(block_bytes)
        self._path = path
        self._fd = open_file(path, os.O_RDONLY if read_only else os.O_RDWR, create=not read_only)
        self._inode = os.fstat(self._fd).st_ino

    def __del__(self) -> None:
        self.close()  # no sooner: another thread may be reading it

    @property
    def is_in_place(self) -> bool:
        """False once the file was removed, or another has its name."""
        try:
            return os.lstat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def num_slots(self) -> int:
        """Number of slots in the file; the last may not be filled up."""
        return -(-os.fstat(self._fd).st_size // self.slot_bytes)

    @staticmethod
    def prepare_reading() -> None:
        """Get the memory for reading ready, so that the first blocks come as soon as others."""
        _buffers.fill()

    def write(self, slot: int, block: StoredBlock) -> None:
        """Write a block's record. Raises OSError if the disk is full."""
        record = (make_header(block), block.payload)
        written = os.pwritev(self._fd, record, slot * self.slot_bytes)
        if written != HEADER_BYTES + memoryview(block.payload).nbytes:
            raise OSError(f"only {written:,} bytes of a block were written: the disk is full")

    def read(self, blocks: Sequence[tuple[BlockHash, int]]) -> Iterator[memoryview | None]:
        """The payloads of these (name, slot), in order; None for one that is not whole."""
        most = max(1, _AT_ONCE // self.slot_bytes)
        for at in range(0, len(blocks), most):
            some = blocks[at : at + most]
            buffer = _buffers.take(len(some) * self.slot_bytes)
            for first, last in _runs([slot for _, slot in some]):
                if not 0 <= some[first][1] < self.num_slots:
                    yield from [None] * (last - first)
                    continue
                place = buffer[first * self.slot_bytes : last * self.slot_bytes]
                data = self._pread(some[first][1], place)
                for number, (name, _) in enumerate(some[first:last]):
                    start = number * self.slot_bytes
                    yield payload_of(data[start : start + self.slot_bytes], name)

    def _pread(self, slot: int, place: memoryview) -> memoryview:
        """Read slots from this one on; the part of the place that the file had bytes for."""
        at = 0
        while at < len(place):
            read = os.preadv(self._fd, [place[at:]], slot * self.slot_bytes + at)
            if not read:
                break  # the file's last record is not filled up, or the file was cut
            at += read
        return place[:at]

    def move(self, source: int, target: int) -> None:
        """Copy the record of one slot to another."""
        data = self._pread(source, memoryview(bytearray(self.slot_bytes)))
        if os.pwrite(self._fd, data, target * self.slot_bytes) != len(data):
            raise OSError("a block could not be moved: the disk is full")

    def cut(self, slots: int) -> None:
        """Give back what comes after the first slots."""
        if os.fstat(self._fd).st_size > slots * self.slot_bytes:
            os.truncate(self._fd, slots * self.slot_bytes)

    def headers(self) -> Iterator[tuple[int, RecordHeader]]:
        """The slots that begin with a header that is whole; payloads are not read."""
        for slot in range(self.num_slots):
            header = self.header(slot)
            if header is not None:
                yield slot, header

    def holds_another(self, slot: int, name: BlockHash) -> bool:
        """Return True if a slot was overwritten with another block than this, at least in part."""
        header = self.header(slot)
        return header is not None and header.name != name

    def header(self, slot: int) -> RecordHeader | None:
        """The header that a slot begins with; None if it is damaged, or none."""
        return read_header(os.pread(self._fd, HEADER_BYTES, slot * self.slot_bytes))


def slot_bytes(block_bytes: int) -> int:
    """Bytes of a slot for a block of so many."""
    return -(-(HEADER_BYTES + block_bytes) // _ALIGN) * _ALIGN


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of the list whose slots follow one another in the file."""
    first = 0
    for at, (left, right) in enumerate(pairwise(slots), start=1):
        if right != left + 1:
            yield first, at
            first = at
    if slots:
        yield first, len(slots)
