"""Equality of blocks: keys, frames around items, and their common heads."""

from collections.abc import Callable

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.cache import MultiModalItem, TokenSequence
from headstart.cache.identity import (
    MAX_TOKEN_ID,
    BlockKey,
    _common_bytes,
    common_tokens,
    count_tokens,
    cut_keys,
    differs_in_item,
    encode_tokens,
)
from headstart.errors import CacheError
from tests.cache.naming import block_key
from tests.cache.unwalked import unwalked
from tests.interruptions import Interruption

# The reference's prompt: <s>[INST]What's in this image?\n, 41 placeholders, [/INST].
QUESTION = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551]
PLACEHOLDER, END = 10, 4
IMAGE = MultiModalItem(b"image hash", offset=8, length=41)
PROMPT = [*QUESTION, *[PLACEHOLDER] * 41, END]

# Values whose bytes look like a frame's mark, or like another value's shifted.
TOKEN = st.sampled_from([0, 1, 2, 255, 256, 0x7FFFFFFF, 0x00FFFFFF, 0x7FFFFF00])
DIGEST = st.sampled_from([b"a", b"b", b"aa", b"\xff" * 4, b"\xff" * 5, b"\0" * 16])


@st.composite
def prompts(draw: st.DrawFn) -> TokenSequence:
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=12))
    items, at = [], 0
    while at < len(tokens) and draw(st.booleans()):
        offset = draw(st.integers(at, len(tokens) - 1))
        length = draw(st.integers(1, len(tokens) - offset))
        items.append(MultiModalItem(draw(DIGEST), offset, length))
        at = offset + length
    return TokenSequence("drawn", tokens, items=items)


def content(sequence: TokenSequence, span: range) -> list[object]:
    """List each position's content: its token, and its offset in an item."""
    return [
        (
            sequence.token_ids[at],
            *(
                (item.digest, at - item.offset, item.length)
                for item in sequence.items
                if item.offset <= at < item.offset + item.length
            ),
        )
        for at in span
    ]


def test_a_key_is_the_tokens_four_bytes_each() -> None:
    key = TokenSequence("one", [1, 258, MAX_TOKEN_ID, 0]).cut(4)[0]
    assert key.hex(" ", 4) == "01000000 02010000 ffffff7f 00000000"


def test_the_frame_of_an_item_is_where_its_placeholders_begin() -> None:
    item = MultiModalItem(b"\xab\xcd", offset=2, length=41)
    key = cut_keys(encode_tokens([1, 3, 9, 9]), range(4), 4, [item])[0]
    assert key.hex(" ", -4) == (
        "01000000 03000000 ffffffff 00000000 29000000 02000000 abcd0900 00000900 0000"
    )


def test_the_reference_prompt_has_the_image_in_all_its_blocks() -> None:
    keys = TokenSequence("image", PROMPT, items=[IMAGE]).cut(16)
    assert [b"image hash" in key for key in keys] == [True, True, True]
    tail = TokenSequence("image", PROMPT, items=[IMAGE]).cut_partial(50, 16)
    assert (b"image hash" in tail, count_tokens(tail)) == (True, 2)


def test_an_item_changes_only_the_blocks_that_contain_it() -> None:
    item = MultiModalItem(b"x", offset=4, length=4)
    sequence = TokenSequence("one", list(range(12)), items=[item])
    assert [len(key) for key in sequence.cut(4)] == [16, 16 + 16 + 1, 16]


def test_another_image_at_the_same_position_changes_all_later_blocks() -> None:
    other = MultiModalItem(b"another hash", offset=8, length=41)
    left = TokenSequence("left", PROMPT, items=[IMAGE]).cut(16)
    right = TokenSequence("right", PROMPT, items=[other]).cut(16)
    assert common_tokens(left[0], right[0]) == 8
    assert differs_in_item(left[0], right[0])
    assert all(a != b for a, b in zip(left, right, strict=True))


