"""Routing policies by name."""

from collections.abc import Callable

from headstart.cluster.policies.base import RoutingPolicy
from headstart.cluster.policies.dynamo import Dynamo
from headstart.cluster.policies.expected import Expected
from headstart.cluster.policies.sglang import CacheAware
from headstart.cluster.policies.simple import (
    LeastLoaded,
    PrefixAffinity,
    RoundRobin,
    SessionAffinity,
)
from headstart.errors import ConfigError

__all__ = ["DEFAULT_POLICY", "POLICIES", "RoutingPolicy", "make_policy"]

DEFAULT_POLICY = "expected"
POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "expected": Expected,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "session": SessionAffinity,
    "prefix": PrefixAffinity,
    "dynamo": Dynamo,
    "sglang": CacheAware,
}


def make_policy(name: str) -> RoutingPolicy:
    """A new policy of this name. Raises ConfigError for one that there is not."""
    if name not in POLICIES:
        raise ConfigError(f"router is {name!r}; allowed: {', '.join(POLICIES)}")
    return POLICIES[name]()
