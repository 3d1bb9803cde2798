"""The interface of a routing policy."""

from headstart.cluster.load import Choice, ReplicaLoad, RouteRequest


class RoutingPolicy:
    """Chooses a replica for each request; the router keeps the loads and the index.

    `choose` is asked once a request and changes nothing of what it is given. The other calls
    tell a policy that keeps books of its own what became of a request; here they do nothing.
    """

    needs_prefixes = True
    """False for a policy that does not look at `Choice.match`; none is then made."""

    needs_keys = True
    """False for a policy that does not look at a request's keys; they may be left out."""

    def choose(self, choice: Choice) -> ReplicaLoad:
        """One of `choice.alive`, of which there is at least one."""
        raise NotImplementedError

    def sent(self, request: RouteRequest, replica: int) -> None:
        """The request is sent to this replica."""

    def prompt_done(self, request: RouteRequest, replica: int) -> None:
        """The request has its first token."""

    def done(self, request: RouteRequest, replica: int) -> None:
        """The request is finished, or given up."""

    def forget(self, replica: int) -> None:
        """The replica is gone with all that it held; its number may be another's from now on."""
