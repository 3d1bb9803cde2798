"""Rows of a stage as bytes behind its blocks' K/V, and back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.cache import BlockHash, PrefixNode, PrefixTree, TokenSequence, UnsavedBlock
from headstart.omni.output_cache import BlockPath, OutputCache
from headstart.omni.rows import TierRows
from headstart.omni.stage import Alignment, Kind, Output, StageSpec

SIZE = 4
HIDDEN, FRAMES = Output("hidden"), Output("frames", Alignment(Kind.FRAMES, 2), required=False)
LIKE = {"hidden": torch.zeros(1, 3, dtype=torch.bfloat16), "frames": torch.zeros(2)}
ROOM = 1 << 16


def kept(
    *outputs: Output, like: dict[str, Tensor] | None = None, name: str = "thinker", room: int = ROOM
) -> tuple[TierRows, OutputCache]:
    cache = OutputCache(room)
    spec = StageSpec(name=name, gives=outputs or (HIDDEN, FRAMES))
    return TierRows(spec, SIZE, like or LIKE, cache, cache.reserve_name(name)), cache


def sequence(*tokens: int, salt: str | None = None) -> TokenSequence:
    made = TokenSequence("one", tokens or range(12), salt=salt)
    made.cut(SIZE)
    return made


def unsaved(of: TokenSequence, first: int = 0) -> list[UnsavedBlock]:
    """Return the sequence's blocks as the events of a pool name them."""
    tree, found = PrefixTree(), []
    node: PrefixNode = tree.make_root(of.namespace)
    for at, key in enumerate(of.keys):
        node = tree.child(node, key)
        names = (BlockHash(b"%d" % (at + 1)), BlockHash(b"%d" % at))
        found.append(UnsavedBlock(at, *names, at, 0.0, [], node))
    return found[first:]


def rows(block: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(block)
    return {
        "hidden": torch.randn(SIZE, 3, generator=generator).to(torch.bfloat16),
        "frames": torch.randn(2 * SIZE, generator=generator),
    }


def fill(cache: OutputCache, of: TokenSequence) -> BlockPath:
    path = BlockPath("thinker", of.namespace, of.keys)
    for at in range(len(of.keys)):
        cache.put(path, at, rows(at), {"hidden"})
    return path


def views(data: list[bytes | None]) -> list[memoryview]:
    assert None not in data
    return [memoryview(one) for one in data if one is not None]


def test_rows_come_back_bit_for_bit() -> None:
    source, cache = kept()
    fill(cache, one := sequence(salt="a"))
    data = source.read(unsaved(one))
    assert [len(one) for one in views(data)] == [source.nbytes] * 3 == [4 * 3 * 2 + 8 * 4] * 3
    target, other = kept()
    target.write(one, 0, views(data)[:1])
    target.write(one, 1, views(data)[1:])
    found = other.find(BlockPath("thinker", one.namespace, one.keys))
    for at, there in enumerate(found):
        assert there.keys() == rows(at).keys()
        assert all(torch.equal(there[name], tensor) for name, tensor in rows(at).items())
    assert len(found) == 3
    other.check()
    assert not other.find(BlockPath("thinker", sequence(salt="b").namespace, one.keys))


def test_blocks_are_found_wherever_a_run_begins() -> None:
    source, cache = kept()
    fill(cache, one := sequence())
    fill(cache, other := sequence(7, 7, 7, 7, 8, 8, 8, 8))
    blocks = unsaved(one)
    mixed = [blocks[2], *unsaved(other, 1), blocks[0], blocks[1]]
    whole = views(source.read(blocks))
    assert views(source.read(mixed)) == [whole[2], whole[1], whole[0], whole[1]]


def test_a_block_that_lacks_a_row_is_not_kept() -> None:
    source, cache = kept()
    path = fill(cache, one := sequence())
    cache.drop("thinker", "frames")
    cache.put(path, 0, rows(0), {"hidden"})
    assert [data is not None for data in source.read(unsaved(one))] == [True, False, False]


@pytest.mark.parametrize(
    "other", [torch.zeros(SIZE, 3), torch.zeros(SIZE, 4, dtype=torch.bfloat16)]
)
def test_rows_of_another_layout_are_not_kept(other: Tensor) -> None:
    source, cache = kept(HIDDEN)
    path = BlockPath("thinker", (one := sequence()).namespace, one.keys)
    cache.put(path, 0, {"hidden": other})
    assert source.read(unsaved(one)[:1]) == [None]


def test_rows_that_find_no_room_are_left_out() -> None:
    source, cache = kept()
    fill(cache, one := sequence())
    target, small = kept(room=3000)
    target.write(one, 0, views(source.read(unsaved(one))))
    small.check()
    assert len(small.find(BlockPath("thinker", one.namespace, one.keys))) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"name": "talker"},
        {"outputs": (HIDDEN,)},
        {"outputs": (FRAMES, HIDDEN)},
        {"like": LIKE | {"hidden": torch.zeros(1, 3)}},
        {"like": LIKE | {"hidden": torch.zeros(1, 4, dtype=torch.bfloat16)}},
    ],
)
def test_another_layout_is_another_store(other: dict[str, Any]) -> None:
    layouts = {kept()[0].layout, kept(*other.pop("outputs", ()), **other)[0].layout}
    assert len(layouts) == 2


def test_a_stage_without_rows_keeps_k_and_v_alone() -> None:
    source, cache = kept(Output("wave", Alignment(Kind.REQUEST)), like={"wave": torch.zeros(9)})
    one = sequence()
    assert source.nbytes == 0 and source.read(unsaved(one)) == [b""] * 3
    source.write(one, 0, [memoryview(b"")] * 3)
    assert cache.stats.entries == 0
