"""Signs of life of a server, and what becomes of its requests without them. Without Ray."""

import queue
from collections.abc import AsyncIterator

from tests.cluster.serving.scripted import LIMIT, Server, Stream, Told, part


def test_a_server_gives_signs_of_life_under_the_name_that_it_asks_by() -> None:
    """Without them replicas end its requests after two minutes."""
    heard: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    class Call:
        async def results_async(self, return_exceptions: bool) -> list[object]:
            return []

    def broadcast(method: str, name: str) -> Call:
        heard.put((method, name))
        return Call()

    server = Server(silence=0.01)
    server.handle.broadcast = broadcast  # type: ignore[attr-defined]
    server.stream().put(part(0, 8, finished=True))
    try:
        server.driver.submit(server.request("a"), Told())
        name = server.asked().server
        for _ in range(2):
            assert heard.get(timeout=LIMIT) == ("hear", name)
    finally:
        server.driver.close()


def test_a_request_that_a_replica_ended_for_want_of_signs_of_life_is_answered() -> None:
    """The replica says nothing: who asked is dead to it."""

    class Ended(Stream):
        async def __aiter__(self) -> AsyncIterator[object]:
            for none in ():
                yield none

    server = Server()
    server.handle.answers.put(Ended())
    told = Told()
    server.driver.submit(server.request("a"), told)
    assert str(told.next()) == "this server was silent for too long: a replica took it for dead"
    server.driver.close()
