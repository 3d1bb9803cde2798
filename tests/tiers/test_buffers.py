"""Buffers that are reused for reading, never while a view of them exists."""

import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.tiers.files import ReadBuffers
from tests.tiers.stores import blocks, disk

SIZE = 1 << 13


def unused(buffers: ReadBuffers) -> set[object]:
    """Return the buffers that wait for the next read."""
    return set(buffers._free)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def test_a_buffer_is_reused_once_no_view_of_it_exists() -> None:
    buffers = ReadBuffers(SIZE, max_unused=4)
    first = buffers.take(SIZE)
    place, part = address(first), first[100:200]
    part[:] = b"x" * 100
    del first
    other = buffers.take(SIZE)
    assert address(other) != place, "a part of it is in use"
    other[:] = b"y" * SIZE
    assert bytes(part) == b"x" * 100
    del part
    assert address(buffers.take(SIZE)) == place


def test_prepared_buffers_are_used_first() -> None:
    """Their pages are allocated before the first request of a new process looks up its prefix."""
    buffers = ReadBuffers(SIZE, max_unused=3)
    for _ in range(2):
        buffers.fill()
    ready = unused(buffers)
    assert len(ready) == 3
    views = [buffers.take(SIZE) for _ in range(4)]
    assert not unused(buffers)
    del views
    assert len(unused(buffers)) == 3 and ready & unused(buffers)


def test_much_larger_or_smaller_blocks_get_separate_memory() -> None:
    """A block of 16 KB that waits to be taken does not hold 2 MB."""
    buffers = ReadBuffers(SIZE, max_unused=4)
    for nbytes in (SIZE + 1, SIZE // 4 - 1):
        view = buffers.take(nbytes)
        assert len(view) == memoryview(view.obj).nbytes == nbytes


@given(orders=st.lists(st.integers(0, 5), max_size=30))
def test_views_in_use_never_share_bytes(orders: list[int]) -> None:
    """Order 0 takes a buffer; another order releases the view of that number."""
    buffers = ReadBuffers(SIZE, max_unused=2)
    views: list[tuple[int, memoryview]] = []
    for number, order in enumerate(orders):
        if order and order <= len(views):
            views.pop(order - 1)
        else:
            view = buffers.take(SIZE)[order : SIZE - order]
            view[:] = bytes([number]) * len(view)
            views.append((number, view))
        for mark, view in views:
            assert set(view) == {mark}


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_store_with_blocks_prepares_its_buffers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_empty: bool
) -> None:
    with closing(disk(tmp_path)) as store:
        store.save(blocks(range(0 if is_empty else 3)))
    buffers = ReadBuffers(SIZE, max_unused=2)
    monkeypatch.setattr("headstart.tiers.files._buffers", buffers)
    with closing(disk(tmp_path)):
        for thread in threading.enumerate():
            if thread.name == "headstart-buffers":
                thread.join()
        assert len(unused(buffers)) == (0 if is_empty else 2)
