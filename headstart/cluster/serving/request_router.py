"""The request router that Ray Serve runs: the replica of our own router's choice.

Ray Serve makes one in the server's process, tells it which replicas run, and asks it again when
the replica that it chose died before it took the request. This module is sent by value, so what
it keeps is in `dispatch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

from headstart.cluster.serving.dispatch import Dispatcher, dispatcher_of
from headstart.cluster.serving.messages import AnswerRequest, Follow

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

__all__ = ["PrefixRouter"]


class PrefixRouter(RequestRouter):
    """Sends requests by prefix and load, and what is for one replica to that one."""

    _dispatcher: Dispatcher | None = None

    def initialize_state(self, **given: Any) -> None:
        """Called by Ray Serve, in each process with a handle; the server's has a dispatcher."""
        self._dispatcher = dispatcher_of(given["application"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve with all that run."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve when a call finds a replica dead, before its controller knows."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.set_replicas([one.unique_id for one in self.curr_replicas])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Called by Ray Serve for each request, again if the choice did not take it."""
        if pending_request is not None:
            # Else Ray asks anew at once, for ever, for a request whose caller has just left: the
            # loop that all calls go through could not even take the word that it is cancelled.
            pending_request.routing_context.should_backoff = True
        asked = pending_request.args[0] if pending_request and pending_request.args else None
        if isinstance(asked, AnswerRequest) and self._dispatcher is not None:
            chosen = self._dispatcher.choose(asked.request_id)
        elif isinstance(asked, Follow):
            chosen = asked.replica
        else:
            return [candidate_replicas]
        return [[one for one in candidate_replicas if one.replica_id.unique_id == chosen]]
