"""Starting replicas or joining another server's, with failures of Ray. No Ray is started."""

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.cluster.options import ReplicaConfig
from headstart.cluster.serving.dispatch import Dispatcher
from headstart.cluster.serving.messages import read_error
from headstart.errors import (
    ConfigError,
    EngineError,
    HeadstartError,
    ReplicaLostError,
    RequestError,
)
from headstart.version import __version__
from tests.cluster.serving.scripted import MODEL, Server

pytest.importorskip("ray", reason="replicas need Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Ray


class Fake:
    """Ray, Ray Serve and a clock, for a server that starts or joins replicas."""

    def __init__(self, states: list[str | None], running: int = 2) -> None:
        self.states, self.running = states, running
        self.shut_down = 0
        self.now = 0.0
        self.name = self.gcs_address = ""
        self.is_alive, self.gpus = True, 0.0
        self.run: Callable[..., Any] = lambda *_, **named: None
        self.delete: Callable[[str], Any] = lambda name: None

    def init(self, *arguments: Any, **options: Any) -> None:
        """Connect to Ray."""

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": self.is_alive}]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0, "GPU": self.gpus}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=self.gcs_address)

    def start(self, **options: Any) -> None:
        """Start Ray Serve."""

    def deployment(self, *arguments: Any, **options: Any) -> Any:
        return SimpleNamespace(bind=lambda *arguments: None)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def status(self) -> Any:
        """Return the next state; None is a missing application."""
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
        """Return a handle whose calls fail as Ray's do."""
        result = _raise(ConnectionError("the head is gone"))
        facts = SimpleNamespace(remote=lambda: SimpleNamespace(result=result))
        return SimpleNamespace(facts=facts)

    def shutdown(self) -> None:
        """Count the calls of Ray's `shutdown`."""
        self.shut_down += 1


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        raise error

    return call


@pytest.fixture
def listening() -> Iterator[int]:
    """Return the port of a head that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        yield head.getsockname()[1]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, listening: int) -> Callable[..., Any]:
    from headstart.cluster.serving import cluster

    def start(fake: Fake, address: str = "", **config: Any) -> Any:
        fake.gcs_address = fake.gcs_address or f"127.0.0.1:{listening}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        for module in ("ray", "serve", "time"):
            monkeypatch.setattr(cluster, module, fake)
        return cluster.ReplicaCluster(
            MODEL, {"num_blocks": 64}, ReplicaConfig(replicas=2, **config)
        )

    return start


def test_ray_is_shut_down_when_its_status_fails(start: Callable[..., Any]) -> None:
    fake = Fake([None])
    fake.status = _raise(ConnectionError("the head is gone"))  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the replicas cannot be called: ConnectionError"):
        start(fake)
    assert fake.shut_down == 1


def test_an_error_of_rays_first_call_is_translated(
    start: Callable[..., Any],
) -> None:
    fake = Fake(["RUNNING"])
    with pytest.raises(EngineError, match="the replicas cannot be called: ConnectionError"):
        start(fake)
    assert fake.shut_down == 1


@pytest.mark.parametrize("state", ["DEPLOY_FAILED", "DELETING", "DEPLOYING"])
def test_replicas_of_another_server_that_never_run_are_reported(
    state: str, start: Callable[..., Any]
) -> None:
    with pytest.raises(EngineError, match=f"are {state}; start this server again"):
        start(Fake([state]))


def test_replicas_that_disappear_during_the_wait_are_reported(
    start: Callable[..., Any],
) -> None:
    with pytest.raises(EngineError, match="are gone; start this server again"):
        start(Fake(["DEPLOYING", "DEPLOYING", None]))


@pytest.mark.parametrize(("running", "is_logged"), [(2, False), (3, True)])
def test_another_number_of_replicas_than_requested_is_logged(
    running: int,
    is_logged: bool,
    start: Callable[..., Any],
    logged: list[logging.LogRecord],
) -> None:
    fake = Fake(["DEPLOYING", "DEPLOYING", "RUNNING"], running)
    with pytest.raises(EngineError, match="ConnectionError"):  # once they run
        start(fake)
    messages = [record.getMessage() for record in logged]
    assert any(f"deployed {running} replicas" in line for line in messages) == is_logged
    assert fake.name.startswith(f"headstart-{__version__}-")


def test_all_replicas_of_another_server_get_requests(
    start: Callable[[Fake], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a server configured for 2 replicas numbered only 4 of the 9 that run."""
    from headstart.cluster.serving import cluster

    fake, dispatchers = Fake(["RUNNING"], running=9), list[Dispatcher]()

    class Noted(dict[str, Dispatcher]):
        def __setitem__(self, application: str, dispatcher: Dispatcher) -> None:
            super().__setitem__(application, dispatcher)
            dispatchers.append(dispatcher)

    noted = Noted()
    monkeypatch.setattr(cluster, "DISPATCHERS", noted)
    with pytest.raises(EngineError, match="ConnectionError"):  # once they run
        start(fake)
    assert not noted
    [dispatcher] = dispatchers
    dispatcher.set_replicas([str(number) for number in range(9)])
    assert len(dispatcher.replicas) == 9


def test_ray_is_shut_down_when_replicas_cannot_be_deleted(start: Callable[..., Any]) -> None:
    fake = Fake([None])
    fake.delete = _raise(ConnectionError("the head is gone"))
    with pytest.raises(EngineError, match="ConnectionError"):
        start(fake)
    assert fake.shut_down == 1


@pytest.fixture
def handler() -> Iterator[None]:
    """Ignore SIGTERM until a server handles it; then restore the handler."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler")
def test_sigterm_while_replicas_start_shuts_ray_down(start: Callable[..., Any]) -> None:
    """Regression: Ray's handler ended the process with a dump, and left processes running."""
    fake = Fake([None])
    fake.run = lambda *_, **named: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_:
        start(fake)
    assert (exit_.value.code, fake.shut_down) == (128 + signal.SIGTERM, 1)


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("is_alive", [False, True])
def test_replicas_of_a_dead_ray_are_not_waited_for(
    is_alive: bool,
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    logged: list[logging.LogRecord],
) -> None:
    """Ray Serve's `delete` waits forever for a controller whose machine was lost."""
    from headstart.cluster.serving import cluster

    fake, deleted = Fake([None]), threading.Event()
    fake.delete = lambda name: deleted.wait(20.0)
    fake.is_alive = is_alive
    monkeypatch.setattr(cluster, "_STOP_TIMEOUT", 20.0 if not is_alive else 0.1)
    try:
        with pytest.raises(EngineError, match="ConnectionError"):
            start(fake)
    finally:
        deleted.set()
    assert fake.shut_down == 1
    why = "Ray did not answer for 0.1 s" if is_alive else "no node of the Ray cluster is alive"
    assert any(why in record.getMessage() for record in logged)


@pytest.mark.usefixtures("handler")
def test_a_lost_head_is_not_called_to_delete_replicas(
    start: Callable[..., Any], logged: list[logging.LogRecord]
) -> None:
    """Regression: Ray tried to reach it for a minute, and then ended the process with a signal."""
    deleted: list[str] = []
    fake = Fake([None])
    fake.delete = deleted.append
    fake.gcs_address = "127.0.0.1:1"
    with pytest.raises(EngineError, match="ConnectionError"):
        start(fake)
    assert (deleted, fake.shut_down) == ([], 1)
    assert any("ConnectionRefusedError" in record.getMessage() for record in logged)


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize(
    ("gpus", "share", "fits"),
    [(1.0, 1.0, False), (1.0, 0.5, True), (2.0, 1.0, True), (2.0, 2.0, False), (1.0, 0.6, False)],
)
def test_missing_gpus_are_reported_at_once(
    gpus: float, share: float, fits: bool, start: Callable[..., Any]
) -> None:
    """Regression: Ray and the server waited for them forever, without a message."""
    fake = Fake([None])
    fake.gpus = gpus
    with pytest.raises(HeadstartError) as error:
        start(fake, replica_gpus=share)
    message = f"2 replicas need {share:g} GPUs each; this machine has {gpus:g}"
    assert (message in str(error.value)) != fits
    assert fake.shut_down == 1


@pytest.mark.usefixtures("handler")
def test_missing_cpus_are_reported_at_once(
    start: Callable[..., Any], logged: list[logging.LogRecord]
) -> None:
    """Regression: Ray and the server waited for them forever, without a message."""
    fake = Fake([None])
    for cpus, fits in (1.5, False), (1.0, True):
        logged.clear()
        with pytest.raises(EngineError, match="ConnectionError"):
            start(fake, address="auto", replica_cpus=cpus)
        messages = [record.getMessage() for record in logged]
        assert ("2 replicas need 1.5 CPUs each; the cluster has 2" in str(messages)) != fits


@pytest.mark.usefixtures("handler")
def test_the_reason_that_ray_serve_waits_is_logged_once(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    from headstart.cluster.serving import cluster

    fake, looks = Fake([None, "DEPLOYING"]), threading.Semaphore(0)
    application = SimpleNamespace(deployments={"engine": SimpleNamespace(message="no CPU is free")})

    def deploy(*args: Any, **named: Any) -> None:
        def status() -> Any:
            looks.release()
            return SimpleNamespace(applications={names[0]: application})

        names = [named["name"]]
        fake.status = status  # type: ignore[method-assign]
        for _ in range(3):
            assert looks.acquire(timeout=20)

    fake.run = deploy
    monkeypatch.setattr(cluster, "_WAIT_POLL", 0.001)
    with pytest.raises(EngineError, match="ConnectionError"):
        start(fake)
    messages = [record.getMessage() for record in logged]
    assert messages.count("some replicas do not run yet: no CPU is free") == 1


def test_a_ray_that_requires_a_token_is_reported(start: Callable[..., Any]) -> None:
    """Regression: without RAY_AUTH_MODE, the only message was that Ray failed to connect."""

    def init(*args: Any, **named: Any) -> None:
        cause = RuntimeError("Traceback ... ray.exceptions.AuthenticationError: RPC error: ...")
        raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.1:6379") from cause

    fake = Fake([None])
    fake.init = init  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="it requires a token; set RAY_AUTH_MODE=token"):
        start(fake, address="auto")


def test_errors_of_ray_are_translated() -> None:
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
        # A large part of an answer stays on the replica's machine until it is fetched.
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
    assert str(broken) == "a replica failed with KeyError: 'x'"


def test_a_reset_of_all_replicas_leaves_out_those_that_die_meanwhile() -> None:
    """Regression: a reset reported a lost replica, although a dead one has no cache."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    results: list[Any] = [True, ActorDiedError()]

    class Call:
        async def results_async(self, return_exceptions: bool = False) -> list[Any]:
            assert return_exceptions, "the first error would be raised"
            return results

    server = Server()
    server.handle.broadcast = lambda *args: Call()  # type: ignore[attr-defined]
    assert server.driver.call_all("reset", False, False) == [True]
    results[1] = ActorUnavailableError("it does not answer", None)
    with pytest.raises(ReplicaLostError):
        server.driver.call_all("reset", False, False)
    server.driver.close()
