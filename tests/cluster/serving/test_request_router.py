"""The request router inside Ray Serve's own loop of choices. No Ray is started."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.cluster.serving.dispatch import Dispatcher
from headstart.cluster.serving.messages import Follow
from tests.cluster.serving.test_replica import ASKED

pytest.importorskip("ray", reason="replicas need Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Ray

MOST = 1000
"""Choices that Ray requests in one loop before a test considers the loop endless."""


class _CountingDispatcher(Dispatcher):
    count = 0

    def choose(self, request_id: str) -> str | None:
        """Choose as the dispatcher does, for a limited number of calls."""
        self.count += 1
        assert self.count < MOST, "Ray retries forever and blocks all other tasks"
        return super().choose(request_id)


class _Candidates(list[Any]):
    """Replicas that count how often they are iterated over."""

    count = 0

    def __iter__(self) -> Any:
        self.count += 1
        assert self.count < MOST, "Ray retries forever and blocks all other tasks"
        return super().__iter__()


def router_over(replica: str, dispatcher: Dispatcher) -> Any:
    """Return a request router with the attributes that Ray Serve's loop of choices reads."""
    from headstart.cluster.serving.request_router import PrefixRouter

    router = PrefixRouter.__new__(PrefixRouter)
    candidate = SimpleNamespace(replica_id=SimpleNamespace(unique_id=replica))
    router._replicas, router._replicas_list = {replica: candidate}, _Candidates([candidate])  # type: ignore[assignment]
    router.num_routing_tasks_in_backoff = 0
    router.num_routing_tasks_in_backoff_gauge = SimpleNamespace(set=lambda value: None)
    router.initial_backoff_s, router.backoff_multiplier, router.max_backoff_s = 0.0, 1.0, 0.0
    router._dispatcher = dispatcher
    return router


@pytest.mark.parametrize("message", [ASKED, Follow("gone", "server")], ids=["answer", "follow"])
def test_a_call_without_a_replica_does_not_block_others(message: Any) -> None:
    """Regression: the server stopped answering if the client had left or the replica had died."""
    from ray.serve.request_router import PendingRequest

    dispatcher = _CountingDispatcher("expected", 1)
    dispatcher.set_replicas(["one"])
    router = router_over("one", dispatcher)

    async def choose() -> None:
        pending = PendingRequest(args=[message], kwargs={}, metadata=None)
        choices = router._choose_replicas_with_backoff(pending)
        task = asyncio.ensure_future(anext(choices))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()  # as Ray does when the caller has left
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(choose())


def test_a_request_goes_to_the_chosen_replica() -> None:
    from headstart.cluster.router import RouteRequest

    dispatcher = Dispatcher("expected", 1)
    dispatcher.set_replicas(["one"])
    dispatcher.expect(RouteRequest(ASKED.request_id, [], 3, 16))
    router = router_over("one", dispatcher)
    for message in (ASKED, Follow("one", "server")):
        pending: Any = SimpleNamespace(args=[message], routing_context=SimpleNamespace())
        [[chosen]] = asyncio.run(router.choose_replicas(router._replicas_list, pending))
        assert chosen.replica_id.unique_id == "one"
