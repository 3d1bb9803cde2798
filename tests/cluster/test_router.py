"""The router's choice of a replica, and the balance of its counts."""

from collections import Counter
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cluster.rivals import RIVALS, CacheAware
from headstart.cluster import POLICIES, EventBatch, Router, make_policy
from headstart.cluster.events import DISK
from headstart.cluster.index import PrefixKey, prefix_keys
from headstart.cluster.router import RouteRequest
from headstart.errors import ConfigError, RequestError
from tests.cluster.tables import expectations

BLOCK = 16


def keys(prefix: int, count: int) -> list[PrefixKey]:
    """Return the keys of a prompt that no other prefix shares."""
    return [PrefixKey(prefix * 1000 + i) for i in range(count)]


def request(
    name: str, prefix: int, blocks: int = 64, own: int = 0, session: str | None = None
) -> RouteRequest:
    """Return a request for `blocks` blocks of a shared prefix and `own` blocks after them."""
    of_prompt = keys(prefix, blocks) + keys(10_000 + crc32(name.encode()), own)
    return RouteRequest(name, of_prompt, BLOCK * (blocks + own) + 1, BLOCK, session)


def store(router: Router, replica: int, prompt: list[bytes], tier: str = "pool") -> None:
    router.index.apply(EventBatch(replica, 0, 0, stored=b"".join(prompt), tier=tier))


def router(policy: str = "expected", replicas: int = 4) -> Router:
    chosen = RIVALS[policy]() if policy in RIVALS else make_policy(policy)
    return Router(replicas, chosen, first_rate=1000.0)


def test_a_prompt_is_routed_to_the_replica_that_cached_it() -> None:
    many = router()
    prompt = [bytes([number]) * 32 for number in range(1, 65)]
    store(many, 2, prompt)
    route_request = RouteRequest("a", prefix_keys(prompt), 64 * BLOCK + 5, BLOCK)
    assert many.route(route_request, 0.0) == 2
    assert many.loads[2].queued_tokens == 5


def test_a_burst_of_one_new_prefix_follows_its_first_request() -> None:
    many = router()
    first = many.route(request("first", 1, own=1), 0.0)
    others = [many.route(request(f"r{n}", 1, own=1), 0.01 * n) for n in range(10)]
    assert others == [first] * 10
    assert many.loads[first].queued_tokens == 65 * BLOCK + 1 + 10 * (BLOCK + 1)


def test_a_hot_prefix_spreads_once_its_replica_is_loaded() -> None:
    many = router()
    places = Counter(many.route(request(f"r{n}", 1, own=16), 0.0) for n in range(200))
    assert len(places) == 4
    assert max(places.values()) <= 1.3 * 50


def test_new_prefixes_fill_all_replicas_alike() -> None:
    many = router()
    for number in range(100):
        replica = many.route(request(str(number), number), float(number))
        many.first_token(str(number), number + 0.9)
        many.finish(str(number))
        assert many.loads[replica].active == 0
    assert {load.routed_tokens for load in many.loads} == {25 * (64 * BLOCK + 1)}


def test_a_slow_replica_gets_less() -> None:
    many = router(replicas=2)
    now, places = 0.0, Counter[int]()
    for number in range(60):
        replica = many.route(request(str(number), number), now)
        now += 10.0 if replica == 0 else 1.0
        many.first_token(str(number), now)
        many.finish(str(number))
        places[replica] += 1
    assert many.loads[0].rate < many.loads[1].rate / 3
    assert places[1] > 5 * places[0]


def test_a_hanging_replica_gets_few_new_prefixes() -> None:
    """Regression: its work counted as done, so it received its share of requests for minutes."""
    many, hanging = router(replicas=4), 2
    places = Counter[int]()
    for number in range(100):
        now = 2.0 * number
        replica = many.route(request(str(number), number), now)
        places[replica] += 1
        if replica != hanging:
            many.first_token(str(number), now + 1.0)
            many.finish(str(number))
    assert places[hanging] <= 2


