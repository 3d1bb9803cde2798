"""The index under lost, late and repeated batches, restarts and snapshots, against real caches."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headstart.cache import BlockHasher, TokenSequence
from headstart.cluster.events import EventBatch
from headstart.cluster.index import ReplicaIndex
from tests.cluster.feeds import BLOCK, Engine

REPLICAS = 3
WHICH = st.integers(0, REPLICAS - 1)
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=10)


class LossyFeeds(RuleBasedStateMachine):
    """Engines serve prompts; their batches arrive, arrive twice, are lost, or are overtaken."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = [Engine(replica) for replica in range(REPLICAS)]
        self.index = ReplicaIndex(REPLICAS)
        self.latest: dict[int, EventBatch] = {}  # the newest that arrived, of each replica
        self.snapshots: list[EventBatch] = []  # not delivered yet
        self.removed: set[int] = set()  # removed replicas without events since

    def arrive(self, batch: EventBatch | None) -> None:
        if batch is None:
            return
        self.removed.discard(batch.replica)
        is_current = self.index.apply(batch)
        assert is_current == self.index.is_current(batch.replica)
        before = self.latest.get(batch.replica)
        is_newer = before is None or (batch.epoch, batch.number) > (before.epoch, before.number)
        if is_newer:
            self.latest[batch.replica] = batch

    @rule(which=WHICH, tokens=PROMPT, times=st.sampled_from([0, 1, 1, 1, 2]))
    def serve(self, which: int, tokens: list[int], times: int) -> None:
        batch = self.engines[which].serve(tokens)
        for _ in range(times):
            self.arrive(batch)

    @rule(which=WHICH, is_lost=st.booleans())
    def reset(self, which: int, is_lost: bool) -> None:
        batch = self.engines[which].reset()
        self.arrive(None if is_lost else batch)

    @rule(which=WHICH)
    def restart(self, which: int) -> None:
        self.engines[which].start()

    @rule(which=WHICH)
    def take_snapshot(self, which: int) -> None:
        if self.engines[which].held:
            self.snapshots.append(self.engines[which].publisher.snapshot())

    @rule()
    def deliver_snapshot(self) -> None:
        if self.snapshots:
            snapshot = self.snapshots.pop(0)
            if snapshot.epoch == self.engines[snapshot.replica].epoch:  # its connection is up
                self.arrive(snapshot)

    @rule(which=WHICH, is_restarted=st.booleans())
    def remove(self, which: int, is_restarted: bool) -> None:
        """Remove a replica. Another one, or itself after a restart, then gets its number."""
        self.index.remove(which)
        self.removed.add(which)
        self.latest.pop(which, None)
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.replica != which]
        if is_restarted:
            self.engines[which].start()
        elif self.engines[which].held:
            self.arrive(self.engines[which].publisher.snapshot())

    @invariant()
    def current_replicas_match_their_latest_batch(self) -> None:
        names = BlockHasher(BLOCK, "model")
        for tokens in ([0] * 10, [1] * 10, [0, 1] * 5, [0, 0, 1, 1, 0, 0]):
            sequence = TokenSequence("lookup", tokens)
            prompt = names.of_keys(sequence.namespace, sequence.cut(BLOCK))
            match = self.index.match(self.engines[0].keys(tokens))
            assert match.cached == match.expected == match.stored
            assert not any(match.stored[replica] for replica in self.removed)
            for replica, batch in self.latest.items():
                if self.index.is_current(replica):
                    held = self.engines[replica].truth[batch.epoch, batch.number]
                    depth = next((i for i, name in enumerate(prompt) if name not in held), None)
                    assert match.cached[replica] == (len(prompt) if depth is None else depth)

    def teardown(self) -> None:
        """After any loss, a snapshot makes the index equal to the managers' own lookups."""
        for engine in self.engines:
            self.index.apply(engine.publisher.snapshot())
            assert self.index.is_current(engine.replica)
            for tokens in ([0] * 11, [1] * 11, [0, 1] * 5 + [0], [0, 0, 1, 1, 0]):
                depths = self.index.match(engine.keys(tokens)).cached
                assert depths[engine.replica] == engine.depth(tokens)
        for engine in self.engines:
            self.index.remove(engine.replica)
        while self.index.sweep():
            pass
        assert len(self.index) == 0


TestLossyFeeds = LossyFeeds.TestCase
TestLossyFeeds.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
