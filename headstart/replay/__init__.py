"""Replays of request traces through the real cache manager and router; no torch, no model."""

from headstart.replay.replica import SpeedModel
from headstart.replay.simulator import Fleet, Optimum, ReplayResult, best_hit_rate, replay
from headstart.replay.trace import WORKLOADS, Trace, TraceRequest, make_workload, read_trace

__all__ = ["Fleet", "Optimum", "ReplayResult", "SpeedModel", "best_hit_rate", "replay"]
__all__ += ["WORKLOADS", "Trace", "TraceRequest", "make_workload", "read_trace"]
