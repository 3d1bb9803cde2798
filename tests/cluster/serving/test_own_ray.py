"""A server whose own Ray dies under it says so, and can be ended."""

import os
import signal
import socket
import threading
from contextlib import closing

import pytest

from headstart.cluster.options import ReplicaConfig
from headstart.cluster.serving import heartbeat
from headstart.errors import EngineError
from tests.cluster.serving.ray_processes import start, wait_until
from tests.cluster.serving.scripted import LIMIT, REPLICA, Receiver, Server, part

CONFIG = ReplicaConfig(replicas=1, replica_cpus=0.5)


def lose(process: str) -> None:
    """Run a server that loses one of Ray's processes."""
    import ray

    from headstart.cluster.serving.cluster import ReplicaCluster

    options = {"num_blocks": 64, "dtype": "float32"}
    with closing(ReplicaCluster("headstart-tiny", options, CONFIG)) as cluster:
        assert cluster.llm.is_running
        [info] = ray._private.worker._global_node.all_processes[process]
        os.kill(info.process.pid, signal.SIGKILL)
        wait_until(lambda: not cluster.llm.is_running)
        with pytest.raises(EngineError) as error:
            cluster.llm.frontend.require_open()
    print(error.value, flush=True)


def lose_raylet() -> None:
    """Kill Ray's process that starts workers."""
    lose("raylet")


def lose_gcs() -> None:
    """Kill Ray's global control service."""
    lose("gcs_server")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lost", [lose_raylet, lose_gcs])
def test_a_server_that_lost_its_ray_is_not_healthy(lost: object) -> None:
    """Regression: `/health` stayed 200, and the shutdown took 75 s without saving the cache."""
    pytest.importorskip("ray", reason="replicas need Ray")
    with start(lost, "died, and with it the replicas") as server:  # type: ignore[arg-type]
        server.wait(60)


def test_a_process_that_accepts_no_connection_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_RAY_POLL", 0.001)
    reports: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as lives, socket.create_server(("", 0)) as dies:
        ports = {"one": lives, "other": dies}
        addresses = {
            name: f"127.0.0.1:{listener.getsockname()[1]}" for name, listener in ports.items()
        }
        args = (addresses, threading.Event(), reports.append)
        watch = threading.Thread(target=heartbeat.watch_ray, args=args, daemon=True)
        watch.start()
        dies.accept()[0].close()  # it was checked while it was alive
        assert not reports
        dies.close()
        watch.join(LIMIT)
    assert reports == ["Ray's process other died, and with it the replicas"]


def test_requests_end_with_the_reason_that_replicas_are_lost() -> None:
    server = Server()
    server.dispatcher.set_replicas([REPLICA])
    stream, running, later = server.stream().put(part(0, 8)), Receiver(), server.request("b")
    server.driver.submit(server.request("a"), running)
    assert running.tokens() == [8]
    server.driver.fail_all("it died")
    assert str(running.next()) == "it died"
    assert stream.cancelled.wait(LIMIT)
    with pytest.raises(EngineError, match="it died"):
        server.driver.submit(later, Receiver())
    server.driver.close()
