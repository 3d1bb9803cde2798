"""The server's books of replicas that come and go."""

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
    made = Dispatcher("expected", most)
    made.set_replicas(replicas)
    return made


def send(made: Dispatcher, name: str, keys: Sequence[PrefixKey] = KEYS) -> str | None:
    made.expect(request(name, keys))
    return made.choose(name)


def router_of(made: Dispatcher) -> Router:
    return made._router


def num_expected(made: Dispatcher) -> int:
    return len(expectations(router_of(made).index))


def stored(number: int, names: list[bytes], epoch: int = 1) -> EventBatch:
    return EventBatch(0, epoch, number, stored=b"".join(names))


def test_a_request_goes_to_the_replica_that_says_it_holds_the_prompt() -> None:
    for holder in ("a", "b"):
        made = books("a", "b")
        assert made.apply(holder, stored(0, NAMES))
        assert send(made, "one") == holder
        assert made.held(request("?"))[holder] == 64 * BLOCK


@pytest.mark.parametrize("shares", [True, False])
def test_what_is_in_a_store_is_loaded_by_whoever_can_before_it_is_computed(shares: bool) -> None:
    """One has the store's blocks and is busy; the other is idle, and loads them if it can."""
    made = Dispatcher("expected", 2, shares_store=shares)
    made.set_replicas(["a", "b"])
    made.apply("a", replace(stored(0, NAMES), tier=DISK))
    assert made.held(request("?")) == {"a": 0, "b": 0}, "a pool has none"
    new = [bytes([100 + at]) * 32 for at in range(64)]
    made.apply("a", stored(0, new))
    waits = prefix_keys(new + [bytes([201]) + bytes([at]) * 31 for at in range(64)])  # type: ignore[arg-type]
    assert send(made, "waits", waits) == "a"
    assert send(made, "one") == ("b" if shares else "a")


def test_a_request_that_its_replica_did_not_take_is_sent_elsewhere_and_counted_once() -> None:
    made = books("a", "b")
    first = send(made, "one")
    made.set_replicas([name for name in ("a", "b") if name != first])
    assert made.choose("one") not in (None, first)
    made.finish("one")
    assert [load.active for load in router_of(made).loads] == [0] * 4
    assert router_of(made).index.match(KEYS).expected == [0] * 4
    while router_of(made).index.sweep():
        pass
    assert num_expected(made) == 0


def test_a_request_that_its_replica_takes_at_no_try_is_sent_elsewhere() -> None:
    """One that hung got it again and again, for the two minutes until Ray replaced it."""
    made = books("a", "b")
    made.apply("b", stored(0, NAMES))
    chosen = [send(made, "one"), *(made.choose("one") for _ in range(dispatch._TRIES))]
    assert chosen == ["b"] * dispatch._TRIES + ["a"]
    assert send(made, "two") == "b"
    alone = books("a")
    assert {send(alone, "one"), *(alone.choose("one") for _ in range(9))} == {"a"}


def test_a_silent_replica_gets_no_request_until_it_is_heard() -> None:
    made = books("a", "b")
    made.apply("b", stored(0, NAMES))
    made.note_silent("b")
    assert {send(made, "one"), *(made.choose("one") for _ in range(9))} == {"a"}
    made.note_heard("b")
    assert send(made, "two") == "b"


def test_what_a_replica_held_is_forgotten_when_it_is_gone_and_its_number_used_again() -> None:
    made = books("a")
    for turn in range(10):  # more than there are numbers
        name = f"replica-{turn}"
        made.set_replicas([name])
        assert made.held(request("?")) == {name: 0}
        assert made.apply(name, stored(0, NAMES, epoch=turn))
        assert made.held(request("?")) == {name: 64 * BLOCK}


def test_what_a_dead_replica_tells_is_ignored() -> None:
    made = books("a")
    assert made.apply("gone", stored(0, NAMES))
    made.note_metrics("gone", [Counter("n", {}, 1)])
    assert made.held(request("?")) == {"a": 0} and made.metrics == {}


def test_a_gap_is_told_and_a_snapshot_closes_it() -> None:
    made = books("a")
    assert made.apply("a", stored(0, NAMES[:1]))
    assert not made.apply("a", stored(2, NAMES[2:3]))
    whole = EventBatch(0, 1, 2, stored=b"".join(NAMES[:3]), cleared=True, snapshot=True)
    assert made.apply("a", whole)
    assert made.held(request("?")) == {"a": 3 * BLOCK}


def test_nobody_is_chosen_where_nobody_runs_or_nobody_asks() -> None:
    assert send(books(), "one") is None
    assert books("a").choose("unknown") is None


def test_a_change_of_replicas_is_told_once() -> None:
    made, told = books("a"), []
    made.on_change = lambda: told.append(made.replicas)
    made.set_replicas(["a"])
    made.set_replicas(["a", "b"])
    made.set_replicas(["b"])
    assert told == [["a", "b"], ["b"]]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"replicas": 0}, "replicas is 0"),
        (
            {"replicas": 4, "max_replicas": 2},
            "max_replicas is 2; allowed: at least replicas, which is 4",
        ),
        ({"replicas": 1, "routing": "by-magic"}, "routing is 'by-magic'"),
        ({"replicas": 1, "replica_cpus": 0.0}, "replica_cpus is 0.0"),
    ],
)
def test_options_that_cannot_be_are_told(given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ReplicaConfig(**given)  # type: ignore[arg-type]


def test_there_are_no_replicas_unless_asked_for() -> None:
    assert not ReplicaConfig().is_wanted
    assert (ReplicaConfig(max_replicas=4).least, ReplicaConfig(max_replicas=4).most) == (1, 4)


def test_a_request_is_on_its_way_before_what_it_computes_is_noted() -> None:
    made = books("a", "b")
    noted: list[bool] = []
    made.on_route = lambda: noted.append(bool(num_expected(made)))
    assert send(made, "one") is not None
    assert noted == [False]
    made.catch_up()
    assert num_expected(made) == len(KEYS)


def test_a_replica_may_go_while_its_snapshot_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of its snapshot does not apply to the replica that has its number now."""
    made, packed = books("a"), random.Random(0).randbytes(32 * 10_000)
    monkeypatch.setattr(
        dispatch, "time", SimpleNamespace(sleep=lambda seconds: made.set_replicas(["b"]))
    )
    assert made.apply("a", EventBatch(0, 1, 0, stored=packed, cleared=True, snapshot=True))
    monkeypatch.undo()
    assert made.replicas == ["b"]
    assert router_of(made).index.match(unpack_keys(packed)).cached == [0] * 4
    while router_of(made).index.sweep():
        pass
    assert len(router_of(made).index) == 0