def test_the_same_image_at_another_position_changes_blocks() -> None:
    moved = MultiModalItem(IMAGE.digest, offset=7, length=41)
    left = TokenSequence("left", PROMPT, items=[IMAGE]).cut(16)
    right = TokenSequence("right", PROMPT, items=[moved]).cut(16)
    assert all(a != b for a, b in zip(left, right, strict=True))


@given(prompts(), prompts(), st.integers(1, 5))
def test_keys_are_equal_if_and_only_if_contents_are(
    left: TokenSequence, right: TokenSequence, size: int
) -> None:
    for at, (a, b) in enumerate(zip(left.cut(size), right.cut(size), strict=False)):
        span = range(at * size, (at + 1) * size)
        assert (a == b) == (content(left, span) == content(right, span))


@given(prompts(), prompts(), st.integers(1, 5))
def test_common_tokens_are_the_equal_contents_at_the_head(
    left: TokenSequence, right: TokenSequence, size: int
) -> None:
    for start in range(0, min(len(left.token_ids), len(right.token_ids)), size):
        a, b = (s.cut_partial(min(start + size, len(s.token_ids)), size) for s in (left, right))
        one = content(left, range(start, start + count_tokens(a)))
        other = content(right, range(start, start + count_tokens(b)))
        same = [x == y for x, y in zip(one, other, strict=False)]
        common = ([*same, False]).index(False)
        assert common_tokens(a, b) == common_tokens(b, a) == common
        if common < len(same):
            assert differs_in_item(a, b) == (one[common][1:] != other[common][1:])


@given(prompts(), st.integers(1, 5))
def test_count_tokens_counts_whole_tokens_of_any_beginning(
    sequence: TokenSequence, size: int
) -> None:
    for at, key in enumerate(sequence.cut(size)):
        assert count_tokens(key) == size
        ends = [len(block_key(sequence, at * size, at * size + n)) for n in range(1, size + 1)]
        for cut in range(len(key)):
            assert count_tokens(key[:cut]) == sum(end <= cut for end in ends)


