"""The prompts of late: the closest one is found, memory is bounded, differences have names."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.cache import MissExplanation, MissReason, Namespace
from headstart.server.cache import traffic
from headstart.server.cache.advice import describe_difference
from headstart.server.cache.traffic import (
    TenantTraffic,
    Times,
    Traffic,
    count_common,
    count_repeated,
)

MISSED = MissExplanation(MissReason.TOKEN, 0)
ORDER = "the same entries in another order"
TOOLS = "the same tools in another order"
PASSAGES = "the same passages in another order"
TOOL = '", "parameters": {}}, {"type": "function", "name": "'
PLAIN = Namespace(None, None)
prompts = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=30)


def common(left: list[int], right: list[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@given(prompts, st.lists(st.integers(0, 2), max_size=8), st.integers(1, 30))
def test_the_closest_of_the_last_prompts_is_found(
    earlier: list[list[int]], prompt: list[int], most: int
) -> None:
    traffic = Traffic(max_prompts=most)
    for at, tokens in enumerate(earlier):
        traffic.add(str(at), PLAIN, tokens, 0, MISSED)
        traffic.add("another tenant's", Namespace(None, "salt"), prompt, 0, MISSED)
    known = [one.tokens.tolist() for one in traffic.recent if one.namespace == PLAIN]
    assert len(traffic.recent) <= most
    found = traffic.closest(PLAIN, np.array(prompt, np.int32))
    assert (found is None) == (not known)
    if found is not None:
        assert found.num_common == max(common(prompt, one) for one in known)
        assert found.num_common == count_common(np.array(prompt), found.prompt.tokens)


@pytest.mark.parametrize("waited, num_evicted", [(4.0, 0), (2.5, 0), (1.5, 6), (0.0, 6)])
def test_what_was_looked_up_before_it_was_computed_was_not_evicted(
    waited: float, num_evicted: int
) -> None:
    """The page showed an eviction in an empty pool for two requests with one document."""
    now = 10.0
    traffic = Traffic(clock=lambda: now)
    traffic.add("first", PLAIN, [1, 2, 3, 4, 5, 6, 7], 0, MISSED, Times(5.0, 4.0, 1.0))
    now = 11.0  # the first one's K/V were complete at 9
    tokens = [1, 2, 3, 4, 5, 6, 8]
    seen = traffic.add("second", PLAIN, tokens, 0, MISSED, Times(waited + 1, waited, 0.0))
    assert seen.closest is not None and seen.closest.num_common == 6
    assert seen.num_evicted_tokens == num_evicted


def test_what_the_cache_says_was_evicted_was() -> None:
    """The closest prompt may have arrived in between; the evicted blocks are a third prompt's."""
    traffic = Traffic(clock=lambda: 10.0)
    traffic.add("first", PLAIN, [1, 2, 3, 4, 5, 6, 7], 0, MISSED, Times(5.0, 4.0, 1.0))
    evicted = MissExplanation(MissReason.EVICTED, 0)
    tokens = [1, 2, 3, 4, 5, 6, 8]
    seen = traffic.add("second", PLAIN, tokens, 0, evicted, Times(4.0, 3.0, 0.0))
    assert seen.num_evicted_tokens == 6


@pytest.mark.parametrize("reason", MissReason)
def test_no_prompt_keeps_those_before_it_alive(reason: MissReason) -> None:
    traffic = Traffic(max_prompts=3)
    known = []
    for at in range(20):
        missed = MissExplanation(reason, 0)
        known.append(weakref.ref(traffic.add(str(at), PLAIN, [1, 2, 3], 0, missed)))
    gc.collect()
    assert sum(one() is not None for one in known) <= 4


def test_the_end_of_the_last_prompt_that_was_forgotten_is_known() -> None:
    now = 0.0
    traffic = Traffic(max_prompts=2, max_tokens=9, clock=lambda: now)
    for expected in (-math.inf, -math.inf, 1.0, 2.0):
        now += 1.0
        traffic.add("", PLAIN, [1, 2], 0, MISSED)
        assert traffic.last_dropped == expected
    now = 5.0
    traffic.add("", PLAIN, [1] * 10, 0, MISSED)
    assert traffic.last_dropped == 5.0, "longer than all that is remembered"


@given(st.lists(st.lists(st.integers(0, 9), max_size=20), max_size=30))
def test_memory_is_bounded(earlier: list[list[int]]) -> None:
    traffic = Traffic(max_tokens=50)
    for at, tokens in enumerate(earlier):
        traffic.add(str(at), PLAIN, tokens, 0, MISSED)
        assert sum(len(one.tokens) for one in traffic.recent) <= 50
    traffic.clear()
    assert traffic.closest(PLAIN, np.zeros(1, np.int32)) is None


def test_no_tenants_prompts_are_forgotten_for_anothers() -> None:
    """The number of its remaining blocks included those of other prompts."""
    traffics = TenantTraffic(by_tenant=True)
    own, narrowed = traffics.of("bob"), traffics.of("bob/x")
    own.add("own", Namespace(None, "bob"), [1, 2, 3], 0, MISSED)
    narrowed.add("narrowed", Namespace(None, "bob/x"), [1, 2, 3], 0, MISSED)
    for at in range(2000):
        traffics.of("alice").add(str(at), Namespace(None, "alice"), [at], 0, MISSED)
    long = [7] * TenantTraffic.MAX_TOKENS_OF_TENANT
    traffics.of("alice").add("long", Namespace(None, "alice"), long, 0, MISSED)
    assert [seen.request_id for seen in traffics.of("bob/y").recent] == ["own", "narrowed"]
    told = [[seen.request_id for seen in those] for those in traffics.recent]
    assert told == [["long"], ["own", "narrowed"]]


