"""The server's record of replicas that are added and removed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headstart.cluster import EventBatch
from headstart.cluster.events import DISK
from headstart.cluster.index import PrefixKey, prefix_keys, unpack_keys
from headstart.cluster.options import ReplicaConfig
from headstart.cluster.router import Router, RouteRequest
from headstart.cluster.serving import dispatch
from headstart.cluster.serving.dispatch import Dispatcher
from headstart.engine.metrics import Counter
from headstart.errors import ConfigError
from tests.cluster.tables import expectations

BLOCK = 16
NAMES = [bytes([at]) * 32 for at in range(64)]
KEYS = prefix_keys(NAMES)  # type: ignore[arg-type]


def request(name: str, keys: Sequence[PrefixKey] = KEYS) -> RouteRequest:
    return RouteRequest(name, keys, len(keys) * BLOCK + 1, BLOCK)


def books(*replicas: str, most: int = 2) -> Dispatcher:
    dispatcher = Dispatcher("expected", most)
    dispatcher.set_replicas(replicas)
    return dispatcher


def send(dispatcher: Dispatcher, name: str, keys: Sequence[PrefixKey] = KEYS) -> str | None:
    dispatcher.expect(request(name, keys))
    return dispatcher.choose(name)


def router_of(dispatcher: Dispatcher) -> Router:
    return dispatcher._router


def num_expected(dispatcher: Dispatcher) -> int:
    return len(expectations(router_of(dispatcher).index))


def stored(number: int, names: list[bytes], epoch: int = 1) -> EventBatch:
    return EventBatch(0, epoch, number, stored=b"".join(names))


def test_a_request_goes_to_the_replica_that_reported_its_prompt() -> None:
    for holder in ("a", "b"):
        dispatcher = books("a", "b")
        assert dispatcher.apply(holder, stored(0, NAMES))
        assert send(dispatcher, "one") == holder
        assert dispatcher.cached_tokens(request("?"))[holder] == 64 * BLOCK


@pytest.mark.parametrize("shares", [True, False])
def test_loading_from_a_shared_store_is_preferred_to_waiting(shares: bool) -> None:
    """One replica has the blocks and is busy; the other is idle, and loads them from a store."""
    dispatcher = Dispatcher("expected", 2, shares_store=shares)
    dispatcher.set_replicas(["a", "b"])
    dispatcher.apply("a", replace(stored(0, NAMES), tier=DISK))
    assert dispatcher.cached_tokens(request("?")) == {"a": 0, "b": 0}, "a pool has none"
    new = [bytes([100 + i]) * 32 for i in range(64)]
    dispatcher.apply("a", stored(0, new))
    waits = prefix_keys(new + [bytes([201]) + bytes([i]) * 31 for i in range(64)])  # type: ignore[arg-type]
    assert send(dispatcher, "waits", waits) == "a"
    assert send(dispatcher, "one") == ("b" if shares else "a")


def test_a_request_of_a_removed_replica_is_moved_and_counted_once() -> None:
    dispatcher = books("a", "b")
    first = send(dispatcher, "one")
    dispatcher.set_replicas([name for name in ("a", "b") if name != first])
    assert dispatcher.choose("one") not in (None, first)
    dispatcher.finish("one")
    assert [load.active for load in router_of(dispatcher).loads] == [0] * 4
    assert router_of(dispatcher).index.match(KEYS).expected == [0] * 4
    while router_of(dispatcher).index.sweep():
        pass
    assert num_expected(dispatcher) == 0


def test_a_request_that_its_replica_never_accepts_is_moved() -> None:
    """Regression: a hanging replica got it again for two minutes, until Ray replaced it."""
    dispatcher = books("a", "b")
    dispatcher.apply("b", stored(0, NAMES))
    chosen = [send(dispatcher, "one"), *(dispatcher.choose("one") for _ in range(dispatch._TRIES))]
    assert chosen == ["b"] * dispatch._TRIES + ["a"]
    assert send(dispatcher, "two") == "b"
    alone = books("a")
    assert {send(alone, "one"), *(alone.choose("one") for _ in range(9))} == {"a"}


def test_a_silent_replica_gets_no_request_until_it_reports() -> None:
    dispatcher = books("a", "b")
    dispatcher.apply("b", stored(0, NAMES))
    dispatcher.mark_silent("b")
    assert {send(dispatcher, "one"), *(dispatcher.choose("one") for _ in range(9))} == {"a"}
    dispatcher.mark_alive("b")
    assert send(dispatcher, "two") == "b"


def test_a_removed_replicas_blocks_are_forgotten_and_its_number_reused() -> None:
    dispatcher = books("a")
    for turn in range(10):  # more than there are numbers
        name = f"replica-{turn}"
        dispatcher.set_replicas([name])
        assert dispatcher.cached_tokens(request("?")) == {name: 0}
        assert dispatcher.apply(name, stored(0, NAMES, epoch=turn))
        assert dispatcher.cached_tokens(request("?")) == {name: 64 * BLOCK}


def test_reports_of_a_dead_replica_are_ignored() -> None:
    dispatcher = books("a")
    assert dispatcher.apply("gone", stored(0, NAMES))
    dispatcher.note_metrics("gone", [Counter("n", {}, 1)])
    assert dispatcher.cached_tokens(request("?")) == {"a": 0} and dispatcher.metrics == {}


def test_a_gap_is_reported_and_a_snapshot_closes_it() -> None:
    dispatcher = books("a")
    assert dispatcher.apply("a", stored(0, NAMES[:1]))
    assert not dispatcher.apply("a", stored(2, NAMES[2:3]))
    whole = EventBatch(0, 1, 2, stored=b"".join(NAMES[:3]), cleared=True, snapshot=True)
    assert dispatcher.apply("a", whole)
    assert dispatcher.cached_tokens(request("?")) == {"a": 3 * BLOCK}


def test_no_replica_is_chosen_without_replicas_or_for_unknown_requests() -> None:
    assert send(books(), "one") is None
    assert books("a").choose("unknown") is None


def test_a_change_of_replicas_is_reported_once() -> None:
    dispatcher, changes = books("a"), []
    dispatcher.on_change = lambda: changes.append(dispatcher.replicas)
    dispatcher.set_replicas(["a"])
    dispatcher.set_replicas(["a", "b"])
    dispatcher.set_replicas(["b"])
    assert changes == [["a", "b"], ["b"]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"replicas": 0}, "replicas is 0"),
        (
            {"replicas": 4, "max_replicas": 2},
            "max_replicas is 2; allowed: at least 4 .the value of replicas.",
        ),
        ({"replicas": 1, "routing": "by-magic"}, "routing is 'by-magic'"),
        ({"replicas": 1, "replica_cpus": 0.0}, "replica_cpus is 0.0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ReplicaConfig(**options)  # type: ignore[arg-type]


def test_there_are_no_replicas_by_default() -> None:
    assert not ReplicaConfig().is_wanted
    assert (ReplicaConfig(max_replicas=4).least, ReplicaConfig(max_replicas=4).most) == (1, 4)


def test_a_request_is_sent_before_its_blocks_are_noted() -> None:
    dispatcher = books("a", "b")
    noted: list[bool] = []
    dispatcher.on_route = lambda: noted.append(bool(num_expected(dispatcher)))
    assert send(dispatcher, "one") is not None
    assert noted == [False]
    dispatcher.catch_up()
    assert num_expected(dispatcher) == len(KEYS)


def test_a_replica_may_be_removed_while_its_snapshot_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of its snapshot does not apply to the replica that has its number now."""
    dispatcher, packed = books("a"), random.Random(0).randbytes(32 * 10_000)
    monkeypatch.setattr(
        dispatch, "time", SimpleNamespace(sleep=lambda seconds: dispatcher.set_replicas(["b"]))
    )
    assert dispatcher.apply("a", EventBatch(0, 1, 0, stored=packed, cleared=True, snapshot=True))
    monkeypatch.undo()
    assert dispatcher.replicas == ["b"]
    assert router_of(dispatcher).index.match(unpack_keys(packed)).cached == [0] * 4
    while router_of(dispatcher).index.sweep():
        pass
    assert len(router_of(dispatcher).index) == 0
