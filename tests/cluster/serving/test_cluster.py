"""Starting replicas, and joining those of another server, where Ray fails. No Ray is started."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.cluster.options import ReplicaConfig
from headstart.cluster.serving.dispatch import dispatcher_of
from headstart.cluster.serving.ray_errors import read_error
from headstart.errors import EngineError, ReplicaLostError, RequestError
from headstart.version import __version__
from tests.cluster.serving.scripted import MODEL, Server

pytest.importorskip("ray", reason="replicas need Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # what Ray warns of is its own


class Fake:
    """Ray and Ray Serve, as far as a server that joins replicas asks them."""

    def __init__(self, states: list[str | None], running: int = 2) -> None:
        self.states, self.running = states, running
        self.shut_down = 0
        self.name = ""

    def status(self) -> Any:
        """Each call is a look at the next state; None is an application that is not there."""
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        fake = self
        engine = SimpleNamespace(replica_states={"RUNNING": self.running}, message="")
        application = SimpleNamespace(
            status=SimpleNamespace(value=state), deployments={"engine": engine}
        )

        class Applications:
            def __contains__(self, name: str) -> bool:
                fake.name = name
                return state is not None

            def get(self, name: str) -> Any:
                return application if state is not None else None

        return SimpleNamespace(applications=Applications())

    def get_deployment_handle(self, deployment: str, name: str) -> Any:
        """One whose calls fail as Ray's do."""
        result = _raise(ConnectionError("the head is gone"))
        facts = SimpleNamespace(remote=lambda: SimpleNamespace(result=result))
        return SimpleNamespace(facts=facts)

    def shutdown(self) -> None:
        """Of Ray."""
        self.shut_down += 1


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        raise error

    return call


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], Any]:
    from headstart.cluster.serving import cluster

    def start(fake: Fake) -> Any:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(cluster.ray, "init", lambda *given, **named: None)
        monkeypatch.setattr(cluster.ray, "shutdown", fake.shutdown)
        monkeypatch.setattr(cluster, "serve", fake)
        monkeypatch.setattr(cluster, "_START_LOOK", 0.0)
        monkeypatch.setattr(cluster, "_START_PATIENCE", 1.0)
        return cluster.ReplicaCluster(MODEL, {"num_blocks": 64}, ReplicaConfig(replicas=2))

    return start


def test_ray_is_left_when_it_cannot_tell_what_runs(
    start: Callable[[Fake], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake([None])
    monkeypatch.setattr(fake, "status", _raise(ConnectionError("the head is gone")))
    with pytest.raises(EngineError, match="the replicas cannot be asked: ConnectionError"):
        start(fake)
    assert fake.shut_down == 1


def test_what_ray_raises_for_the_first_call_is_an_error_of_ours(
    start: Callable[[Fake], Any],
) -> None:
    fake = Fake(["RUNNING"])
    with pytest.raises(EngineError, match="the replicas cannot be asked: ConnectionError"):
        start(fake)
    assert fake.shut_down == 1


@pytest.mark.parametrize("state", ["DEPLOY_FAILED", "DELETING", "DEPLOYING"])
def test_replicas_of_another_server_that_do_not_come_to_run_are_told(
    state: str, start: Callable[[Fake], Any]
) -> None:
    with pytest.raises(EngineError, match=f"and they are {state}; allowed: RUNNING"):
        start(Fake([state]))


def test_replicas_that_go_while_they_are_waited_for_are_told(
    start: Callable[[Fake], Any],
) -> None:
    with pytest.raises(EngineError, match="and they are gone"):
        start(Fake(["DEPLOYING", "DEPLOYING", None]))


@pytest.mark.parametrize(("running", "is_told"), [(2, False), (3, True)])
def test_another_number_of_replicas_than_asked_for_is_told(
    running: int,
    is_told: bool,
    start: Callable[[Fake], Any],
    logged: list[logging.LogRecord],
) -> None:
    fake = Fake(["DEPLOYING", "DEPLOYING", "RUNNING"], running)
    with pytest.raises(EngineError, match="ConnectionError"):  # once they run
        start(fake)
    told = [record.getMessage() for record in logged]
    assert any(f"{running} replicas run" in line for line in told) == is_told
    assert fake.name.startswith(f"headstart-{__version__}-")


def test_all_replicas_of_another_server_get_requests(start: Callable[[Fake], Any]) -> None:
    """A server that asked for 2 where 9 run had numbers for 4 of them."""
    fake = Fake(["RUNNING"], running=9)
    with pytest.raises(EngineError, match="ConnectionError"):  # once they run
        start(fake)
    dispatcher = dispatcher_of(fake.name)
    assert dispatcher is not None
    dispatcher.set_replicas([str(number) for number in range(9)])
    assert len(dispatcher.replicas) == 9


def test_ray_is_left_when_the_replicas_cannot_be_deleted(
    start: Callable[[Fake], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.cluster.serving.cluster import ReplicaCluster

    fake = Fake([None])
    fake.delete = _raise(ConnectionError("the head is gone"))  # type: ignore[attr-defined]
    monkeypatch.setattr(ReplicaCluster, "_deploy", lambda *given: None)
    with pytest.raises(EngineError, match="ConnectionError"):
        start(fake)
    assert fake.shut_down == 1


def test_what_ray_raises_is_read() -> None:
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        NodeDiedError,
        ObjectLostError,
        OwnerDiedError,
        RayTaskError,
    )

    for lost in (
        ActorDiedError(),
        ActorUnavailableError("it does not answer", None),
        NodeDiedError("its machine died"),
        # A large part of an answer lies on the replica's machine until it is fetched.
        ObjectLostError("0" * 56, None, ""),
        OwnerDiedError("0" * 56, None, ""),
    ):
        assert isinstance(read_error(lost), ReplicaLostError)
    refused = RayTaskError("answer", "", RequestError("the prompt is empty"))
    for error in (refused, refused.as_instanceof_cause()):
        assert (type(read_error(error)), str(read_error(error))) == (
            RequestError,
            "the prompt is empty",
        )
    broken = read_error(RayTaskError("answer", "", KeyError("x")))
    assert str(broken) == "a replica failed: KeyError: 'x'"


def test_a_reset_of_all_replicas_leaves_out_those_that_die_meanwhile() -> None:
    """What they held is gone with them: a client was told that the replica was lost."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    told: list[Any] = [True, ActorDiedError()]

    class Call:
        async def results_async(self, return_exceptions: bool = False) -> list[Any]:
            assert return_exceptions, "the first error would be raised"
            return told

    server = Server()
    server.handle.broadcast = lambda *given: Call()  # type: ignore[attr-defined]
    assert server.driver.ask_all("reset", False, False) == [True]
    told[1] = ActorUnavailableError("it does not answer", None)
    with pytest.raises(ReplicaLostError):
        server.driver.ask_all("reset", False, False)
    server.driver.close()
