"""Prefix index and router over many engines, and replicas on Ray Serve.

The index and the router import only the cache package: no torch, no model, no server.
"""

from headstart.cluster.events import EventBatch, EventPublisher
from headstart.cluster.index import Match, ReplicaIndex
from headstart.cluster.router import POLICIES, Router, make_policy

__all__ = [
    "POLICIES",
    "EventBatch",
    "EventPublisher",
    "Match",
    "ReplicaIndex",
    "Router",
    "make_policy",
]
