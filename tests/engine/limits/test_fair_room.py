"""Space among owners: the limit of an owner's running requests, and the order of waiting."""

from __future__ import annotations

import random

import pytest

from headstart.engine.fair_share import MEMORY
from headstart.engine.request import Request
from tests.engine.limits.simulation import BLOCK, BLOCKS, TOKENS, Flood, Simulation


def words(seed: int, count: int) -> list[int]:
    """So many words that no other seed has."""
    return list(range(seed * 10**4, seed * 10**4 + count))


def finish(simulation: Simulation, request: Request) -> float:
    """Run until the request has ended; returns the simulated time that took."""
    before = simulation.now
    while request.finish_reason is None:
        simulation.step()
    return simulation.now - before


def flooded(blocks: int = BLOCKS) -> tuple[Simulation, Flood, list[int]]:
    """A flood of long answers, while another owner has cached a third of the pool."""
    simulation = Simulation(("a", "b"), blocks)
    document = words(1, blocks * BLOCK // 3)
    finish(simulation, simulation.ask("a", document))
    return simulation, Flood(simulation, "b", 300, 300), document


def go_on(simulation: Simulation, flood: Flood, tokens: int) -> None:
    """Run until so many tokens were computed."""
    while tokens > 0:
        flood.go_on()
        tokens -= simulation.step()


def test_running_requests_hold_nothing_that_another_has_cached_within_its_share() -> None:
    """Nine running requests filled the pool, and the document was evicted."""
    simulation, flood, document = flooded()
    go_on(simulation, flood, 2 * BLOCKS * BLOCK)
    again = simulation.ask("a", [*document, 7])
    finish(simulation, again)
    assert again.num_cached_tokens == len(document)
    assert flood.answered and not simulation.scheduler.num_preemptions


def test_what_an_owner_cached_long_ago_may_be_held_by_others() -> None:
    """Or one that works alone would have a share of the places for as long as the server runs."""
    simulation, flood, _ = flooded(BLOCKS // 2)
    go_on(simulation, flood, BLOCKS // 2 * BLOCK)
    beside = len(simulation.scheduler.running)
    go_on(simulation, flood, MEMORY * BLOCKS // 2 * BLOCK)
    assert len(simulation.scheduler.running) > beside
    simulation.manager.check()


def test_who_waits_for_a_place_saves_up_no_turns() -> None:
    """Each question put the flood's turns further back, until they filled the queue before it."""
    alone = Simulation(("a", "b"), blocks=2000)
    simulation = Simulation(("a", "b"), blocks=2000)
    flood = Flood(simulation, "b", 20, 1000)
    for at in range(60):
        prompt = words(at, 3 * TOKENS)
        flood.go_on()
        waits = finish(simulation, simulation.ask("a", prompt, answer=1))
        assert waits <= 2 * finish(alone, alone.ask("a", prompt, answer=1))
        ranks = [request.rank for request in simulation.scheduler.waiting]
        assert ranks == sorted(ranks)


def test_owners_who_wait_for_room_keep_their_order() -> None:
    """Their turns move together: who has had more for its weight still comes later."""
    simulation = Simulation(("a", "b", "c"), blocks=2000)
    simulation.manager.shares.set("b", 3.0)
    floods = {salt: Flood(simulation, salt, 20, 100) for salt in ("a", "b")}
    while sum(flood.answered for flood in floods.values()) < 120:
        for flood in floods.values():
            flood.go_on()
        finish(simulation, simulation.ask("c", words(simulation.steps, 200), answer=1))
    assert 2 < floods["b"].answered / floods["a"].answered < 4


@pytest.mark.parametrize("seed", range(4))
def test_nobody_starves_among_floods_of_all_kinds(seed: int) -> None:
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


def test_a_prompt_that_fits_goes_past_one_that_does_not() -> None:
    """Running requests and waiting prompts blocked one another and were preempted for ever."""
    simulation = Simulation(("a", "b", "c"), caching=False)
    large = simulation.ask("a", words(1, 5000))
    while large.sequence.num_computed_tokens < 1500:
        simulation.step()
    other = simulation.ask("b", words(2, 5000))
    small = simulation.ask("c", words(3, 60))
    for _ in range(8):
        simulation.step()
    assert small.finish_reason is not None
    for _ in range(200):
        if simulation.scheduler.waiting or simulation.scheduler.running:
            simulation.step()
    assert large.finish_reason is not None and other.finish_reason is not None
    assert not simulation.scheduler.num_preemptions


def test_turns_move_once_for_a_want_of_room_that_is_over() -> None:
    """They moved with each request of others for as long as the queue hid the owner's own."""
    simulation = Simulation(("b", "c"), blocks=2000)
    for at in range(14):
        simulation.ask("b", words(at, 8), answer=1000)
    simulation.step()
    first, second = (simulation.ask("c", words(at, 8), answer=1000) for at in (20, 21))
    simulation.step()
    assert first in simulation.scheduler.running and second in simulation.scheduler.waiting
    simulation.end(first)
    turns = []
    for _ in range(2):
        simulation.fair._now += 10 * TOKENS
        simulation.fair.catch_up()
        turns.append(second.turn)
    assert turns[0] == turns[1] > 10 * TOKENS


def test_who_is_far_ahead_is_not_moved_on_with_who_is_behind() -> None:
    """Now went along with him when he was next, and so the others twice as far: turns doubled."""
    simulation = Simulation(("a", "b"))
    simulation.manager.shares.set("a", 0.001)
    ahead = [simulation.ask("a", words(n, 300), 300) for n in range(3)]
    behind = simulation.ask("b", words(50, 300))
    simulation.end(ahead[0])
    fair, turn = simulation.fair, ahead[1].turn
    fair._now = turn / 2
    assert turn > fair._now + fair._step + fair._credit
    for owner in fair._owners.values():
        owner.lacks_space = True
    assert fair.catch_up()
    assert ahead[1].turn == turn > behind.turn > fair._now
