"""Weights in pages of 2 MiB do not change."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from headstart.machine import return_freed_memory
from headstart.native.pages import make_huge_pages
from headstart.weights.memory import move_to_huge_pages

HUGE = 1 << 21


def huge_bytes(start: int) -> int:
    """Return the bytes in huge pages of the mapping at this address."""
    size = 0
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in (range_ := line.split(maxsplit=1)[0]) and not range_.endswith(":"):
                first, last = (int(end, 16) for end in range_.split("-"))
                inside = first <= start < last
            elif inside and line.startswith("AnonHugePages:"):
                size = int(line.split()[1]) * 1024
    return size


@pytest.mark.skipif(sys.platform != "linux", reason="the advice is Linux's")
def test_memory_is_moved_as_far_as_whole_pages_go() -> None:
    """Nothing is lost without the advice (Linux before 6.1) or without such pages."""
    memory = mmap.mmap(-1, 6 * HUGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.copy_(torch.arange(len(tensor)) % 251)
    expected = tensor.clone()
    start = tensor.data_ptr()
    make_huge_pages(start + 1, 5 * HUGE)
    assert torch.equal(tensor, expected)
    assert huge_bytes(start) in {0, *(count * HUGE for count in range(1, 6))}
    for size in (0, HUGE - 1):
        make_huge_pages(start + 1, size)
    make_huge_pages(1 << 46, 2 * HUGE)  # not mapped: refused by the system
    assert torch.equal(tensor, expected)


def test_a_module_with_few_weights_gets_no_thread() -> None:
    assert move_to_huge_pages(nn.Linear(64, 64)) is None


def test_the_weights_of_a_module_do_not_change() -> None:
    layers = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048), nn.Linear(8, 2048))
    before = [tensor.detach().clone() for tensor in layers.parameters()]
    thread = move_to_huge_pages(layers)
    assert thread is not None
    thread.join()
    assert all(torch.equal(*pair) for pair in zip(layers.parameters(), before, strict=True))


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="only GNU's C library caches freed memory, and can return it",
)
def test_freed_memory_below_used_memory_is_returned() -> None:
    tensors = [torch.ones(1 << 16, dtype=torch.uint8) for _ in range(2000)]  # 131 MB of the heap
    del tensors[:-1]
    before = anonymous_kilobytes()
    assert return_freed_memory()
    assert before - anonymous_kilobytes() > 60_000


def anonymous_kilobytes() -> int:
    """Return this process's resident memory that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
