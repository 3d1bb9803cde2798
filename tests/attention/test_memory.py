"""The paged memory: its size, and copies of block heads."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstart.attention import LayerLayout, PagedKVMemory
from headstart.attention.memory import contiguous_runs

LAYOUTS = (LayerLayout(kv_heads=2, key_dim=3, value_dim=5), LayerLayout(1, 4, 4))
BLOCKS, SIZE = 5, 4
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def make_memory(dtype: torch.dtype = torch.float32) -> PagedKVMemory:
    return PagedKVMemory(LAYOUTS, BLOCKS, SIZE, dtype, "cpu")


def all_tensors(memory: PagedKVMemory) -> list[torch.Tensor]:
    return [*memory.keys, *memory.values, *memory.key_scales, *memory.value_scales]


def numbered(dtype: torch.dtype = torch.float32) -> PagedKVMemory:
    memory = make_memory(dtype)
    for tensor in all_tensors(memory):
        numbers = torch.arange(tensor.numel()) % 127 + 1
        tensor.copy_(numbers.view_as(tensor))
    return memory


def test_shapes_and_zeros() -> None:
    memory = make_memory()
    assert [tuple(k.shape) for k in memory.keys] == [(21, 2, 3), (21, 1, 4)]
    assert [tuple(v.shape) for v in memory.values] == [(21, 2, 5), (21, 1, 4)]
    assert memory.scratch_slot == 20
    assert all(not tensor.any() for tensor in (*memory.keys, *memory.values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_size_in_bytes_is_that_of_torch(dtype: torch.dtype) -> None:
    memory = make_memory(dtype)
    tensors = all_tensors(memory)
    assert memory.nbytes == sum(t.numel() * t.element_size() for t in tensors)
    per_block = PagedKVMemory.bytes_per_block(LAYOUTS, SIZE, dtype)
    assert memory.nbytes == per_block * BLOCKS + per_block // SIZE  # and the scratch rows


def test_write_goes_to_slots() -> None:
    memory = make_memory()
    key, value = torch.randn(2, 2, 3), torch.randn(2, 2, 5)
    memory.write(0, torch.tensor([7, memory.scratch_slot]), key, value)
    assert torch.equal(memory.keys[0][7], key[0])
    assert torch.equal(memory.values[0][20], value[1])
    assert int((memory.keys[0] != 0).any(-1).any(-1).sum()) == 2
    assert not memory.keys[1].any()


copies = st.lists(
    st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1), st.integers(0, SIZE)),
    max_size=BLOCKS,
    unique_by=lambda copy: copy[1],  # two copies into one block have no meaning
)


@pytest.mark.parametrize("dtype", DTYPES)
@given(orders=copies)
def test_copies_read_everything_before_they_write(
    dtype: torch.dtype, orders: list[tuple[int, int, int]]
) -> None:
    memory = numbered(dtype)
    before = [tensor.clone() for tensor in all_tensors(memory)]
    memory.copy_rows(orders)
    for old, new in zip(before, all_tensors(memory), strict=True):
        expected = old.clone()
        for source, target, rows in orders:
            start = source * SIZE
            expected[target * SIZE : target * SIZE + rows] = old[start : start + rows]
        assert torch.equal(new, expected)


WINDOWS = (replace(LAYOUTS[0], window=6), LAYOUTS[1], replace(LAYOUTS[1], window=9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_with_a_window_have_separate_blocks(dtype: torch.dtype) -> None:
    memory = PagedKVMemory(WINDOWS, BLOCKS, SIZE, dtype, "cpu", 2)
    assert memory.window == 9
    assert [len(keys) for keys in memory.keys] == [9, 21, 9]
    assert (memory.scratch_slot, memory.window_scratch_slot) == (20, 8)
    assert memory.nbytes == sum(t.numel() * t.element_size() for t in all_tensors(memory))
    for tensor in all_tensors(memory):
        tensor.copy_((torch.arange(tensor.numel()) % 127 + 1).view_as(tensor))
    before = [tensor.clone() for tensor in all_tensors(memory)]
    memory.copy_rows([(4, 0, 3, 1, 0), (2, 1, 2, -1, -1)])
    for old, new in zip(before, all_tensors(memory), strict=True):
        expected = old.clone()
        if len(old) == 21:
            expected[:3], expected[4:6] = old[16:19], old[8:10]
        else:
            expected[:3] = old[4:7]
        assert torch.equal(new, expected)
    with pytest.raises(AssertionError, match="no block has the K and V of all layers"):
        memory.read_blocks([0])


def test_without_window_blocks_all_layers_have_the_same() -> None:
    memory = PagedKVMemory(WINDOWS, BLOCKS, SIZE, torch.float32, "cpu")
    assert {len(keys) for keys in memory.keys} == {21}
    assert not any(map(memory.has_windows, range(3)))


@given(
    ids=st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1),
    to=st.permutations(range(BLOCKS)),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_read_and_written_as_bytes(
    dtype: torch.dtype, ids: list[int], to: list[int]
) -> None:
    """Block `ids[i]` of one memory becomes `to[i]` of another, and nothing else is written."""
    source, target = numbered(dtype), make_memory(dtype)
    rows = source.read_blocks(ids)
    assert rows.shape == (len(ids), source.block_bytes)
    target.write_blocks(to[: len(ids)], [row.numpy().data for row in rows])
    check_written(source, target, dict(zip(to, ids, strict=False)))


@given(
    ids=st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1),
    to=st.permutations(range(BLOCKS)),
    places=st.permutations(range(2 * BLOCKS)),
    several=st.booleans(),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_written_from_any_buffers(
    dtype: torch.dtype, ids: list[int], to: list[int], places: list[int], several: bool
) -> None:
    """Sources are one buffer, as in a file, in any order and with gaps, or several buffers."""
    source, target = numbered(dtype), make_memory(dtype)
    nbytes = source.block_bytes
    slot = nbytes + 3
    buffers = [bytearray(slot * len(places)) for _ in range(1 + several)]
    taken = [] if several else sorted(places[: len(ids)])
    for at, row in enumerate(source.read_blocks(ids)):
        place = places[at] if several else taken[at]
        buffer = buffers[at % len(buffers)]
        buffer[place * slot : place * slot + nbytes] = row.numpy().tobytes()
    blocks = [
        memoryview(buffers[at % len(buffers)])[place * slot : place * slot + nbytes]
        for at, place in enumerate(places[: len(ids)] if several else taken)
    ]
    target.write_blocks(to[: len(ids)], blocks)
    check_written(source, target, dict(zip(to, ids, strict=False)))


def test_a_run_of_blocks_is_written_at_once() -> None:
    source, target = numbered(), make_memory()
    data = memoryview(bytearray(source.read_blocks(range(BLOCKS)).numpy().tobytes()))
    blocks = [data[at * source.block_bytes :][: source.block_bytes] for at in range(BLOCKS)]
    runs = list(contiguous_runs([0, 1, 2, 4, 3], [blocks[at] for at in (0, 1, 2, 3, 4)]))
    assert [(block_id, len(rows)) for block_id, rows in runs] == [(0, 3), (4, 1), (3, 1)]
    target.write_blocks(range(BLOCKS), blocks)
    check_written(source, target, {at: at for at in range(BLOCKS)})


def check_written(source: PagedKVMemory, target: PagedKVMemory, written: dict[int, int]) -> None:
    """Check that block `written[i]` of one memory is `i` of the other, and no other is written."""
    for theirs, ours in zip(all_tensors(source), all_tensors(target), strict=True):
        for block_id in range(BLOCKS):
            copied = ours[block_id * SIZE : (block_id + 1) * SIZE]
            at = written.get(block_id)
            expected = (
                torch.zeros_like(copied) if at is None else theirs[at * SIZE : (at + 1) * SIZE]
            )
            assert torch.equal(copied, expected)
        assert not ours[-1].any(), "the scratch row belongs to no block"
