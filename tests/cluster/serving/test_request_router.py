"""The request router inside Ray Serve's own loop of choices. No Ray is started."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.cluster.serving.dispatch import Dispatcher
from headstart.cluster.serving.messages import Follow
from tests.cluster.serving.test_replica import ASKED

pytest.importorskip("ray", reason="replicas need Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # what Ray warns of is its own

MOST = 1000
"""Choices that Ray asks for in one go before a test takes it for ever."""


class _CountingDispatcher(Dispatcher):
    asked = 0

    def choose(self, request_id: str) -> str | None:
        """Choose as the dispatcher does, for a limited number of calls."""
        self.asked += 1
        assert self.asked < MOST, "Ray asks for ever, and nothing else goes on"
        return super().choose(request_id)


class _Candidates(list[Any]):
    """Replicas that are looked through so many times."""

    asked = 0

    def __iter__(self) -> Any:
        self.asked += 1
        assert self.asked < MOST, "Ray asks for ever, and nothing else goes on"
        return super().__iter__()


def router_over(replica: str, dispatcher: Dispatcher) -> Any:
    """A request router that Ray Serve would have made, as far as its loop of choices needs."""
    from headstart.cluster.serving.request_router import PrefixRouter

    made = PrefixRouter.__new__(PrefixRouter)
    one = SimpleNamespace(replica_id=SimpleNamespace(unique_id=replica))
    made._replicas, made._replicas_list = {replica: one}, _Candidates([one])  # type: ignore[assignment]
    made.num_routing_tasks_in_backoff = 0
    made.num_routing_tasks_in_backoff_gauge = SimpleNamespace(set=lambda value: None)
    made.initial_backoff_s, made.backoff_multiplier, made.max_backoff_s = 0.0, 1.0, 0.0
    made._dispatcher = dispatcher
    return made


@pytest.mark.parametrize("asked", [ASKED, Follow("gone", "server")], ids=["answer", "follow"])
def test_a_call_for_which_there_is_no_replica_does_not_hold_up_the_others(asked: Any) -> None:
    """The client has left or the replica has died: a server then stopped answering."""
    from ray.serve.request_router import PendingRequest

    dispatcher = _CountingDispatcher("expected", 1)
    dispatcher.set_replicas(["one"])
    router = router_over("one", dispatcher)

    async def choose() -> None:
        pending = PendingRequest(args=[asked], kwargs={}, metadata=None)
        choices = router._choose_replicas_with_backoff(pending)
        task = asyncio.ensure_future(anext(choices))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()  # as Ray does when the caller has left
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(choose())


def test_a_request_goes_to_the_replica_of_our_choice() -> None:
    from headstart.cluster.router import RouteRequest

    dispatcher = Dispatcher("expected", 1)
    dispatcher.set_replicas(["one"])
    dispatcher.expect(RouteRequest(ASKED.request_id, [], 3, 16))
    router = router_over("one", dispatcher)
    for asked in (ASKED, Follow("one", "server")):
        pending: Any = SimpleNamespace(args=[asked], routing_context=SimpleNamespace())
        [[chosen]] = asyncio.run(router.choose_replicas(router._replicas_list, pending))
        assert chosen.replica_id.unique_id == "one"