@given(prompts(), st.integers(1, 5), st.lists(st.integers(0, 12), max_size=4))
def test_incremental_cutting_gives_the_same_keys(
    whole: TokenSequence, size: int, more: list[int]
) -> None:
    start = max([1, *(item.offset + item.length for item in whole.items)])
    growing = TokenSequence("growing", whole.token_ids[:start], items=whole.items)
    for token in whole.token_ids[start:]:
        growing.append(token)
        growing.cut(size)
    keys = [
        block_key(whole, at, at + size)
        for at in range(0, len(whole.token_ids) // size * size, size)
    ]
    assert growing.cut(size) == whole.cut(size) == keys


def test_numpy_tokens_are_tokens() -> None:
    sequence = TokenSequence("one", numpy.arange(3))
    sequence.append(numpy.int64(3))
    assert sequence.cut(4) == TokenSequence("two", range(4)).cut(4)


@pytest.mark.parametrize("bad", [-1, MAX_TOKEN_ID + 1, 2**32, 2**70, 1.5, "a", None])
def test_invalid_tokens_are_refused(bad: int) -> None:
    with pytest.raises(
        CacheError, match=f"token id {bad!r} is not an integer from 0 to {2**31 - 1}"
    ):
        TokenSequence("one", [1, numpy.int64(2), bad, 3])
    sequence = TokenSequence("two", [1])
    with pytest.raises(CacheError, match=f"token id {bad!r}"):
        sequence.append(bad)
    assert sequence.token_ids == [1]


@pytest.mark.parametrize("token", [0, MAX_TOKEN_ID])
def test_the_ends_of_the_range_are_tokens(token: int) -> None:
    sequence = TokenSequence("one", [token])
    sequence.append(token)
    assert sequence.token_ids == [token, token]


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(CacheError, match="'nothing' has no tokens"):
        TokenSequence("nothing", [])


def test_items_may_touch_but_not_overlap_and_come_in_any_order() -> None:
    left, right = MultiModalItem(b"l", 0, 2), MultiModalItem(b"r", 2, 2)
    assert TokenSequence("one", [1, 1, 2, 2], items=[right, left]).items == [left, right]
    with pytest.raises(CacheError, match="overlap"):
        TokenSequence("one", [1, 1, 2, 2], items=[MultiModalItem(b"l", 0, 3), right])
    long = MultiModalItem(b"long", 2, 3)
    with pytest.raises(CacheError, match=r"digest=b'long'.* extends beyond the 4 tokens"):
        TokenSequence("one", [1, 1, 2, 2], items=[left, long])
    assert TokenSequence("one", [1, 1, 2, 2, 2], items=[left, long]).items == [left, long]


@pytest.mark.parametrize(("digest", "offset", "length"), [(b"", 0, 1), (b"x", -1, 1), (b"x", 0, 0)])
def test_an_invalid_item_is_refused(digest: bytes, offset: int, length: int) -> None:
    with pytest.raises(CacheError, match="a multimodal item"):
        MultiModalItem(digest, offset, length)


def test_an_item_may_be_added_to_a_growing_sequence_behind_its_cut_blocks() -> None:
    plain, with_item = TokenSequence("a", [1, 2, 3]), TokenSequence("b", [1, 2, 3])
    with_item.add_item(MultiModalItem(b"x", 0, 4), 4)
    for sequence in (plain, with_item):
        sequence.append(4)
    assert plain.cut(4) != with_item.cut(4)
    with pytest.raises(CacheError, match="overlaps another item, or a block"):
        plain.add_item(MultiModalItem(b"x", 3, 2), 4)
    with pytest.raises(CacheError, match="overlaps another item, or a block"):
        with_item.add_item(MultiModalItem(b"x", 3, 4), 4)


@given(st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=40))
def test_the_common_head_of_two_keys_is_that_of_a_loop(left: bytes, right: bytes) -> None:
    for a, b in ((left, right), (left, left + right), (left + right, left)):
        pairs = enumerate(zip(a, b, strict=False))
        expected = next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
        assert _common_bytes(a, b) == expected


def lines_of(action: Callable[[], object]) -> int:
    with Interruption() as counted:
        action()
    return len(counted.lines)


def test_the_common_head_needs_no_loop_over_bytes() -> None:
    short, long = (BlockKey(bytes(4 * count)) for count in (16, 2048))
    other_short, other_long = BlockKey(short[:-1] + b"x"), BlockKey(long[:-1] + b"x")
    assert lines_of(lambda: common_tokens(long, other_long)) == lines_of(
        lambda: common_tokens(short, other_short)
    )


def test_cutting_a_block_reads_only_its_items() -> None:
    def lines(num_items: int) -> int:
        tokens = [0] * (4 * num_items + 3)
        items = [MultiModalItem(b"x", 4 * at, 2) for at in range(num_items)]
        sequence = TokenSequence("one", tokens, items=items)
        sequence.cut(4)
        sequence.append(1)
        sequence.items = unwalked(sequence.items)
        return lines_of(lambda: sequence.cut(4))

    assert lines(2000) - lines(2) < 60  # two bisections


def test_adding_an_item_does_not_copy_those_before() -> None:
    sequence = TokenSequence("one", [0])
    items = sequence.items = unwalked(sequence.items)
    for at in range(1, 9):
        sequence.add_item(MultiModalItem(b"x", at, 1), 16)
    assert sequence.items is items
    assert len(items) == 8


@pytest.mark.parametrize("digest", [b"", "cat", None, 7, bytearray(b"cat")])
def test_a_digest_that_is_not_bytes_is_refused_at_once(digest: object) -> None:
    with pytest.raises(CacheError, match=r"digest of a multimodal item is .*at least one byte"):
        MultiModalItem(digest, 2, 5)  # type: ignore[arg-type]
