"""Start of replicas: find or start Ray, deploy the engines, and build an `llm` over them.

    ReplicaCluster ──ray.init──▶ the Ray of RAY_ADDRESS, or a private Ray on this machine
                   ──serve.run──▶ engines, each with its CPUs and GPUs
                   ──facts──────▶ ReplicaFrontend, ReplicaDriver, ReplicatedLLM

The name of the Ray Serve application is derived from the model and the options. If an application
of this name runs, the server uses its replicas, so several servers may share replicas, each with
its own index. The application ends with the server that deployed it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

# Ray reads this variable when it is imported. Without it, a thread of Ray Serve that outlives Ray
# would start Ray again, or connect to the Ray of another program on this machine.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, ProxyLocation, RequestRouterConfig
from ray.serve.context import _set_global_client
from ray.serve.exceptions import RayServeException

from headstart.cluster.options import ReplicaConfig
from headstart.cluster.serving.dispatch import DISPATCHERS, Dispatcher
from headstart.cluster.serving.driver import ReplicaAdapters, ReplicaDriver, ReplicaFrontend
from headstart.cluster.serving.heartbeat import SILENCE, check_port, watch_ray
from headstart.cluster.serving.llm import ReplicatedLLM
from headstart.cluster.serving.messages import read_error
from headstart.cluster.serving.replica import EngineReplica
from headstart.engine.config import EngineConfig, count_cores, make_config
from headstart.errors import ConfigError, EngineError, HeadstartError
from headstart.frontend.vllm_compat import read_options
from headstart.version import __version__

_DEPLOYMENT = "engine"
_ROUTER = "headstart.cluster.serving.request_router.PrefixRouter"
_HEALTH_PERIOD, _HEALTH_TIMEOUT = 5.0, 120.0  # a step of a large model may take long
_DRAIN_POLL = 0.5  # seconds between checks whether a stopping replica is idle
_STARTING = ("NOT_STARTED", "DEPLOYING", "UNHEALTHY")  # states that may become RUNNING
_START_TIMEOUT = 600.0  # seconds to wait for replicas that another server starts
_START_POLL = 0.5  # seconds between checks of their state
_WAIT_POLL = 5.0  # seconds between checks of the reason why replicas do not start
_STOP_TIMEOUT = 75.0  # seconds that deleting the replicas may take; Ray Serve's own limit is 60
_FEEDS = 1  # streams of events per replica, which Ray counts as requests
_LOG = logging.getLogger("headstart.server")

Answer = TypeVar("Answer")


class ReplicaCluster:
    """Replicas of one model, and an `llm` that uses them. Raises ConfigError or EngineError.

    options: for the engine. drain_seconds: time for the requests of a stopping replica to end.
    silence: seconds without a heartbeat after which replicas consider a server dead. Replicas that
    another server has deployed use that server's values.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        config: ReplicaConfig,
        drain_seconds: float = 30.0,
        silence: float = SILENCE,
    ) -> None:
        self._config = config
        self._silence = silence
        read = read_options(model, dict(options))
        engine = make_config(read.config)
        # Each version and set of options is a separate application.
        identity = json.dumps([model, dict(options)], sort_keys=True, default=str)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self._name = f"headstart-{__version__}-{digest}"
        self._has_deployed = False
        self._is_over = threading.Event()
        self._is_lost = False  # True if Ray died; the replicas died with it
        self._dispatcher: Dispatcher | None = None
        self._is_private_ray = not os.environ.get("RAY_ADDRESS")
        cpus = max(1, count_cores() // config.most) if self._is_private_ray else 1
        gpus = float(engine.device.startswith("cuda"))
        self._cpus = config.replica_cpus or cpus
        self._gpus = gpus if config.replica_gpus is None else config.replica_gpus
        self._connect()
        try:
            is_new = self._name not in _call(serve.status).applications
            most = config.most if is_new else max(config.most, self._join())
            # On a cluster, a path may be a different folder on each machine.
            shares = bool(engine.remote_cache or (engine.disk_folder and self._is_private_ray))
            dispatcher = Dispatcher(config.routing, most, shares_store=shares)
            self._dispatcher = DISPATCHERS[self._name] = dispatcher
            if is_new:
                self._check_resources()
                self._has_deployed = True
                self._deploy(model, options, engine, drain_seconds)
            handle = serve.get_deployment_handle(_DEPLOYMENT, self._name)
            facts = _call(handle.facts.remote().result)
            adapters = ReplicaAdapters(
                lambda name, path: _call(handle.load_adapter.remote(name, path).result)
            )
            frontend = ReplicaFrontend(model, facts, engine, most, adapters, read.tokenizer)
            driver = ReplicaDriver(handle, frontend, dispatcher, ray.put)
            self.llm = ReplicatedLLM(
                frontend, driver, dispatcher, read.sampling, read.chat_template
            )
            if self._is_private_ray:  # processes of a private Ray are not restarted
                self._watch_ray(driver)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """End every request, then the replicas if this server deployed them. Idempotent."""
        self.llm.close()
        self._leave()

    def _connect(self) -> None:
        address = os.environ.get("RAY_ADDRESS")
        _check_address(address)
        cpus = math.ceil(self._cpus * self._config.most)
        local_options = {"num_cpus": max(count_cores(), cpus), "include_dashboard": False}
        try:
            # Without an address, start a private Ray, even if another program has started a Ray
            # here. Ray creates the token that protects it.
            ray.init(
                address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if address else local_options),
            )
        except (RayError, ConnectionError, ValueError, RuntimeError) as error:
            reason: object = error
            if "AuthenticationError" in str(error.__cause__):  # Ray reports it only here
                reason = "it requires a token; set RAY_AUTH_MODE=token and provide that token"
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, and Ray cannot be used there: {reason}"
                if address
                else f"Ray cannot be started: {reason}"
            ) from error
        if threading.current_thread() is threading.main_thread():
            # Ray's own handler kills this process at once and leaves some of Ray's processes.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def _check_resources(self) -> None:
        """Check that there are enough CPUs and GPUs; Ray would wait forever for missing ones.

        Raises ConfigError for a shortage on a private Ray. A cluster may get more machines later,
        so its shortage is only logged.
        """
        resources = ray.cluster_resources()
        for kind, each in (("CPU", self._cpus), ("GPU", self._gpus)):
            if not each or (kind == "CPU" and self._is_private_ray):
                continue
            count = resources.get(kind, 0.0)
            # Several replicas may share a GPU, but a replica cannot use parts of two GPUs.
            most = count * (1 // each) if kind == "GPU" and each <= 1 else count // each
            if most >= self._config.least:
                continue
            owner = "this machine" if self._is_private_ray else "the cluster"
            shortage = (
                f"{self._config.least} replicas need {each:g} {kind}s each; {owner} has {count:g}"
            )
            if self._is_private_ray:
                raise ConfigError(
                    f"{shortage}; allowed: fewer replicas, or a smaller --replica-gpus"
                )
            _LOG.warning("%s: the server waits until there are more", shortage)

    def _log_waiting(self, is_over: threading.Event) -> None:
        """Log the reason why replicas do not start, which Ray Serve reports after 30 s."""
        logged = ""
        while not is_over.wait(_WAIT_POLL):
            with suppress(Exception):  # `serve.run` raises permanent errors
                message = serve.status().applications[self._name].deployments[_DEPLOYMENT].message
                if message and message != logged:
                    logged = message
                    _LOG.warning("some replicas do not run yet: %s", message)

    def _deploy(
        self, model: str, options: Mapping[str, Any], engine: EngineConfig, drain_seconds: float
    ) -> None:
        config = self._config
        engine_options = dict(options)
        if self._is_private_ray and engine.device == "cpu":  # replicas share one machine's memory
            engine_options["kv_cache_fraction"] = engine.kv_cache_fraction / config.most
        number: dict[str, Any] = {"num_replicas": config.least}
        if config.max_replicas is not None:
            scaling = AutoscalingConfig(
                min_replicas=config.least,
                max_replicas=config.most,
                target_ongoing_requests=config.requests_per_replica + _FEEDS,
            )
            number = {"autoscaling_config": scaling}
        deployment = serve.deployment(
            EngineReplica,
            name=_DEPLOYMENT,
            ray_actor_options={"num_cpus": self._cpus, "num_gpus": self._gpus},
            # The server limits requests, and the engine schedules them, so Ray need not.
            max_ongoing_requests=1 << 20,
            health_check_period_s=_HEALTH_PERIOD,
            health_check_timeout_s=_HEALTH_TIMEOUT,
            graceful_shutdown_timeout_s=drain_seconds,
            graceful_shutdown_wait_loop_s=_DRAIN_POLL,
            request_router_config=RequestRouterConfig(
                request_router_class=_ROUTER, request_router_kwargs={"application": self._name}
            ),
            **number,
        )
        # Ray Serve logs each of its steps to stderr.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        is_over = threading.Event()
        threading.Thread(target=self._log_waiting, args=(is_over,), daemon=True).start()
        try:
            serve.start(proxy_location=ProxyLocation.Disabled)
            replicas = deployment.bind(model, engine_options, self._silence)
            serve.run(replicas, name=self._name, route_prefix=None)
        except (RayError, RayServeException, RuntimeError) as error:
            app = serve.status().applications.get(self._name)
            message = app.deployments[_DEPLOYMENT].message if app is not None else ""
            # Take the error of a replica, or else Ray's.
            lines = [line for line in message.splitlines() if "headstart.errors." in line]
            reason = lines[-1].partition("headstart.errors.")[2] if lines else error
            raise EngineError(f"the replicas did not start: {reason}") from error
        finally:
            is_over.set()

    def _join(self) -> int:
        """Wait until the replicas that another server deployed run; return their number.

        Raises EngineError.
        """
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            app = _call(serve.status).applications.get(self._name)
            state = "gone" if app is None else app.status.value
            if app is not None and state == "RUNNING":
                break
            if state not in _STARTING or time.monotonic() >= deadline:
                raise EngineError(
                    f"the replicas that another server deployed ({self._name}) are {state}; "
                    "start this server again when they run or are deleted"
                )
            time.sleep(_START_POLL)
        states = app.deployments[_DEPLOYMENT].replica_states
        count, least, most = int(states.get("RUNNING", 0)), self._config.least, self._config.most
        if not least <= count <= most:
            _LOG.warning(
                "another server deployed %s replicas; this server was configured for %s",
                count,
                least if least == most else f"{least} to {most}",
            )
        return count

    def _watch_ray(self, driver: ReplicaDriver) -> None:
        """End all requests when a process of Ray dies. The server must then be restarted."""
        node = next(iter(ray.nodes()))
        processes = {
            "gcs_server": ray.get_runtime_context().gcs_address,
            "raylet": f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}",
        }

        def on_death(reason: str) -> None:
            _LOG.error("%s: no more requests are accepted; restart the server", reason)
            self._is_lost = True
            driver.fail_all(reason)

        args = (processes, self._is_over, on_death)
        threading.Thread(target=watch_ray, args=args, name="headstart-ray", daemon=True).start()

    def _leave(self) -> None:
        self._is_over.set()
        try:
            if self._has_deployed and not self._is_lost:
                self._delete()  # each replica saves its cached blocks before it ends
        except HeadstartError as error:
            _LOG.warning("the replicas may not have saved their cached blocks: %s", error)
        finally:
            if DISPATCHERS.get(self._name) is self._dispatcher:  # it may be another server's
                DISPATCHERS.pop(self._name, None)
            ray.shutdown()
            # Ray Serve stores its controller's handle in this process, even after Ray has ended.
            _set_global_client(None)

    def _delete(self) -> None:
        """Delete the replicas. Raises EngineError if Ray fails or does not answer in time."""
        errors: list[HeadstartError] = []

        def delete() -> None:
            try:
                check_port(ray.get_runtime_context().gcs_address)
                if not any(node["Alive"] for node in ray.nodes()):
                    raise EngineError("no node of the Ray cluster is alive")
                serve.delete(self._name)
            except Exception as error:
                errors.append(read_error(error))

        thread = threading.Thread(target=delete, name="headstart-replicas-end", daemon=True)
        thread.start()
        thread.join(_STOP_TIMEOUT)
        if thread.is_alive():
            errors.append(EngineError(f"Ray did not answer for {_STOP_TIMEOUT:g} s"))
        for error in errors:
            raise error


def _call(function: Callable[[], Answer]) -> Answer:
    try:
        return function()
    except Exception as error:
        raise read_error(error) from error


def _check_address(address: str | None) -> None:
    """Raise ConfigError for an address that Ray cannot use, or where nothing listens."""
    host, _, port = (address or "").rpartition(":")
    if "://" in host:
        raise ConfigError(
            f"RAY_ADDRESS is {address!r}; allowed: auto, or host:port of a cluster to which this "
            "machine belongs; Ray's client, for URLs such as ray://, does not support streams"
        )
    if port.isdecimal():
        try:
            check_port(f"{host}:{port}")
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, and nothing listens at that address: {error}"
            ) from error
