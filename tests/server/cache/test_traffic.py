"""Recent prompts: the closest match, the bound of memory, and kinds of differences."""

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
def test_the_closest_recent_prompt_is_found(
    earlier: list[list[int]], prompt: list[int], most: int
) -> None:
    traffic = Traffic(max_prompts=most)
    for i, tokens in enumerate(earlier):
        traffic.add(str(i), PLAIN, tokens, 0, MISSED)
        traffic.add("another tenant's", Namespace(None, "salt"), prompt, 0, MISSED)
    recent = [entry.tokens.tolist() for entry in traffic.recent if entry.namespace == PLAIN]
    assert len(traffic.recent) <= most
    match = traffic.closest(PLAIN, np.array(prompt, np.int32))
    assert (match is None) == (not recent)
    if match is not None:
        assert match.num_common == max(common(prompt, entry) for entry in recent)
        assert match.num_common == count_common(np.array(prompt), match.prompt.tokens)


@pytest.mark.parametrize("waited, num_evicted", [(4.0, 0), (2.5, 0), (1.5, 6), (0.0, 6)])
def test_blocks_not_yet_computed_at_lookup_do_not_count_as_evicted(
    waited: float, num_evicted: int
) -> None:
    """Regression: two concurrent requests with one document counted as an eviction."""
    now = 10.0
    traffic = Traffic(clock=lambda: now)
    traffic.add("first", PLAIN, [1, 2, 3, 4, 5, 6, 7], 0, MISSED, Times(5.0, 4.0, 1.0))
    now = 11.0  # the first one's K/V were complete at 9
    tokens = [1, 2, 3, 4, 5, 6, 8]
    entry = traffic.add("second", PLAIN, tokens, 0, MISSED, Times(waited + 1, waited, 0.0))
    assert entry.closest is not None and entry.closest.num_common == 6
    assert entry.num_evicted_tokens == num_evicted


def test_evictions_reported_by_the_cache_count() -> None:
    """The evicted blocks may belong to another prompt than the closest one."""
    traffic = Traffic(clock=lambda: 10.0)
    traffic.add("first", PLAIN, [1, 2, 3, 4, 5, 6, 7], 0, MISSED, Times(5.0, 4.0, 1.0))
    evicted = MissExplanation(MissReason.EVICTED, 0)
    tokens = [1, 2, 3, 4, 5, 6, 8]
    entry = traffic.add("second", PLAIN, tokens, 0, evicted, Times(4.0, 3.0, 0.0))
    assert entry.num_evicted_tokens == 6


@pytest.mark.parametrize("reason", MissReason)
def test_a_prompt_holds_no_references_to_earlier_ones(reason: MissReason) -> None:
    traffic = Traffic(max_prompts=3)
    references = []
    for i in range(20):
        missed = MissExplanation(reason, 0)
        references.append(weakref.ref(traffic.add(str(i), PLAIN, [1, 2, 3], 0, missed)))
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 4


def test_the_time_of_the_last_dropped_prompt_is_recorded() -> None:
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
    for i, tokens in enumerate(earlier):
        traffic.add(str(i), PLAIN, tokens, 0, MISSED)
        assert sum(len(entry.tokens) for entry in traffic.recent) <= 50
    traffic.clear()
    assert traffic.closest(PLAIN, np.zeros(1, np.int32)) is None


def test_a_tenants_prompts_are_not_dropped_for_anothers() -> None:
    """Regression: a tenant's prompts were dropped for another's."""
    traffics = TenantTraffic(by_tenant=True)
    own, narrowed = traffics.of("bob"), traffics.of("bob/x")
    own.add("own", Namespace(None, "bob"), [1, 2, 3], 0, MISSED)
    narrowed.add("narrowed", Namespace(None, "bob/x"), [1, 2, 3], 0, MISSED)
    for i in range(2000):
        traffics.of("alice").add(str(i), Namespace(None, "alice"), [i], 0, MISSED)
    long = [7] * TenantTraffic.MAX_TOKENS_OF_TENANT
    traffics.of("alice").add("long", Namespace(None, "alice"), long, 0, MISSED)
    assert [entry.request_id for entry in traffics.of("bob/y").recent] == ["own", "narrowed"]
    names = [[entry.request_id for entry in those] for those in traffics.recent]
    assert names == [["long"], ["own", "narrowed"]]


def test_prompts_of_a_bounded_number_of_tenants_are_stored() -> None:
    """Each tenant may have a million tokens of prompts, and there may be a thousand keys."""
    traffics = TenantTraffic(by_tenant=True)
    for i in range(TenantTraffic.MAX_TENANTS + 2):
        traffics.of(f"{i}").add(f"{i}", Namespace(None, f"{i}"), [1], 0, MISSED)
        traffics.of("0")
    expected = [*range(3, TenantTraffic.MAX_TENANTS + 2), 0]
    assert [int(entry.request_id) for [entry] in traffics.recent] == expected


def test_without_keys_all_salts_share_one_limit() -> None:
    """All salts share one limit, as a client may use any number of them."""
    traffics = TenantTraffic(by_tenant=False)
    for i in range(2000):
        traffics.of(str(i)).add(str(i), Namespace(None, str(i)), [1], 0, MISSED)
    assert [len(those) for those in traffics.recent] == [1024]


def test_a_short_prompt_is_compared_with_a_part_of_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: all 400,000 tokens of a long prompt were compared, in the event loop."""
    compared: list[tuple[int, int]] = []

    def noted(mine: traffic.Tokens, earlier: traffic.Tokens) -> int:
        compared.append((len(mine), len(earlier)))
        return count_repeated(mine, earlier)

    monkeypatch.setattr(traffic, "count_repeated", noted)
    history = Traffic()
    tail = list(range(100, 200))
    history.add("long", PLAIN, [1, 2, *range(5000, 7000), *tail, *range(9, 400_000)], 0, MISSED)
    assert history.add("short", PLAIN, [1, 2, 7, *tail], 0, MISSED).num_repeated == len(tail)
    assert compared == [(101, 101 + 2048)]


@pytest.mark.parametrize("count", [1, 3])
def test_dropping_a_long_prompt_computes_no_key(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it took the event loop a millisecond for each short request."""
    history = Traffic(max_tokens=400_000 * count)
    for i in range(count):
        history.add(f"long {i}", PLAIN, list(range(400_000)), 0, MISSED)
    sort_key, lengths = traffic.sort_key, list[int]()
    monkeypatch.setattr(
        traffic, "sort_key", lambda tokens: lengths.append(len(tokens)) or sort_key(tokens)
    )
    for i in range(count):
        history.add(f"short {i}", PLAIN, [i], 0, MISSED)
    assert max(lengths) == 1
    long = [f"long {i}" for i in range(1, count)]
    short = [f"short {i}" for i in range(count)]
    assert [entry.request_id for entry in history.recent] == [*long, *short]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_repeated_tokens_are_counted(mine: list[int], theirs: list[int]) -> None:
    runs = {tuple(theirs[i : i + 8]) for i in range(len(theirs) - 7)}
    covered = set[int]()
    for i in range(len(mine) - 7):
        if tuple(mine[i : i + 8]) in runs:
            covered.update(range(i, i + 8))
    count = count_repeated(np.array(mine, np.int32), np.array(theirs, np.int32))
    assert count == len(covered)


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
def test_kinds_of_differences(before: str, here: str, there: str, looks_like: str) -> None:
    assert describe_difference(before, here, there).looks_like == looks_like
