"""Policies of a few lines: what others are measured against."""

from hashlib import blake2b
from itertools import count

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
        return max(choice.alive, key=lambda load: _draw(session, load.replica))


def _draw(session: str, replica: int) -> bytes:
    """A number by chance that is the same for the same two; a checksum's would not be by chance."""
    return blake2b(f"{session} {replica}".encode(), digest_size=8).digest()


class PrefixAffinity(RoutingPolicy):
    """The replica with the longest prefix, however loaded; the least loaded one among equals."""

    def choose(self, choice: Choice) -> ReplicaLoad:
        """The longest match."""
        assert choice.match is not None
        held = choice.match.expected
        return max(choice.alive, key=lambda load: (held[load.replica], -load.active))
