"""The simulator: times by hand, consistent managers, and every router on every workload."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.cache import KVCacheManager
from headstart.cluster import POLICIES
from headstart.errors import ConfigError
from headstart.replay import (
    WORKLOADS,
    Fleet,
    ReplayResult,
    SpeedModel,
    Trace,
    TraceRequest,
    best_hit_rate,
    make_workload,
    replay,
)
from headstart.replay.simulator import _Simulation

REPLY = st.integers(1, 40)
SPEED = SpeedModel(prefill_rate=1000, step_time=0.1, decode_time=0.01, chunk=1000, max_running=8)


def trace_of(*requests: tuple[float, list[int], int], grain: int = 16) -> Trace:
    """Return a trace of (time, units, reply's tokens); prompts end with a full unit."""
    return Trace(
        "hand",
        grain,
        1000,
        [
            TraceRequest(time, (units,), grain * len(units), output, str(number))
            for number, (time, units, output) in enumerate(requests)
        ],
    )


def run(trace: Trace, *, replicas: int = 1, kv_tokens: int = 16_000) -> ReplayResult:
    return replay(trace, Fleet(replicas, kv_tokens, 16), "expected", SPEED)


def test_the_time_of_a_prompt_is_that_of_its_steps() -> None:
    """2,000 tokens need three steps, with chunks of 992 (62 units), 992 and 16."""
    result = run(trace_of((5.0, list(range(125)), 1)))
    assert result.ttft_mean == pytest.approx(3 * 0.1 + 2000 / 1000)
    assert (result.hit_rate, result.requests, result.imbalance) == (0, 1, 1)


def test_decoding_takes_one_step_per_token_and_slows_others() -> None:
    """The second prompt arrives while the first decodes, and starts after the current step."""
    result = run(trace_of((0.0, [1], 11), (0.2, [2], 1)))
    first = 0.1 + 0.016
    # Steps of 0.11 s since then; one is running at 0.2 and ends at 0.226.
    second = first + 0.11 + (0.1 + 0.016 + 0.01) - 0.2
    assert result.ttft_mean == pytest.approx((first + second) / 2)
    # Ten more tokens: one in the step of the second prompt, the others at 0.11 s.
    assert result.seconds == pytest.approx(first + 9 * 0.11 + 0.126)


def test_a_prompt_hits_what_another_computed_and_recomputes_its_last_token() -> None:
    result = run(trace_of((0.0, [1, 2, 3], 1), (9.0, [1, 2, 3, 4], 1), (19.0, [1, 2, 3, 4], 1)))
    assert result.hit_rate == pytest.approx((3 * 16 + 3 * 16) / (11 * 16))


def test_a_trace_may_start_at_any_time() -> None:
    """Regression: a trace with times of day had no load, as the time before it counted as idle."""
    early, late = (
        run(trace_of((start, list(range(125)), 9), (start + 1, [1, 2], 9)))
        for start in (0.0, 86_400.0)
    )
    assert late.load == pytest.approx(early.load) and early.load > 0.1
    assert late.seconds == pytest.approx(early.seconds)


def test_a_request_waits_for_a_running_prefix() -> None:
    """The second request waits for the prefix that the first computes, and then hits it."""
    shared = list(range(100))
    result = run(trace_of((0.0, [*shared, 500], 1), (0.01, [*shared, 501], 1)))
    assert result.hit_rate == pytest.approx(1600 / 3232)


def test_a_request_waits_for_memory_and_nothing_is_preempted() -> None:
    """Two prompts of 50 blocks with replies of 20 run one after the other in 100 blocks."""
    long = trace_of((0.0, list(range(50)), 320), (0.0, list(range(100, 150)), 320))
    result = run(long, kv_tokens=1600)
    first = 0.1 + 0.8
    assert result.ttft_p50 > (first + 319 * 0.11) / 2
    assert result.evictions > 0


def test_a_request_that_no_replica_can_hold_is_an_error() -> None:
    with pytest.raises(ConfigError, match="request 0 needs 1,696 tokens of KV memory"):
        run(trace_of((0.0, list(range(100)), 90)), kv_tokens=1600)


def test_invalid_fleets_traces_and_speeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size is 24; allowed: a multiple of 16"):
        replay(trace_of((0, [1], 1)), Fleet(1, 1600, 24), "expected")
    with pytest.raises(ConfigError, match="no requests"):
        replay(trace_of(), Fleet(1, 1600, 16), "expected")
    with pytest.raises(ConfigError, match="prefill_rate is 0; allowed: a number of at least 1"):
        SpeedModel(prefill_rate=0)
    with pytest.raises(ConfigError, match="one of them above 0"):
        SpeedModel(step_time=0, decode_time=0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_router_finishes_every_workload(policy: str, workload: str) -> None:
    trace = make_workload(workload, 24, seed=1)
    fleet = Fleet(3, 60_000, 16)
    result = replay(trace, fleet, policy)
    best = best_hit_rate(trace, replace(fleet, kv_tokens=200_000))
    assert result.requests == 24
    assert 0 < result.ttft_p50 <= result.ttft_p99
    assert 1 <= result.imbalance <= 3
    assert result.hit_rate <= best.same_memory == pytest.approx(best.unlimited, abs=0.01)
    again = replay(trace, fleet, policy)
    assert replace(again, events_per_second=0) == replace(result, events_per_second=0)


def test_prefix_routing_beats_round_robin() -> None:
    trace = make_workload("documents", 150)
    fleet = Fleet(8, 200_000, 16)
    expected, round_robin = (replay(trace, fleet, policy) for policy in ("expected", "round-robin"))
    assert expected.hit_rate > round_robin.hit_rate + 0.2
    assert expected.ttft_mean < round_robin.ttft_mean


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(list(POLICIES)))
def test_managers_stay_consistent(seed: int, policy: str) -> None:
    """Any trace keeps them consistent, even if small pools evict blocks all the time."""
    rng = random.Random(seed)
    requests = sorted(
        (
            rng.uniform(0, 5),
            [rng.randrange(2) for _ in range(rng.randint(1, 12))],
            rng.randint(0, 99),
        )
        for _ in range(20)
    )
    check, checked = KVCacheManager.commit_step, 0

    def commit_and_check(manager: KVCacheManager) -> None:
        nonlocal checked
        check(manager)
        manager.check()
        checked += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheManager, "commit_step", commit_and_check)
        result = replay(trace_of(*requests), Fleet(2, 20 * 16, 32), policy, SPEED)
    assert result.requests == 20 and checked


