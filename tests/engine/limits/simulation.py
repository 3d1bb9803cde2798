"""Owners that send requests to a scheduler, without an engine: one sends questions, one floods.

There is no model and no clock: a step has a fixed cost and a cost for each token in it, and time is
the sum.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import count

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence
from headstart.engine.config import EngineConfig
from headstart.engine.fair_share import FairShare
from headstart.engine.params import SamplingParams
from headstart.engine.request import Request, RequestGroup
from headstart.engine.sampling import SampledToken, SamplingState
from headstart.engine.scheduler import Scheduler
from headstart.frontend.text import Detokenizer, OutputText

BLOCK, BLOCKS, TOKENS, RUNNING = 16, 400, 128, 16
STEP = 20.0  # the cost of a step without its tokens


class Simulation:
    """A scheduler that gets requests of owners."""

    def __init__(
        self,
        owners: tuple[str, ...],
        blocks: int = BLOCKS,
        running: int = RUNNING,
        caching: bool = True,
        tokens: int = TOKENS,
    ) -> None:
        cache = CacheConfig(
            num_blocks=blocks,
            block_size=BLOCK,
            eviction="fair-lru",
            enable_prefix_caching=caching,
        )
        config = EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=running)
        self.manager = KVCacheManager(cache)
        for owner in owners:
            self.manager.shares.set(owner, 1.0)
        self.fair = FairShare(self.manager, config)
        self.scheduler = Scheduler(
            self.manager,
            config,
            limits=[self.fair],
            max_prompt_tokens=self.fair.max_prompt_tokens,
        )
        self.now = 0.0
        self.steps = 0
        self.idle_steps = 0
        self._checked = 0.0
        self._names = count()

    def submit(
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
        if self.fair.catch_up():
            self.scheduler.reorder()
        self.fair.queue(request)
        self.scheduler.add(request)
        return request

    def end(self, request: Request) -> None:
        """Remove a request, as an engine does when its client disconnects."""
        self.scheduler.remove(request)
        request.finish_reason = "abort"

    def fail(self) -> None:
        """Schedule a step and let it fail."""
        assert self.scheduler.schedule().scheduled
        self.manager.fail_step()
        self.scheduler.restart()

    def step(self) -> int:
        """Run a step; return how many tokens were computed."""
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
        self.steps += 1
        self.idle_steps += not tokens
        assert self.idle_steps < 10, "nothing runs any more"
        return tokens


class Client:
    """A client that sends questions about documents with pauses, and records hits and waits."""

    def __init__(self, simulation: Simulation, salt: str) -> None:
        self._simulation = simulation
        self._salt = salt
        self._random = random.Random(5)
        self._documents = [self._words(300) for _ in range(4)]
        self._open: Request | None = None
        self._next = 0.0
        self.waits: list[float] = []
        self.hit = self.prompt_tokens = 0

    def _words(self, number: int) -> list[int]:
        return [self._random.randrange(10**6) for _ in range(number)]

    def go_on(self) -> None:
        """Send the next question when it is time; called before each step."""
        if self._open is None and self._simulation.now >= self._next:
            tokens = self._documents[len(self.waits) % 4] + self._words(150)
            self._open = self._simulation.submit(self._salt, tokens)
        elif self._open is not None and self._open.finish_reason is not None:
            done, self._open = self._open, None
            assert done.first_token_time is not None
            self.waits.append(done.first_token_time - done.group.arrival_time)
            self.hit += done.num_cached_tokens
            self.prompt_tokens += len(done.group.prompt_token_ids)
            self._next = self._simulation.now + self._random.expovariate(1 / 300)


class Flood:
    """Many waiting requests without anything in common, apart from accidental first tokens."""

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
            self._open.append(self._simulation.submit(salt, words, self._answer))


def run(
    *, flood: tuple[int, ...] | None, owners: tuple[str, ...], uncounted: int = 4
) -> tuple[float, float]:
    """Return an owner's hit rate, and the 99th percentile of its waits for the first token.

    flood: the length of its prompts and answers, and the size of its vocabulary. uncounted: the
    number of first questions that do not count; after four, every document was read once.
    """
    simulation = Simulation(owners)
    client = Client(simulation, "a")
    others = [Flood(simulation, "b", *flood)] if flood is not None else []
    while len(client.waits) < uncounted + 50:
        if len(client.waits) < uncounted:
            client.hit = client.prompt_tokens = 0
        for one in (client, *others):
            one.go_on()
        if simulation.scheduler.waiting or simulation.scheduler.running:
            simulation.step()
        else:
            simulation.now += STEP
    assert all(one.answered for one in others), "the flood itself is starved"
    assert not simulation.scheduler.num_preemptions
    waits = sorted(client.waits[uncounted:])
    return client.hit / client.prompt_tokens, waits[len(waits) * 99 // 100]
