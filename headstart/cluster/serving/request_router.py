"""The request router of Ray Serve, which returns the choice of headstart's router.

Ray Serve creates it in the server's process, passes it the running replicas, and calls it again if
the chosen replica died before it accepted the request. This class is pickled, so its state is in
`dispatch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

from headstart.cluster.serving.dispatch import Dispatcher, dispatcher_of
from headstart.cluster.serving.messages import AnswerRequest, Follow

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica


class PrefixRouter(RequestRouter):
    """Routing of requests by prefix and load, and of subscriptions by the replica's name."""

    _dispatcher: Dispatcher | None = None

    def initialize_state(self, **options: Any) -> None:
        """Find the application's dispatcher, which only the server's process has."""
        self._dispatcher = dispatcher_of(options["application"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._notify()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a replica when a call finds it dead; Ray's controller would drop it later."""
        super().on_replica_actor_died(replica_id)
        self._notify()

    def _notify(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.set_replicas([replica.unique_id for replica in self.curr_replicas])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Choose a replica for a request; called again if the replica did not accept it."""
        if pending_request is not None:
            # Without a backoff, Ray would retry in a busy loop if the caller has just left, and the
            # event loop could not process the cancellation.
            pending_request.routing_context.should_backoff = True
        call = pending_request.args[0] if pending_request and pending_request.args else None
        if isinstance(call, AnswerRequest) and self._dispatcher is not None:
            name = self._dispatcher.choose(call.request_id)
        elif isinstance(call, Follow):
            name = call.replica
        else:
            return [candidate_replicas]
        return [[r for r in candidate_replicas if r.replica_id.unique_id == name]]
