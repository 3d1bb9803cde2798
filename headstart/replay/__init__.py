"""Replays of request traces through the real cache manager and router; no torch, no model."""

from headstart.replay.optimum import Optimum, best_hit_rate
from headstart.replay.replica import SpeedModel
from headstart.replay.simulator import Fleet, ReplayResult, replay
from headstart.replay.trace import Trace, TraceRequest, read_trace
from headstart.replay.workloads import WORKLOADS, make_workload

__all__ = [
    "WORKLOADS",
    "Fleet",
    "Optimum",
    "ReplayResult",
    "SpeedModel",
    "Trace",
    "TraceRequest",
    "best_hit_rate",
    "make_workload",
    "read_trace",
    "replay",
]