def test_sparse_requests_hit_as_much_as_in_one_engine() -> None:
    """With one replica and no concurrency, the simulation adds no cost."""
    requests = make_workload("chats", 80, seed=3).requests
    trace = Trace(
        "slow",
        16,
        10**6,
        [replace(each, time=100.0 * number) for number, each in enumerate(requests)],
    )
    fleet = Fleet(1, 8000, 16)
    best = best_hit_rate(trace, fleet)
    assert replay(trace, fleet, "expected").hit_rate == pytest.approx(best.same_memory, abs=1e-9)
    assert best.same_memory < best.unlimited


def test_the_same_seed_gives_the_same_workload() -> None:
    first, again, other = (make_workload("chats", 50, seed) for seed in (0, 0, 1))
    assert first == again != other
    with pytest.raises(ConfigError, match="workload is 'x'; allowed: shared-prompt"):
        make_workload("x", 1)
    with pytest.raises(ConfigError, match="requests is 0"):
        make_workload("chats", 0)


APART = SpeedModel(
    prefill_rate=1000,
    step_time=0.1,
    decode_time=0.01,
    chunk=1000,
    max_running=8,
    transfer_rate=100,
)


def test_a_prompt_is_moved_to_a_decoding_replica() -> None:
    """The prefill replica sends the first token; ten more follow after the K/V are moved.

    The second prompt is computed meanwhile, waits for the link, and does not slow decoding.
    """
    trace = trace_of((0.0, [1], 11), (0.1, [2], 11))
    result = replay(trace, Fleet(2, 16_000, 16, prefill_replicas=1), "expected", APART)
    step, sending, token = 0.1 + 0.016, 0.16, 0.11
    assert result.ttft_mean == pytest.approx((step + 2 * step - 0.1) / 2)
    # The second prompt is sent when the first has arrived, in a step of the first's decoding.
    arrived = step + 2 * sending
    begins = step + sending + math.ceil((arrived - step - sending) / token) * token
    shared = step + sending + 10 * token - begins  # while both decode a token takes 0.12
    tokens = round(shared / token)
    ends = begins + tokens * 0.12 + (10 - tokens) * token
    assert result.seconds == pytest.approx(ends)
    assert result.load == pytest.approx(32 / 1000 / ends)
    assert result.imbalance == 1


@pytest.mark.parametrize("prefill", [-1, 2, 3])
def test_some_replicas_must_decode(prefill: int) -> None:
    fleet = Fleet(2, 16_000, 16, prefill_replicas=prefill)
    with pytest.raises(ConfigError, match=f"prefill_replicas is {prefill}; allowed: 0, or fewer"):
        replay(trace_of((0, [1], 1)), fleet, "expected")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=6), REPLY),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_every_request_is_computed_once_and_decoded_once(
    requests: list[tuple[float, list[int], int]], prefill: int
) -> None:
    trace = trace_of(*sorted(requests, key=lambda request: request[0]))
    simulation = _Simulation(trace, Fleet(4, 1600, 16, prefill_replicas=prefill), "expected", APART)
    simulation.run(None)
    jobs = {job.name: job for job in simulation.jobs}
    assert len(jobs) == len(simulation.jobs) == len(requests)
    computing, decoding = simulation.replicas[:prefill], simulation.replicas[prefill:]
    assert sum(replica.num_requests for replica in computing) == len(requests)
    moved = [job for job in jobs.values() if job.num_output > 1]
    assert sum(replica.num_requests for replica in decoding) == len(moved)
    assert all(job.is_moved == (job.num_output > 1) for job in jobs.values())
    assert not any(replica.computed_tokens for replica in decoding)
    computed = sum(replica.computed_tokens for replica in computing)
    assert computed + sum(job.hit_tokens for job in jobs.values()) == trace.num_tokens
    for job in jobs.values():
        sending = job.num_tokens / APART.transfer_rate if job.is_moved else 0
        least = sending + (job.num_output - 1) * APART.seconds(0, 1)
        assert job.arrived < job.first_token <= job.finished
        assert job.finished - job.first_token >= least - 1e-9
    for replica in simulation.replicas:
        assert replica.manager.num_free_blocks == replica.manager.config.num_blocks
        assert not replica.num_active
        replica.manager.check()


def test_separate_prefill_lowers_the_time_between_tokens() -> None:
    """Prompts do not delay decoding on separate replicas."""
    trace = make_workload("documents", 100)
    together, apart = (
        replay(trace, Fleet(4, 200_000, 16, prefill_replicas=count), "expected") for count in (0, 2)
    )
    assert apart.tpot_p99 < together.tpot_p99
