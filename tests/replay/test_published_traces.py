"""Hit rates of the published traces, if they are next to the repository."""

from pathlib import Path

import pytest

from headstart.replay import Fleet, best_hit_rate, read_trace, replay
from tests.house.source import ROOT

TRACES = ROOT.parent / "shared" / "traces"


def path_of(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def test_mooncakes_conversations() -> None:
    trace = read_trace(path_of("mooncake_conversation.jsonl.gz"))
    assert len(trace.requests) == 12_031
    fleet = Fleet(4, 2_000_000, 512)
    assert best_hit_rate(trace, fleet).unlimited == pytest.approx(0.373, abs=5e-4)
    head = trace.head(600)
    ours, turns = (replay(head, fleet, policy) for policy in ("expected", "round-robin"))
    assert ours.hit_rate >= best_hit_rate(head, fleet).same_memory - 0.02
    assert ours.imbalance <= 1.3
    assert ours.ttft_mean < turns.ttft_mean


def test_sessions_of_coding_agents() -> None:
    trace = read_trace(path_of("claude_code_sessions.npz"))
    assert (len(trace.requests), trace.grain, trace.num_units) == (19_948, 64, 1_523_207)
    head = trace.head(400)
    assert all(len(request.units()) == request.num_tokens // 64 for request in head.requests)
    fleet = Fleet(4, 2_000_000, 512)
    best = best_hit_rate(head, fleet)
    assert replay(head, fleet, "expected").hit_rate >= best.same_memory - 0.02