def test_the_prompts_of_few_tenants_are_kept() -> None:
    """Each may have a million tokens of them, and there may be a thousand keys."""
    traffics = TenantTraffic(by_tenant=True)
    for at in range(TenantTraffic.MAX_TENANTS + 2):
        traffics.of(f"{at}").add(f"{at}", Namespace(None, f"{at}"), [1], 0, MISSED)
        traffics.of("0")
    kept = [*range(3, TenantTraffic.MAX_TENANTS + 2), 0]
    assert [int(seen.request_id) for [seen] in traffics.recent] == kept


def test_without_keys_salts_make_no_room_of_their_own() -> None:
    """A client may name as many as it likes."""
    traffics = TenantTraffic(by_tenant=False)
    for at in range(2000):
        traffics.of(str(at)).add(str(at), Namespace(None, str(at)), [1], 0, MISSED)
    assert [len(those) for those in traffics.recent] == [1024]


def test_a_short_prompt_is_compared_with_no_more_of_a_long_one_than_could_be_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All 400,000 tokens of an earlier prompt were, in the event loop, for one of a hundred."""
    compared: list[tuple[int, int]] = []

    def noted(mine: traffic.Tokens, earlier: traffic.Tokens) -> int:
        compared.append((len(mine), len(earlier)))
        return count_repeated(mine, earlier)

    monkeypatch.setattr(traffic, "count_repeated", noted)
    known = Traffic()
    tail = list(range(100, 200))
    known.add("long", PLAIN, [1, 2, *range(5000, 7000), *tail, *range(9, 400_000)], 0, MISSED)
    assert known.add("short", PLAIN, [1, 2, 7, *tail], 0, MISSED).num_repeated == len(tail)
    assert compared == [(101, 101 + 2048)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_long_prompt_that_is_forgotten_is_not_spelled_again(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the event loop a millisecond while short requests arrived, also if repeated."""
    known = Traffic(max_tokens=400_000 * count)
    for at in range(count):
        known.add(f"long {at}", PLAIN, list(range(400_000)), 0, MISSED)
    spell, spelled = traffic.sort_key, list[int]()
    monkeypatch.setattr(
        traffic, "sort_key", lambda tokens: spelled.append(len(tokens)) or spell(tokens)
    )
    for at in range(count):
        known.add(f"short {at}", PLAIN, [at], 0, MISSED)
    assert max(spelled) == 1
    long = [f"long {at}" for at in range(1, count)]
    short = [f"short {at}" for at in range(count)]
    assert [seen.request_id for seen in known.recent] == [*long, *short]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_tokens_that_come_again(mine: list[int], theirs: list[int]) -> None:
    runs = {tuple(theirs[at : at + 8]) for at in range(len(theirs) - 7)}
    covered = set[int]()
    for at in range(len(mine) - 7):
        if tuple(mine[at : at + 8]) in runs:
            covered.update(range(at, at + 8))
    found = count_repeated(np.array(mine, np.int32), np.array(theirs, np.int32))
    assert found == len(covered)


@pytest.mark.parametrize(
    ("before", "here", "there", "looks_like"),
    [
        ("Now: 2026-11-", "21\nHi", "22\nHi", "a date or time"),
        ("The time is 10:3", "2 o'clock", "5 o'clock", "a date or time"),
        ("It is ", "Monday, all day", "Tuesday, all day", "a date or time"),
        ("Today: Nov", " 3, 2026", " 12, 2026", "a date or time"),
        ("at 17000000", "01 s", "99 s", "a date or time"),
        ("session ", "3f2a9c1e-77aa-4b", "c0ffee11-12ab-4c", "a random id"),
        ("id=", "9f8e7d6c5b4a3f2e", "0a1b2c3d4e5f6a7b", "a random id"),
        ("one two", "  three four five", "\nthree four five", "white space"),
        ('{"', 'a": 1, "b": 2, "c": 3}', 'b": 2, "a": 1, "c": 3}', ORDER),
        ('{"', 'b": 1, "a": 2}', 'a": 2, "b": 1}', ORDER),
        ('{"', 'a": 1, "b": 2, "c": 3}', 'b": 2, "c": 3, "a": 1}', ORDER),
        ('{"id": 7, "', 'a": 1, "b": 2, "c": 3}', 'c": 3, "a": 1, "b": 2}', ORDER),
        ('{"', 'a": 1, "b": 2}', 'c": 1, "d": 2}', "another text"),
        ('[{"name": "', f'age{TOOL}job{TOOL}now"}}', f'now{TOOL}age{TOOL}job"}}', TOOLS),
        ("", "- b\n- a", "- a\n- b", ORDER),
        ("", "b 1\nb 2\n\na 1\n\nend", "a 1\n\nb 1\nb 2\n\nend", PASSAGES),
        ("", "tool b\ntool a\ntool c\nend", "tool a\ntool b\ntool c\nend", ORDER),
        ("", "Hi! One.\n" + "Two.\n" * 9, "Be kind. One.\n" + "Two.\n" * 9, "another text"),
        ("page ", "7 of the book", "8 of the book", "a number"),
        ("I like ", "apples a lot", "pears a lot", "another text"),
        ("I like ", "", "pears", "one prompt is the beginning of the other"),
    ],
)  # fmt: skip
def test_what_a_difference_looks_like(before: str, here: str, there: str, looks_like: str) -> None:
    assert describe_difference(before, here, there).looks_like == looks_like
