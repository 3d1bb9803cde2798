"""Many engines as one: which replica holds which prefixes, and where a request goes.

The prefix index and the router import the cache alone: no torch, no model, no server.
"""

from headstart.cluster.events import EventBatch, EventPublisher
from headstart.cluster.index import Match, ReplicaIndex
from headstart.cluster.policies import POLICIES, make_policy
from headstart.cluster.router import Router

__all__ = [
    "POLICIES",
    "EventBatch",
    "EventPublisher",
    "Match",
    "ReplicaIndex",
    "Router",
    "make_policy",
]
