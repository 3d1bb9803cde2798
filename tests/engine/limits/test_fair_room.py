"""Space of owners: the limit of their running requests, and the order of waiting requests."""

from __future__ import annotations

import random

import pytest

from headstart.engine.fair_share import MEMORY
from headstart.engine.request import Request
from tests.engine.limits.simulation import BLOCK, BLOCKS, TOKENS, Flood, Simulation


def words(seed: int, count: int) -> list[int]:
    """Return random tokens of a seed; no other seed has the same ones."""
    return list(range(seed * 10**4, seed * 10**4 + count))


def finish(simulation: Simulation, request: Request) -> float:
    """Run until the request has ended; return the simulated time."""
    before = simulation.now
    while request.finish_reason is None:
        simulation.step()
    return simulation.now - before


def flooded(blocks: int = BLOCKS) -> tuple[Simulation, Flood, list[int]]:
    """Flood with long answers, while another owner has cached a third of the pool."""
    simulation = Simulation(("a", "b"), blocks)
    document = words(1, blocks * BLOCK // 3)
    finish(simulation, simulation.submit("a", document))
    return simulation, Flood(simulation, "b", 300, 300), document


def go_on(simulation: Simulation, flood: Flood, tokens: int) -> None:
    """Run until this many tokens were computed."""
    while tokens > 0:
        flood.go_on()
        tokens -= simulation.step()


def test_running_requests_evict_nothing_within_the_share_of_another_owner() -> None:
    """Regression: nine running requests filled the pool, and the document was evicted."""
    simulation, flood, document = flooded()
    go_on(simulation, flood, 2 * BLOCKS * BLOCK)
    again = simulation.submit("a", [*document, 7])
    finish(simulation, again)
    assert again.num_cached_tokens == len(document)
    assert flood.answered and not simulation.scheduler.num_preemptions


def test_blocks_that_an_owner_cached_long_ago_may_be_taken_by_others() -> None:
    """Otherwise an owner that runs alone would have only a share of the places for ever."""
    simulation, flood, _ = flooded(BLOCKS // 2)
    go_on(simulation, flood, BLOCKS // 2 * BLOCK)
    num_running = len(simulation.scheduler.running)
    go_on(simulation, flood, MEMORY * BLOCKS // 2 * BLOCK)
    assert len(simulation.scheduler.running) > num_running
    simulation.manager.check()


def test_waiting_for_a_place_accumulates_no_credit() -> None:
    """Regression: each question delayed the flood further, until the queue before it was full."""
    alone = Simulation(("a", "b"), blocks=2000)
    simulation = Simulation(("a", "b"), blocks=2000)
    flood = Flood(simulation, "b", 20, 1000)
    for at in range(60):
        prompt = words(at, 3 * TOKENS)
        flood.go_on()
        waits = finish(simulation, simulation.submit("a", prompt, answer=1))
        assert waits <= 2 * finish(alone, alone.submit("a", prompt, answer=1))
        ranks = [request.rank for request in simulation.scheduler.waiting]
        assert ranks == sorted(ranks)


def test_owners_that_wait_for_space_keep_their_order() -> None:
    """Their turns move together: an owner that had more for its weight still comes later."""
    simulation = Simulation(("a", "b", "c"), blocks=2000)
    simulation.manager.shares.set("b", 3.0)
    floods = {salt: Flood(simulation, salt, 20, 100) for salt in ("a", "b")}
    while sum(flood.answered for flood in floods.values()) < 120:
        for flood in floods.values():
            flood.go_on()
        finish(simulation, simulation.submit("c", words(simulation.steps, 200), answer=1))
    assert 2 < floods["b"].answered / floods["a"].answered < 4


@pytest.mark.parametrize("seed", range(4))
def test_no_owner_starves_among_floods_of_all_kinds(seed: int) -> None:
    drawn = random.Random(seed)
    owners = ("a", "b", "c", "d")
    simulation = Simulation(owners, blocks=drawn.choice([300, 400, 800]))
    floods = []
    for owner in owners:
        simulation.manager.shares.set(owner, drawn.choice([0.5, 1.0, 3.0]))
        length, answer = drawn.choice([20, 100, 450, 2000]), drawn.choice([1, 4, 60, 200])
        floods.append(Flood(simulation, owner, length, answer, drawn.choice([26, 10**6])))
    while min(flood.answered for flood in floods) < 2:
        for flood in floods:
            flood.go_on()
        simulation.step()
        assert simulation.steps < 2500
    simulation.manager.check()


def test_a_prompt_that_fits_overtakes_one_that_does_not() -> None:
    """Regression: running and waiting requests blocked and preempted each other for ever."""
    simulation = Simulation(("a", "b", "c"), caching=False)
    large = simulation.submit("a", words(1, 5000))
    while large.sequence.num_computed_tokens < 1500:
        simulation.step()
    other = simulation.submit("b", words(2, 5000))
    small = simulation.submit("c", words(3, 60))
    for _ in range(8):
        simulation.step()
    assert small.finish_reason is not None
    for _ in range(200):
        if simulation.scheduler.waiting or simulation.scheduler.running:
            simulation.step()
    assert large.finish_reason is not None and other.finish_reason is not None
    assert not simulation.scheduler.num_preemptions


def test_turns_move_once_for_a_past_lack_of_space() -> None:
    """Regression: they moved with each request of others while the queue hid the owner's."""
    simulation = Simulation(("b", "c"), blocks=2000)
    for at in range(14):
        simulation.submit("b", words(at, 8), answer=1000)
    simulation.step()
    first, second = (simulation.submit("c", words(at, 8), answer=1000) for at in (20, 21))
    simulation.step()
    assert first in simulation.scheduler.running and second in simulation.scheduler.waiting
    simulation.end(first)
    turns = []
    for _ in range(2):
        simulation.fair._now += 10 * TOKENS
        simulation.fair.catch_up()
        turns.append(second.turn)
    assert turns[0] == turns[1] > 10 * TOKENS


def test_an_owner_far_ahead_is_not_moved_with_one_behind() -> None:
    """Regression: `now` moved along when such an owner was next, and others twice as far.

    Turns doubled each time.
    """
    simulation = Simulation(("a", "b"))
    simulation.manager.shares.set("a", 0.001)
    ahead = [simulation.submit("a", words(n, 300), 300) for n in range(3)]
    behind = simulation.submit("b", words(50, 300))
    simulation.end(ahead[0])
    fair, turn = simulation.fair, ahead[1].turn
    fair._now = turn / 2
    assert turn > fair._now + fair._step + fair._credit
    for owner in fair._owners.values():
        owner.lacks_space = True
    assert fair.catch_up()
    assert ahead[1].turn == turn > behind.turn > fair._now
