"""Policies of a few lines: what others are measured against."""

from itertools import count
from zlib import crc32

from headstart.cluster.load import Choice, ReplicaLoad
from headstart.cluster.policies.base import RoutingPolicy


class RoundRobin(RoutingPolicy):
    """Each replica in turn."""

    needs_prefixes = needs_keys = False

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, choice: Choice) -> ReplicaLoad:
        """The next one."""
        return choice.alive[next(self._turns) % len(choice.alive)]


class LeastLoaded(RoutingPolicy):
    """The replica with the fewest unfinished requests; the fewest queued tokens among equals."""

    needs_prefixes = needs_keys = False

    def choose(self, choice: Choice) -> ReplicaLoad:
        """The least loaded one."""
        return min(choice.alive, key=lambda load: (load.active, load.queued_tokens))


class SessionAffinity(RoutingPolicy):
    """The replica that rendezvous hashing gives a session; least loaded without a session.

    A replica that leaves takes along its own sessions only.
    """

    needs_prefixes = needs_keys = False

    def __init__(self) -> None:
        self._without = LeastLoaded()

    def choose(self, choice: Choice) -> ReplicaLoad:
        """The session's own."""
        session = choice.request.session
        if session is None:
            return self._without.choose(choice)
        return max(choice.alive, key=lambda load: crc32(f"{session} {load.replica}".encode()))


class PrefixAffinity(RoutingPolicy):
    """The replica with the longest prefix, however loaded; the least loaded one among equals."""

    def choose(self, choice: Choice) -> ReplicaLoad:
        """The longest match."""
        assert choice.match is not None
        held = choice.match.expected
        return max(choice.alive, key=lambda load: (held[load.replica], -load.active))
