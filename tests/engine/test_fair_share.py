"""Owners who share an engine: a flood of one leaves another what it has alone.

No model and no clock: a step costs a moment and a moment for each token in it, and time is the sum.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import count

import pytest

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence
from headstart.engine.config import EngineConfig
from headstart.engine.limits.fair_share import FairShare
from headstart.engine.params import SamplingParams
from headstart.engine.request import Request, RequestGroup
from headstart.engine.sampling.sampler import SampledToken, SamplingState
from headstart.engine.scheduler import Scheduler
from headstart.engine.text.detokenizer import Detokenizer
from headstart.engine.text.output import OutputText

BLOCK, BLOCKS, TOKENS, RUNNING = 16, 400, 128, 16
STEP = 20.0  # what a step costs besides its tokens


class Simulation:
    """A scheduler that is asked by owners."""

    def __init__(
        self,
        owners: tuple[str, ...],
        blocks: int = BLOCKS,
        running: int = RUNNING,
        caching: bool = True,
    ) -> None:
        cache = CacheConfig(
            num_blocks=blocks,
            block_size=BLOCK,
            eviction="fair-lru",
            enable_prefix_caching=caching,
        )
        config = EngineConfig(max_num_batched_tokens=TOKENS, max_num_seqs=running)
        self.manager = KVCacheManager(cache)
        for owner in owners:
            self.manager.shares.set(owner, 1.0)
        self.fair = FairShare(self.manager, config)
        self.scheduler = Scheduler(
            self.manager,
            max_tokens=TOKENS,
            max_running=running,
            max_bypassed=8,
            limits=[self.fair],
        )
        self.now = 0.0
        self.idle_steps = 0
        self._checked = 0.0
        self._names = count()

    def ask(
        self, salt: str | None, tokens: list[int], answer: int = 4, priority: int = 0
    ) -> Request:
        name = f"r{next(self._names)}"
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        group = RequestGroup(name, None, tokens, params, self.now, priority=priority)
        request = Request(
            group,
            0,
            TokenSequence(name, tokens, salt=salt),
            SamplingState(params, tokens, [], None, frozenset()),
            OutputText(Detokenizer(None), params, frozenset(), 10**6),
        )
        group.requests = [request]
        self.fair.queue(request)
        self.scheduler.add(request)
        return request

    def end(self, request: Request) -> None:
        """As an engine does when a client is gone."""
        self.scheduler.remove(request)
        request.finish_reason = "abort"

    def fail(self, live: list[Request]) -> None:
        """A step that does not come about."""
        assert self.scheduler.schedule().scheduled
        self.manager.fail_step()
        self.scheduler.restart(live)

    def step(self) -> int:
        """Run a step; how many tokens were computed."""
        batch = self.scheduler.schedule()
        tokens = sum(part.stop - part.start for part in batch.scheduled)
        self.now += STEP + tokens
        self.manager.commit_step()
        for part in batch.scheduled:
            if part.samples:
                part.request.append(SampledToken(7, None, ()), self.now)
                if part.request.finish_reason is not None:
                    self.scheduler.remove(part.request)
        if self.now > self._checked + 5000:
            self._checked = self.now
            self.manager.check()
        self.idle_steps += not tokens
        assert self.idle_steps < 10, "nothing runs any more"
        return tokens


class Asker:
    """Asks questions about documents, one at a time, with pauses; notes what it gets."""

    def __init__(self, simulation: Simulation, salt: str) -> None:
        self._simulation = simulation
        self._salt = salt
        self._random = random.Random(5)
        self._documents = [self._words(300) for _ in range(4)]
        self._open: Request | None = None
        self._next = 0.0
        self.waits: list[float] = []
        self.hit = self.asked = 0

    def _words(self, number: int) -> list[int]:
        return [self._random.randrange(10**6) for _ in range(number)]

    def go_on(self) -> None:
        """Ask when it is time to; called before each step."""
        if self._open is None and self._simulation.now >= self._next:
            tokens = self._documents[len(self.waits) % 4] + self._words(150)
            self._open = self._simulation.ask(self._salt, tokens)
        elif self._open is not None and self._open.finish_reason is not None:
            done, self._open = self._open, None
            assert done.first_token_time is not None
            self.waits.append(done.first_token_time - done.group.arrival_time)
            self.hit += done.num_cached_tokens
            self.asked += len(done.group.prompt_token_ids)
            self._next = self._simulation.now + self._random.expovariate(1 / 300)


class Flood:
    """Keeps many requests waiting, of which no two have anything in common.

    But their first tokens, if there are few to choose from.
    """

    def __init__(
        self, simulation: Simulation, salt: str, length: int, answer: int, letters: int = 10**6
    ) -> None:
        self._simulation = simulation
        self._salt, self._length, self._answer = salt, length, answer
        self._letters = letters
        self._random = random.Random(6)
        self._open: deque[Request] = deque()
        self.answered = 0

    def go_on(self) -> None:
        while self._open and self._open[0].finish_reason is not None:
            self._open.popleft()
            self.answered += 1
        while len(self._open) < 100:
            words = [self._random.randrange(self._letters) for _ in range(self._length)]
            salt = f"{self._salt}/{self._random.randrange(3)}"
            self._open.append(self._simulation.ask(salt, words, self._answer))


def run(*, flood: tuple[int, ...] | None, owners: tuple[str, ...]) -> tuple[float, float]:
    """Hit rate, and the 99th percentile of the wait for the first token, of one owner."""
    simulation = Simulation(owners)
    asker = Asker(simulation, "a")
    others = [Flood(simulation, "b", *flood)] if flood is not None else []
    while len(asker.waits) < 54:
        for one in (asker, *others):
            one.go_on()
        if simulation.scheduler.waiting or simulation.scheduler.running:
            simulation.step()
        else:
            simulation.now += STEP
    assert all(one.answered for one in others), "the flood itself is starved"
    assert not simulation.scheduler.num_preemptions
    waits = sorted(asker.waits[4:])  # when every document was read once
    return asker.hit / asker.asked, waits[len(waits) * 99 // 100]


@pytest.mark.parametrize("flood", [(50, 4), (450, 4), (450, 4, 26), (2000, 4), (20, 200)])
def test_a_flood_leaves_another_owner_its_hits_and_its_time(flood: tuple[int, ...]) -> None:
    hits_alone, wait_alone = run(flood=None, owners=("a", "b"))
    hits, wait = run(flood=flood, owners=("a", "b"))
    print(f"flood {flood}: hits {hits:.3f} of {hits_alone:.3f}, p99 {wait:.0f} of {wait_alone:.0f}")
    assert hits_alone > 0.5 and hits >= hits_alone - 0.05
    assert wait <= 2 * wait_alone


def test_a_prompt_that_a_hit_puts_before_its_turn_takes_nobody_elses() -> None:
    """Time went on to its turn, at the end of a flood: newcomers came after most of that flood."""
    simulation = Simulation(("a", "b"))
    head = list(range(BLOCK))
    first = simulation.ask("b", head)
    while first.finish_reason is None:
        simulation.step()
    for at in range(15):
        simulation.ask("b", [at + 100] * 500)
    hit = simulation.ask("b", [*head, *range(500)])
    simulation.step()
    assert hit in simulation.scheduler.running
    mine = simulation.ask("a", [7] * 64)
    simulation.step()
    assert mine.first_token_time is not None


def test_a_flood_of_long_answers_takes_no_blocks_that_are_kept_for_others() -> None:
    """Only its prompts were counted: its answers then took every block, and what others had."""
    hits_alone, wait_alone = run(flood=None, owners=("a", "b"))
    hits, wait = run(flood=(300, 300), owners=("a", "b"))
    print(f"hits {hits:.3f} of {hits_alone:.3f}, p99 {wait:.0f} of {wait_alone:.0f}")
    assert hits >= hits_alone - 0.1  # 0.04 where answers are not counted
    assert wait <= 10 * wait_alone  # 30


def test_without_owners_the_flood_is_felt() -> None:
    """Even the smallest of those above, or that test could not fail."""
    hits_alone, wait_alone = run(flood=None, owners=())
    hits, wait = run(flood=(50, 4), owners=())
    assert wait > 4 * wait_alone and hits < hits_alone - 0.05


def test_two_floods_get_what_they_weigh() -> None:
    simulation = Simulation(("a", "b"))
    simulation.manager.shares.set("b", 3.0)
    floods = {salt: Flood(simulation, salt, 200, 4) for salt in ("a", "b")}
    while sum(flood.answered for flood in floods.values()) < 200:
        for flood in floods.values():
            flood.go_on()
        simulation.step()
    assert floods["b"].answered / floods["a"].answered == pytest.approx(3, rel=0.15)


def test_who_left_the_queue_has_had_nothing() -> None:
    """A flood whose clients went away does not put its owner behind the others."""
    simulation = Simulation(("a", "b"))
    for request in [simulation.ask("a", [at, *range(1000)]) for at in range(50)]:
        simulation.end(request)
    theirs = [simulation.ask("b", [at, *range(400)]) for at in range(8)]
    simulation.step()
    mine = simulation.ask("a", [7] * 64)
    while mine.finish_reason is None:
        simulation.step()
    assert [one.finish_reason for one in theirs].count(None) >= 6


def test_a_priority_goes_before_turns() -> None:
    simulation = Simulation(("a", "b"))
    slow = simulation.ask("b", list(range(400)), priority=1)
    simulation.step()
    fast = [simulation.ask("a", [at] * 400) for at in range(5)]
    while slow.finish_reason is None:
        simulation.step()
    assert all(one.finish_reason for one in fast)


def test_without_owners_turns_are_those_of_the_queue() -> None:
    simulation = Simulation(())
    requests = [simulation.ask(salt, [at] * 50) for at, salt in enumerate(["x", None, "y", "x"])]
    assert {request.turn for request in requests} == {0.0}
    assert list(simulation.scheduler.waiting) == requests
    assert not any(simulation.fair.applies(request) for request in requests)


def test_nothing_is_remembered_of_requests_that_are_gone() -> None:
    simulation = Simulation(("a",))
    for at in range(500):
        request = simulation.ask("a", [at] * 20, answer=1)
        if at % 3:
            simulation.step()
        if request.finish_reason is None:
            simulation.end(request)
    [owner] = simulation.fair._owners.values()
    assert len(owner.order) + len(simulation.fair._guesses) + len(owner.unread) < 300


@pytest.mark.parametrize("is_answered", [True, False])
def test_an_owner_pays_once_for_a_prompt_whose_step_failed(is_answered: bool) -> None:
    """And nothing for one that is gone before a step lets it in that comes about."""
    had = []
    for failures in (0, 2):
        simulation = Simulation(("a", "b"))
        first = simulation.ask("a", list(range(64)))
        simulation.ask("b", list(range(64)))
        while first.finish_reason is None:
            simulation.step()
        second = simulation.ask("a", list(range(80)))
        for _ in range(failures):
            simulation.fail([second])
        if not is_answered:
            simulation.end(second)
        third = simulation.ask("b", list(range(100, 200)))
        while third.finish_reason is None or second.finish_reason is None:
            simulation.step()
        had.append(simulation.fair._owners["a"].had)
        assert not simulation.fair._admissions
    assert had[0] == had[1]


def test_who_asked_before_he_was_made_an_owner_is_not_limited() -> None:
    """The scheduler broke at the next restart: his request had no turn among those of owners."""
    simulation = Simulation(("a",))
    early = simulation.ask("b", [7] * 64)
    simulation.manager.shares.set("b", 1.0)
    simulation.fail([early])
    simulation.step()
    late = simulation.ask("b", [8] * 64)
    while late.finish_reason is None:
        simulation.step()
    assert early.finish_reason is not None


@pytest.mark.parametrize(("blocks", "running"), [(BLOCKS, 1), (70, RUNNING)])
def test_a_prompt_does_not_wait_for_one_that_could_only_run_in_its_place(
    blocks: int, running: int
) -> None:
    """It gave way, was let in again first, and began anew: for ever, where nothing is cached."""
    simulation = Simulation(("a", "b"), blocks, running, caching=False)
    requests = [simulation.ask(owner, list(range(1000))) for owner in ("a", "b")]
    for _ in range(100):
        if simulation.scheduler.waiting or simulation.scheduler.running:
            simulation.step()
    assert all(one.finish_reason for one in requests)
    assert simulation.scheduler.num_preemptions == 0


def test_a_prompt_fits_beside_those_that_hold_its_beginning() -> None:
    simulation = Simulation(("a", "b"), blocks=70)
    head = list(range(1000))
    first = simulation.ask("b", [*head, 1], answer=50)
    while first.sequence.num_computed_tokens < len(head):
        simulation.step()
    free = simulation.manager.num_free_blocks * BLOCK
    assert free < len(head)
    assert simulation.fair._fits(simulation.ask("b", [*head, 2]))
    assert not simulation.fair._fits(simulation.ask("b", [9, *head]))
    assert not simulation.fair._fits(simulation.ask("b", [*head, *range(free + BLOCK)]))


def test_what_a_prompt_hits_when_it_runs_again_costs_it_no_rank() -> None:
    simulation = Simulation(("a", "b"))
    request = simulation.ask("a", list(range(640)))
    waiting = simulation.fair._rank(request)
    for _ in range(2):
        simulation.step()
    simulation.scheduler.preempt_all()
    simulation.scheduler.schedule()
    sequence = request.sequence
    assert sequence.num_computed_tokens == 3 * TOKENS and sequence.num_reused == 2 * TOKENS // BLOCK
    assert simulation.fair._rank(request) == (waiting[0], waiting[1] + TOKENS)
