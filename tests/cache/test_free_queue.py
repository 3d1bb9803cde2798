"""The queue of free blocks, compared with a plain list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.cache import FreeBlockQueue, KVCacheBlock
from headstart.errors import CacheError

SIZE = 6


def ids(queue: FreeBlockQueue) -> list[int]:
    forward = [block.block_id for block in queue]
    backward, block = [], queue._ends.prev_free_block
    while block is not queue._ends:
        backward.append(block.block_id)
        block = block.prev_free_block
    assert forward == backward[::-1]
    assert len(queue) == len(forward)
    return forward


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "appendleft", "extend", "remove", "remove_all", "popleft"]),
            st.lists(st.integers(0, SIZE - 1), max_size=4),
        )
    )
)
def test_it_behaves_like_a_list(operations: list[tuple[str, list[int]]]) -> None:
    blocks = [KVCacheBlock(at) for at in range(SIZE)]
    queue, model = FreeBlockQueue(blocks[:3]), [0, 1, 2]
    for verb, chosen in operations:
        if verb == "popleft":
            count = len(chosen)
            if count > len(model):
                with pytest.raises(
                    CacheError, match=f"{count} free blocks are needed; the free queue has"
                ):
                    queue.popleft(count)
            else:
                assert [b.block_id for b in queue.popleft(count)] == model[:count]
                del model[:count]
        elif verb.startswith("remove"):
            inside = [at for at in dict.fromkeys(chosen) if at in model]
            if verb == "remove":
                for at in inside:
                    queue.remove(blocks[at])
            else:
                queue.remove_all([blocks[at] for at in inside])
            model = [at for at in model if at not in inside]
        else:
            outside = [at for at in dict.fromkeys(chosen) if at not in model]
            if verb == "extend":
                queue.extend([blocks[at] for at in outside])
                model += outside
            for at in outside if verb == "append" else ():
                queue.append(blocks[at])
                model.append(at)
            for at in outside if verb == "appendleft" else ():
                queue.appendleft(blocks[at])
                model.insert(0, at)
        assert ids(queue) == model


@pytest.mark.parametrize("verb", ["append", "appendleft"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_double_free_is_an_error(verb: str, at: int) -> None:
    blocks = [KVCacheBlock(at) for at in range(3)]
    queue = FreeBlockQueue(blocks)
    with pytest.raises(CacheError, match=f"block {at} is already on the free queue"):
        getattr(queue, verb)(blocks[at])
    assert ids(queue) == [0, 1, 2]


def test_a_double_free_among_others_leaves_the_queue_intact() -> None:
    blocks = [KVCacheBlock(at) for at in range(4)]
    queue = FreeBlockQueue(blocks[:2])
    with pytest.raises(CacheError, match="block 1 is already on the free queue"):
        queue.extend([blocks[2], blocks[1], blocks[3]])
    assert ids(queue) == [0, 1, 2]


def test_removing_a_missing_block_is_an_error() -> None:
    blocks = [KVCacheBlock(at) for at in range(3)]
    queue = FreeBlockQueue(blocks[:2])
    with pytest.raises(CacheError, match="block 2 is not on the free queue"):
        queue.remove(blocks[2])
    with pytest.raises(CacheError, match="block 2 is not on the free queue"):
        queue.remove_all([blocks[0], blocks[2]])
    assert ids(queue) == [1]


def test_a_block_id_never_changes() -> None:
    block = KVCacheBlock(7)
    with pytest.raises(AttributeError):
        block.block_id = 8  # type: ignore[misc]
    assert (block.block_id, repr(block)) == (7, "KVCacheBlock(7, ref_cnt=0)")


def test_a_duplicate_block_is_an_error_and_the_queue_stays_intact() -> None:
    a, b, c = (KVCacheBlock(at) for at in range(3))
    queue = FreeBlockQueue([c])
    with pytest.raises(CacheError, match="block 0 is already on the free queue"):
        queue.extend([a, b, a])
    assert [*queue] == [c, a, b] and len(queue) == 3
