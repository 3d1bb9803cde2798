"""Replays of request traces through the real cache manager and router; no torch, no model."""

from headstart.replay.optimum import Optimum, best_hit_rate
from headstart.replay.readers import read_trace
from headstart.replay.results import ReplayResult
from headstart.replay.simulator import Fleet, replay
from headstart.replay.speed import SpeedModel
from headstart.replay.trace import Trace, TraceRequest
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
