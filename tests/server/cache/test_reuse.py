"""A pool of the advised size saves as much as the advice says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from headstart.cache import CacheConfig, KVCacheManager, Namespace, TokenSequence
from headstart.server.cache.advice import PoolSize, advise_memory
from headstart.server.cache.traffic import Traffic

PLAIN = Namespace(None, None)
SIZE = 16
Trace = Sequence[tuple[list[int], int]]  # prompts, and tokens generated


def run(trace: Trace, num_blocks: int, eviction: str) -> tuple[int, dict[str, Any]]:
    """Run a trace in a pool; return the hit tokens and the memory advice."""
    manager = KVCacheManager(CacheConfig(num_blocks=num_blocks, eviction=eviction))
    now = 0.0
    traffic = Traffic(clock=lambda: now)
    hits = 0
    for i, (prompt, generated) in enumerate(trace):
        now += 1.0
        sequence = TokenSequence(f"{i}", prompt)
        match = manager.get_computed_blocks(sequence)
        allocation = manager.allocate_slots(sequence, len(prompt) - match.num_tokens, match)
        assert allocation is not None
        manager.commit_step()
        for token in range(generated - 1):
            sequence.append(10**6 * i + token)
            assert manager.append_slots(sequence)
            manager.commit_step()
        manager.free(sequence)
        hits += match.num_tokens
        missed = allocation.missed
        traffic.add(f"{i}", PLAIN, prompt, match.num_tokens, missed, num_generated=generated)
    pool = PoolSize(num_blocks, SIZE, 1)
    return hits, advise_memory(traffic.recent, traffic.last_dropped, pool)


def documents(rng: random.Random, count: int, blocks: int) -> list[list[int]]:
    return [
        [rng.randrange(10**6) for _ in range(rng.randint(blocks // 2, 3 * blocks // 2) * SIZE)]
        for _ in range(count)
    ]


def random_trace(seed: int) -> Trace:
    """Return questions about documents of different popularity; a third have long answers."""
    rng = random.Random(seed)
    all_documents = documents(rng, rng.randint(6, 30), rng.randint(6, 40))
    weights = [1 / (i + 1) ** rng.random() for i in range(len(all_documents))]
    answers = rng.choice([1, 1, 50])
    trace = []
    for _ in range(200):
        [document] = rng.choices(all_documents, weights)
        question = [rng.randrange(10**6) for _ in range(rng.randrange(1, 40))]
        trace.append((document + question, answers))
    return trace


@pytest.mark.parametrize("num_blocks", [140, 200])
def test_a_loop_needs_all_of_its_blocks(num_blocks: int) -> None:
    rng = random.Random(1)
    loop = [[rng.randrange(10**6) for _ in range(57 * SIZE - 3)] for _ in range(5)]
    trace = [([*document, turn], 1) for turn in range(3) for document in loop]
    hits, advice = run(trace, num_blocks, "lru")
    assert hits == 0 and advice["evicted_prompts"] == 10
    assert 284 <= num_blocks + advice["more_blocks"] <= 290


def test_a_conversation_needs_only_the_blocks_of_its_last_turn() -> None:
    """A turn's prompt contains the previous answer, and continues in its blocks."""
    document = list(range(20 * SIZE))
    trace, prompt = [(document, 1)], list(range(1000, 1000 + 5 * SIZE))
    for turn in range(1, 9):
        trace.append((prompt, 20))
        answer = [10**6 * turn + token for token in range(19)]
        prompt = [*prompt, *answer, *range(2000 * turn, 2000 * turn + 20)]
    blocks = (len(trace[-1][0]) + 19) // SIZE + 1
    _, advice = run([*trace, ([*document, 7], 1)], 30, "lru")
    assert advice["evicted_prompts"] == 1
    assert 20 + blocks <= 30 + advice["more_blocks"] <= 20 + blocks + 2


@pytest.mark.parametrize("eviction", ["lru", "adaptive-lru"])
@pytest.mark.parametrize("seed", range(8))
def test_a_pool_of_the_advised_size_saves_as_advised(seed: int, eviction: str) -> None:
    trace = random_trace(seed)
    largest = max(-(-(len(prompt) + answer) // SIZE) for prompt, answer in trace)
    num_blocks = random.Random(seed).randint(largest, 4 * largest)
    hits, advice = run(trace, num_blocks, eviction)
    advised = num_blocks + advice["more_blocks"]
    saved = run(trace, advised, eviction)[0] - hits
    assert 0.9 * advice["tokens_saved"] <= saved <= 1.1 * advice["tokens_saved"]
    smaller = num_blocks + int(0.7 * advice["more_blocks"])
    assert run(trace, smaller, eviction)[0] - hits < advice["tokens_saved"]


def test_advice_is_unknown_after_dropped_prompts_or_other_use() -> None:
    rng = random.Random(2)
    trace = [(prompt, 1) for prompt in documents(rng, 4, 20) * 2]
    _, advice = run(trace, 40, "lru")
    assert advice["more_blocks"] > 0
    traffic = Traffic()
    for prompt, _ in trace:
        traffic.add("", PLAIN, prompt, 0, None)
    recent = traffic.recent
    pool = PoolSize(40, SIZE, 1)
    assert advise_memory(recent, recent[-1].ended, pool)["more_blocks"] is None
    assert advise_memory(recent, float("-inf"), pool._replace(num_blocks=10**6)) == {
        "evicted_prompts": 0,
        "tokens_computed_again": 0,
        "more_blocks": None,
        "more_bytes": None,
        "tokens_saved": None,
    }
