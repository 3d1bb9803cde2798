"""Memory that is prefaulted before its first use: which pages, and that their content stays."""

import ctypes
import mmap
import sys
import threading

import numpy as np
import pytest
import torch

from headstart.attention import LayerLayout, PagedKVMemory
from headstart.attention import memory as prefaulting
from headstart.native import pages

# 40 MB in each tensor: the system may use pages of 2 MB there, and above 32 MB malloc never hands
# out pages that an earlier test has touched.
BLOCKS, SIZE = 40_960, 16
BYTES = 2 * 2 * 8 * 4  # of a token: K and V, heads, width, float32


def make_memory(device: str = "cpu") -> PagedKVMemory:
    layouts = [LayerLayout(kv_heads=2, key_dim=8, value_dim=8)]
    return PagedKVMemory(layouts, BLOCKS, SIZE, torch.float32, device)


def has_call() -> bool:
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        try:
            memory.madvise(23)
        except OSError:
            return False
    return True


needs_call = pytest.mark.skipif(not has_call(), reason="needs MADV_POPULATE_WRITE (Linux 5.14)")


def resident(tensor: torch.Tensor) -> np.ndarray:
    """Return, for each page of the tensor, whether the system has allocated it."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * count)()
    arguments = ctypes.c_void_p(start), ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(*arguments, states) == 0
    return np.frombuffer(states, dtype=np.uint8) & 1 == 1


@needs_call
def test_the_first_blocks_have_their_pages_and_the_last_have_none() -> None:
    memory = make_memory()
    thread = memory.prefault(64)
    assert thread is not None
    thread.join()
    for tensor in (*memory.keys, *memory.values):
        assert resident(tensor[: 64 * SIZE]).all()
        assert not resident(tensor[BLOCKS * SIZE // 2 : BLOCKS * SIZE * 3 // 4]).any()


@needs_call
def test_no_more_is_prefaulted_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may hold more blocks than the pool has, or than one prompt needs."""
    monkeypatch.setattr("headstart.attention.memory._PREFAULTED", 64 * SIZE * BYTES)
    memory = make_memory()
    thread = memory.prefault(10 * BLOCKS)
    assert thread is not None
    thread.join()
    assert resident(memory.keys[0][: 64 * SIZE]).all()
    assert not resident(memory.keys[0][BLOCKS * SIZE // 2 : BLOCKS * SIZE * 3 // 4]).any()


def test_concurrent_writes_of_another_thread_stay() -> None:
    memory = make_memory()
    memory.keys[0][:SIZE] = 1.0
    thread = memory.prefault(BLOCKS)
    memory.values[0].fill_(2.0)
    if thread is not None:
        thread.join()
    assert (memory.keys[0][:SIZE] == 1.0).all()
    assert (memory.values[0] == 2.0).all()
    assert not memory.keys[0][SIZE:].any()


def test_memory_may_be_released_during_prefaulting() -> None:
    memory = make_memory()
    thread = memory.prefault(BLOCKS)
    memory.release()
    del memory
    if thread is not None:
        thread.join()


def test_nothing_is_prefaulted_without_blocks_or_on_another_device() -> None:
    assert make_memory().prefault(0) is None
    assert make_memory("meta").prefault(64) is None


def test_without_threads_or_the_call_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another system, a machine without threads, or an older kernel."""

    def no_threads(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        assert make_memory().prefault(64) is None
    with monkeypatch.context() as patch:
        patch.setattr(prefaulting.sys, "platform", "darwin")
        assert make_memory().prefault(64) is None
    with monkeypatch.context() as patch:
        patch.setattr(pages.ctypes, "CDLL", lambda name: _Library())
        thread = make_memory().prefault(64)
        assert thread is not None
        thread.join()


class _Library:
    """The C library of an older kernel, which refuses the advice."""

    class _Refuses:
        argtypes: tuple[type, ...] = ()

        def __call__(self, *arguments: object) -> int:
            return -1

    madvise = _Refuses()
