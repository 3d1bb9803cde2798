"""The store of stage outputs is exact, bounded, and safe for late readers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart.cache import BlockKey, MultiModalItem, Namespace, TokenSequence
from headstart.errors import ConfigError
from headstart.omni.output_cache import (
    ENTRY_BYTES,
    NODE_BYTES,
    BlockPath,
    ContentCache,
    OutputCache,
)

HERE = Namespace(None, None)


def path(*keys: bytes, stage: str = "thinker", namespace: Namespace = HERE) -> BlockPath:
    return BlockPath(stage, namespace, [BlockKey(key) for key in keys])


def rows(value: float, width: int = 2) -> Tensor:
    return torch.full((4, width), float(value))


ONE = rows(1).nbytes + ENTRY_BYTES + NODE_BYTES + 1
"""Bytes of such rows at the end of a path of keys of one letter."""
STAGE = NODE_BYTES + len("thinker")
"""Bytes of a stage, once for each namespace."""


def test_rows_are_returned_bit_for_bit_with_dtype_and_shape() -> None:
    cache = OutputCache(1 << 20)
    stored = {
        "hidden": torch.randn(4, 2, dtype=torch.bfloat16),
        "codes": torch.randint(0, 9, (4, 3, 2), dtype=torch.int16),
        "ids": torch.arange(4),
    }
    cache.put(path(b"a"), 0, stored)
    [rows_] = cache.find(path(b"a"))
    assert rows_.keys() == stored.keys()
    for name, tensor in stored.items():
        assert rows_[name].dtype is tensor.dtype
        assert torch.equal(rows_[name], tensor)


def test_a_view_is_copied_and_later_writes_do_not_reach_it() -> None:
    cache = OutputCache(1 << 20)
    step = torch.arange(24.0).view(12, 2)
    cache.put(path(b"a", b"b"), 1, {"hidden": step[4:8]})
    cache.put(path(b"a", b"b"), 0, {"hidden": step[0:4]})
    wanted = step[:8].clone()
    step.zero_()
    blocks = cache.find(path(b"a", b"b"))
    assert torch.equal(torch.cat([block["hidden"] for block in blocks]), wanted)
    cache.check()


def test_a_lookup_ends_at_the_first_missing_block() -> None:
    cache = OutputCache(1 << 20)
    for index in (0, 2):
        cache.put(path(b"a", b"b", b"c"), index, {"hidden": rows(index)})
    assert len(cache.find(path(b"a", b"b", b"c"))) == 1
    assert len(cache.find(path(b"a", b"b", b"c"), start=2)) == 1
    assert cache.find(path(b"a", b"b", b"c"), start=1) == []


def test_a_block_without_a_required_output_is_a_miss() -> None:
    cache = OutputCache(1 << 20)
    both = {"hidden", "mm_feature"}
    cache.put(path(b"a"), 0, {"hidden": rows(1)}, required=both)
    assert cache.find(path(b"a")) == []
    cache.put(path(b"a"), 0, {"mm_feature": rows(2, 16)}, required=both)
    assert cache.find(path(b"a"))[0].keys() == {"hidden", "mm_feature"}


def test_an_existing_entry_is_not_overwritten() -> None:
    cache = OutputCache(1 << 20)
    cache.put(path(b"a"), 0, {"hidden": rows(1)})
    cache.put(path(b"a"), 0, {"hidden": rows(2)})
    assert torch.equal(cache.find(path(b"a"))[0]["hidden"], rows(1))
    assert cache.stats.written == 1


@pytest.mark.parametrize(
    "other",
    [
        path(b"b"),
        path(b"a", stage="talker"),
        path(b"a", namespace=Namespace("voice", None)),
        path(b"a", namespace=Namespace(None, "tenant")),
        path(b"b", b"a"),
    ],
)
def test_another_prefix_stage_adapter_or_salt_finds_nothing(other: BlockPath) -> None:
    cache = OutputCache(1 << 20)
    cache.put(path(b"a"), 0, {"hidden": rows(1)})
    assert cache.find(other) == []


def test_an_image_of_the_same_shape_is_another_prefix() -> None:
    cache = OutputCache(1 << 20)
    first, second = (
        TokenSequence("r", [7] * 8, items=[MultiModalItem(digest, 0, 6)])
        for digest in (b"cat", b"dog")
    )
    cache.put(BlockPath("thinker", first.namespace, first.cut(4)), 0, {"hidden": rows(1)})
    assert len(cache.find(BlockPath("thinker", first.namespace, first.cut(4)))) == 1
    assert cache.find(BlockPath("thinker", second.namespace, second.cut(4))) == []


def test_a_late_reader_keeps_its_rows_after_eviction() -> None:
    cache = OutputCache(STAGE + ONE)
    cache.put(path(b"a"), 0, {"hidden": rows(1)})
    reader = cache.find(path(b"a"))
    cache.put(path(b"b"), 0, {"hidden": rows(2)})
    assert cache.find(path(b"a")) == [] and cache.stats.evicted == 1
    assert torch.equal(reader[0]["hidden"], rows(1))


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    cache = OutputCache(STAGE + 4 * ONE)
    for index in range(2):
        cache.put(path(b"a", b"b"), index, {"hidden": rows(index)})
    cache.put(path(b"x"), 0, {"hidden": rows(9)})
    cache.touch(path(b"a", b"b"))
    cache.put(path(b"y"), 0, {"hidden": rows(8)})
    cache.put(path(b"z"), 0, {"hidden": rows(7)})
    assert cache.find(path(b"x")) == []
    assert len(cache.find(path(b"a", b"b"))) == 2
    cache.put(path(b"w"), 0, {"hidden": rows(6)})
    assert len(cache.find(path(b"a", b"b"))) == 1
    cache.check()


def test_a_prefix_that_does_not_fit_keeps_its_head() -> None:
    """Regression: it evicted its own head, so the stored rows could not be hit."""
    keys = [b"%d" % i for i in range(9)]
    for order in (range(9), reversed(range(9))):
        cache = OutputCache(STAGE + 4 * ONE)
        cache.put(path(b"x", b"y"), 1, {"hidden": rows(1)})
        for index in order:
            cache.put(path(*keys), index, {"hidden": rows(index)})
            cache.check()
        assert cache.find(path(b"x", b"y"), 1) == [], "others go first"
        assert [block["hidden"][0, 0] for block in cache.find(path(*keys))] == [0, 1, 2, 3]
        assert cache.stats.entries == 4


def test_a_block_stores_the_outputs_that_fit() -> None:
    cache = OutputCache(STAGE + ONE + ENTRY_BYTES)
    cache.put(path(b"a"), 0, {"hidden": rows(1), "wide": rows(2, 100)}, required={"hidden"})
    assert cache.find(path(b"a"))[0].keys() == {"hidden"}
    assert (cache.stats.refused, cache.stats.evicted) == (1, 0)


def test_identities_without_rows_count_toward_the_bound() -> None:
    """Regression: they were not counted, and one entry could keep any number of them."""
    deep = path(*[b"%d" % i for i in range(1000)])
    cache = OutputCache(STAGE + 5 * ONE)
    cache.put(path(b"a"), 0, {"hidden": rows(1)})
    cache.put(deep, 999, {"hidden": rows(1)})
    cache.check()
    assert cache.find(deep, 999) == [] and cache.stats.refused == 1
    assert len(cache.find(path(b"a"))) == 1, "nothing goes for what cannot be kept"
    cache.put(deep, 3, {"hidden": rows(1)})
    cache.check()
    for index in range(3):
        cache.put(path(b"b%d" % index), 0, {"hidden": rows(1)})
        cache.check()
    assert cache.find(path(b"a")) == [], "five entries fit, and three blocks without rows do not"
    assert len(cache.find(deep, 3)) == 1


def test_rows_too_large_for_the_store_are_a_miss() -> None:
    cache = OutputCache(STAGE + ONE + 10)
    cache.put(path(b"a"), 0, {"hidden": rows(1), "wide": rows(1, 100)})
    assert cache.find(path(b"a")) == []
    assert cache.stats.refused == 1
    cache.check()


def test_an_output_of_one_stage_can_be_dropped() -> None:
    cache = OutputCache(1 << 20)
    for stage in ("thinker", "talker"):
        cache.put(path(b"a", stage=stage), 0, {"hidden": rows(1), "odd": rows(2)})
    cache.drop("thinker", "odd")
    assert [set(block) for block in cache.find(path(b"a"))] == [{"hidden"}]
    assert len(cache.find(path(b"a", stage="talker"))) == 1
    cache.check()


def test_a_cleared_store_holds_nothing() -> None:
    cache = OutputCache(1 << 20)
    cache.put(path(b"a"), 0, {"hidden": rows(1)})
    cache.clear()
    assert cache.find(path(b"a")) == [] and cache.stats.bytes == cache.stats.entries == 0
    cache.check()


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        OutputCache(-1)


KEYS = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=5)
PUT = st.tuples(st.just("put"), KEYS, st.sampled_from(["one", "two"]), st.integers(1, 40))
ASK = st.tuples(st.sampled_from(["find", "touch"]), KEYS, st.sampled_from(["one", "two"]))


def content(stage: str, keys: list[bytes], name: str, width: int) -> Tensor:
    """Return rows that identify their prompt."""
    return torch.full((4, width), float(hash((stage, tuple(keys), name)) % 65521))


@given(st.integers(0, 4000), st.lists(PUT | ASK, max_size=40), st.integers(1, 40))
def test_the_bound_holds_and_rows_are_correct_under_any_load(
    bound: int, load: list[tuple[str, list[bytes], str, int]], width: int
) -> None:
    cache = OutputCache(bound + 2 * ONE)
    readers: list[tuple[Tensor, Tensor]] = []
    for what, keys, stage, *wide in load:
        where = path(*keys, stage=stage)
        if what == "put":
            index = len(keys) - 1
            mine = {name: content(stage, keys, name, width) for name in ("h", "e")}
            mine["w"] = content(stage, keys, "w", wide[0])
            cache.put(where, index, mine)
        elif what == "touch":
            cache.touch(where)
        for i, block in enumerate(cache.find(where)):
            assert block.keys() >= {"h", "e"}
            for name, tensor in block.items():
                wanted = content(stage, keys[: i + 1], name, tensor.shape[1])
                assert torch.equal(tensor, wanted)
                readers.append((tensor, wanted))
        cache.check()
        assert all(torch.equal(tensor, wanted) for tensor, wanted in readers)


def test_rows_that_are_not_finite_are_not_stored() -> None:
    cache = OutputCache(1 << 20)
    for bad in (float("nan"), float("inf")):
        cache.put(path(b"a"), 0, {"hidden": rows(bad), "codes": rows(1)})
        assert cache.find(path(b"a")) == []
    values = iter([rows(float("nan")), rows(2)])
    content_cache = ContentCache(cache, "sounds")
    assert content_cache.recall(b"digest", lambda: next(values)).isnan().all()
    for _ in range(2):
        assert content_cache.recall(b"digest", lambda: next(values)).equal(rows(2))