def test_blocks_on_a_replicas_disk_are_preferred_to_computing() -> None:
    many = router()
    prompt = [bytes([number]) * 32 for number in range(1, 65)]
    store(many, 3, prompt, DISK)
    assert many.route(RouteRequest("a", prefix_keys(prompt), 64 * BLOCK, BLOCK), 0.0) == 3


def test_the_measured_rate_is_based_on_the_time_of_prompts() -> None:
    many = router(replicas=1)
    for number in range(100):
        start = 1000.0 * number  # idle in between
        many.route(request(str(number), number), start)
        many.first_token(str(number), start + 0.5)
        many.finish(str(number))
    assert many.loads[0].rate == pytest.approx((64 * BLOCK + 1) / 0.5, rel=0.05)


def test_round_robin_alternates_and_least_loaded_selects_the_emptiest() -> None:
    turns, least = router("round-robin", 3), router("least-loaded", 3)
    assert [turns.route(request(str(n), n), 0.0) for n in range(6)] == [0, 1, 2, 0, 1, 2]
    for number in range(6):
        least.route(request(str(number), number), 0.0)
    assert [load.active for load in least.loads] == [2, 2, 2]
    least.finish("4")
    freed = next(load.replica for load in least.loads if load.active == 1)
    assert least.route(request("more", 9), 0.0) == freed


def test_a_session_moves_only_when_its_replica_dies() -> None:
    many = router("session")
    names = [str(number) for number in range(50)]
    before = {name: many.route(request(name, 1, session=name), 0.0) for name in names}
    assert set(before.values()) == {0, 1, 2, 3}
    many.set_alive(1, False)
    for name in names:
        after = many.route(request(f"again {name}", 1, session=name), 0.0)
        assert after == before[name] if before[name] != 1 else after != 1


def test_prefix_affinity_considers_only_prefixes() -> None:
    many = router("prefix")
    first = many.route(request("first", 1), 0.0)
    assert {many.route(request(f"r{n}", 1), 0.0) for n in range(100)} == {first}


def test_dynamos_cost_matches_a_manual_calculation() -> None:
    """Replica 0 holds 3 of 4 blocks and decodes one request of 4: 1 + 8, against 4 + 4 of 1."""
    many = router("dynamo", 2)
    prompt = [bytes([number]) * 32 for number in range(1, 5)]
    store(many, 0, prompt[:3])
    busy = request("busy", 7, blocks=4)
    busy.num_tokens = 4 * BLOCK
    many.policy.sent(busy, 0)
    route_request = RouteRequest("a", prefix_keys(prompt), 4 * BLOCK, BLOCK)
    assert many.route(route_request, 0.0) == 1
    many.finish("a")
    many.policy.done(busy, 0)
    assert many.route(route_request, 0.0) == 0


def test_sglangs_rules() -> None:
    many = router("sglang", 2)
    assert many.route(request("a", 1), 0.0) == 0
    assert many.route(request("b", 2), 0.0) == 1  # no match: the smaller tree
    assert many.route(request("c", 1, own=1), 0.0) == 0  # more than half
    assert many.route(request("d", 1, blocks=10, own=30), 0.0) == 1  # less than half
    for number in range(31):
        assert many.route(request(f"hot {number}", 1), 0.0) == 0
    assert many.loads[0].active - many.loads[1].active == 31
    assert many.route(request("e", 1), 0.0) == 0
    assert many.route(request("f", 1), 0.0) == 0
    assert many.route(request("g", 1), 0.0) == 1  # 33 more: out of balance


@pytest.mark.parametrize("policy", [*POLICIES, *RIVALS])
def test_a_dead_replica_gets_nothing(policy: str) -> None:
    many = router(policy)
    for number in range(20):
        many.route(request(f"before {number}", number % 3, session=str(number)), 0.0)
    many.set_alive(2, False)
    places = {
        many.route(request(f"after {number}", number % 3, session=str(number)), 1.0)
        for number in range(40)
    }
    assert 2 not in places
    for load in list(many.loads):
        many.set_alive(load.replica, False)
    with pytest.raises(RequestError, match="0 of 4 replicas are alive"):
        many.route(request("last", 1), 2.0)


@pytest.mark.parametrize("policy", [*POLICIES, *RIVALS])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_counts_return_to_zero(policy: str, data: st.DataObject) -> None:
    many, open_requests, now = router(policy), dict[str, bool](), 0.0
    for number in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.1, 5.0]))
        if open_requests and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(open_requests)))
            if open_requests[name] or data.draw(st.booleans()):
                many.finish(name)
                del open_requests[name]
            else:
                many.first_token(name, now)
                open_requests[name] = True
        else:
            prefix = data.draw(st.integers(0, 3))
            many.route(request(str(number), prefix, own=data.draw(st.integers(0, 3))), now)
            open_requests[str(number)] = False
        assert sum(load.active for load in many.loads) == len(open_requests)
        assert all(load.queued_tokens >= 0 and load.rate > 0 for load in many.loads)
    for name in open_requests:
        many.finish(name)
    assert [(load.active, load.queued_tokens) for load in many.loads] == [(0, 0)] * 4
    match = many.index.match(keys(0, 64) + keys(1, 64))
    assert match.expected == match.cached == [0] * 4


def test_a_reused_number_has_no_work_of_the_old_replica() -> None:
    """Regression: requests of a draining replica were counted as its successor's."""
    many = router(replicas=2)
    for name, replica in (("a", 0), ("b", 1), ("c", 0)):
        assert many.route(request(name, replica), 0.0) == replica
    many.first_token("a", 1.0)
    drained = many.loads[0]
    many.set_alive(0, False)
    many.set_alive(0, True)
    new = many.loads[0]
    assert (new.waiting, new.running, new.queued_tokens) == (0, 0, 0)
    many.route(request("d", 2), 100.0)
    many.first_token("c", 200.0)
    many.finish("c")
    many.finish("a")
    assert (new.active, new.rate) == (1, pytest.approx(new.all_rate.mean)), "it was not timed yet"
    assert (drained.active, drained.queued_tokens) == (0, 0)


def test_a_new_replica_does_not_get_all_new_prefixes() -> None:
    many = router(replicas=2)
    many.set_alive(1, False)
    now = 0.0

    def answer(number: int) -> int:
        nonlocal now
        replica = many.route(request(str(number), number), now)
        many.first_token(str(number), now := now + 1.0)
        many.finish(str(number))
        return replica

    for number in range(50):
        answer(number)
    many.set_alive(1, True)
    assert Counter(answer(number) for number in range(50, 70)) == {0: 10, 1: 10}


def test_sglangs_tree_forgets_a_removed_replica() -> None:
    """Regression: its prompts counted as those of the next replica with its number."""
    many = router("sglang", 2)
    assert many.route(request("a", 1), 0.0) == 0
    assert many.route(request("b", 2, blocks=128), 0.0) == 1
    many.set_alive(0, False)
    many.set_alive(0, True)
    policy = many.policy
    assert isinstance(policy, CacheAware)
    tree = policy._tree
    assert tree is not None and tree.match(request("c", 1).keys).expected == [0, 0]
    assert many.route(request("d", 3, blocks=2), 0.0) == 0  # the smaller tree
    many.catch_up()
    assert set(expectations(tree)) == {*keys(2, 128), *keys(3, 2)}


def test_unknown_requests_change_nothing() -> None:
    many = router()
    many.first_token("never sent", 0.0)
    many.finish("never sent")
    assert [load.active for load in many.loads] == [0] * 4


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="router is 'random'; allowed: expected, round-robin"):
        make_policy("random")


def test_dynamo_does_not_count_a_dead_replica_for_its_successor() -> None:
    """Requests that end on the dead replica leave its successor's counts unchanged."""
    many = router("dynamo", 2)
    assert many.route(request("old", 1, 64), 0.0) == 0
    assert many.route(request("other", 2, 32), 0.0) == 1
    many.set_alive(0, False)
    many.set_alive(0, True)
    assert many.route(request("new", 3, 16), 0.0) == 0
    many.first_token("old", 1.0)
    many.finish("old")
    assert many.route(request("third", 4, 1), 1.0) == 0
    many.finish("other")
    assert many.route(request("fourth", 5, 1), 1.0) == 1, "it has 17 blocks to compute"
