"""Starts replicas: finds or starts Ray, deploys the engines, and makes an `llm` of them.

    ReplicaCluster ──ray.init──▶ Ray of RAY_ADDRESS or of this machine; else one of its own
                   ──serve.run──▶ engines, as many as asked for, each with its CPUs and GPUs
                   ──facts──────▶ ReplicaFrontend, ReplicaDriver, ReplicatedLLM

A server that finds its application running, which is named by the model and the options, uses it
as it is: several servers may have the same replicas, each with an index of its own. The
application goes with the server that deployed it.
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
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

# Read when Ray is imported. Else a thread of Ray Serve that is late for the end of Ray starts
# another one, or joins what another program has started here.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, ProxyLocation, RequestRouterConfig
from ray.serve.context import _set_global_client
from ray.serve.exceptions import RayServeException

from headstart.cluster.options import ReplicaConfig
from headstart.cluster.serving.adapters import ReplicaAdapters
from headstart.cluster.serving.dispatch import Dispatcher, register, unregister
from headstart.cluster.serving.driver import ReplicaDriver
from headstart.cluster.serving.front import ReplicaFrontend
from headstart.cluster.serving.llm import ReplicatedLLM
from headstart.cluster.serving.ray_errors import read_error
from headstart.cluster.serving.replica import EngineReplica
from headstart.cluster.serving.signs import SILENCE, knock, watch_ray
from headstart.engine.config import EngineConfig, count_cores, make_config
from headstart.errors import ConfigError, EngineError, HeadstartError
from headstart.frontend.vllm_compat import read_options
from headstart.version import __version__

__all__ = ["ReplicaCluster"]

_DEPLOYMENT = "engine"
_ROUTER = "headstart.cluster.serving.request_router.PrefixRouter"
_HEALTH_PERIOD, _HEALTH_TIMEOUT = 5.0, 120.0  # a step of a large model may take long
_DRAIN_LOOK = 0.5  # seconds between two looks at whether a replica that goes is idle
_STARTING = ("NOT_STARTED", "DEPLOYING", "UNHEALTHY")  # what may come to run
_START_PATIENCE = 600.0  # seconds that replicas of another server may take to run
_START_LOOK = 0.5  # seconds between two looks at whether they do
_WAIT_LOOK = 5.0  # seconds between two looks at what they wait for
_STOP_PATIENCE = 75.0  # seconds that deleting the replicas may take; Ray Serve itself takes 60
_FEEDS = 1  # streams of events that count as requests under way in each replica
_LOG = logging.getLogger("headstart.server")

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Share:
    """What one replica is given."""

    cpus: float
    gpus: float


class ReplicaCluster:
    """Replicas of one model, and an `llm` that answers by them. Raises ConfigError or EngineError.

    `options` are the engine's; `drain_seconds` is how long the requests of a replica that goes may
    take to end. A server that gave replicas no sign of life for `silence` seconds is dead to them:
    what counts is what the server said that deployed them.
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
        self._name = _name_of(model, options)
        self._is_own_app = False
        self._is_over = threading.Event()
        self._is_lost = False  # Ray, and the replicas with it
        self._forget: Callable[[], None] = lambda: None
        self._is_own_ray = self._connect(engine)
        try:
            is_new = self._name not in _ask(serve.status).applications
            most = config.most if is_new else max(config.most, self._join())
            # A folder is one machine's; a cluster may mount one everywhere, which nobody says.
            shares = bool(engine.remote_cache or (engine.kept_folder and self._is_own_ray))
            dispatcher = Dispatcher(config.routing, most, shares_store=shares)
            register(self._name, dispatcher)
            self._forget = partial(unregister, self._name, dispatcher)
            if is_new:
                self._check_room(self._share(engine, is_alone=self._is_own_ray))
                self._is_own_app = True
                self._deploy(model, options, engine, drain_seconds)
            handle = serve.get_deployment_handle(_DEPLOYMENT, self._name)
            facts = _ask(handle.facts.remote().result)
            adapters = ReplicaAdapters(
                lambda name, path: _ask(handle.load_adapter.remote(name, path).result)
            )
            front = ReplicaFrontend(model, facts, engine, most, adapters, read.tokenizer)
            driver = ReplicaDriver(handle, front, dispatcher, ray.put)
            self.llm = ReplicatedLLM(front, driver, dispatcher, read.sampling, read.chat_template)
            if self._is_own_ray:  # nobody starts its processes again
                self._watch_ray(driver)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """End every request, then the replicas if this server deployed them. Idempotent."""
        self.llm.close()
        self._leave()

    def _connect(self, engine: EngineConfig) -> bool:
        """Find or start Ray; True if it was started."""
        address = os.environ.get("RAY_ADDRESS")
        _check_address(address)
        share = self._share(engine, is_alone=True)
        cpus = max(count_cores(), math.ceil(share.cpus * self._config.most))
        own = {} if address else {"num_cpus": cpus, "include_dashboard": False}
        try:
            # Without an address one of our own, and none that another program has started here:
            # Ray itself makes a token, which every caller of it must have.
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        except (RayError, ConnectionError, ValueError, RuntimeError) as error:
            why: object = error
            if "AuthenticationError" in str(error.__cause__):  # which Ray names nowhere else
                why = "it asks for a token; allowed: RAY_AUTH_MODE=token, and the token it has"
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, and Ray cannot be used there: {why}"
                if address
                else f"Ray cannot be started: {why}"
            ) from error
        if threading.current_thread() is threading.main_thread():
            # Ray's own handler kills the process at once, and leaves some of Ray's behind.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return not address

    def _share(self, engine: EngineConfig, *, is_alone: bool) -> _Share:
        config = self._config
        share = max(1, count_cores() // config.most) if is_alone else 1
        on_gpu = engine.device.startswith("cuda")
        return _Share(
            config.replica_cpus or share,
            config.replica_gpus if config.replica_gpus is not None else float(on_gpu),
        )

    def _check_room(self, share: _Share) -> None:
        """Ray waits for CPUs and GPUs for ever, without a word. Raises ConfigError.

        A cluster may yet get more machines: there a line of the log says what it waits for. A Ray
        of the server's own takes as many CPUs for there as the replicas are to have.
        """
        there = ray.cluster_resources()
        for kind, each in (("CPU", share.cpus), ("GPU", share.gpus)):
            if not each or (kind == "CPU" and self._is_own_ray):
                continue
            count = there.get(kind, 0.0)
            # Several may share a GPU, none has parts of two.
            room = count * (1 // each) if kind == "GPU" and each <= 1 else count // each
            if room >= self._config.least:
                continue
            where = "this machine" if self._is_own_ray else "the cluster"
            told = (
                f"{self._config.least} replicas need {each:g} {kind}s each; {where} has {count:g}"
            )
            if self._is_own_ray:
                raise ConfigError(f"{told}; allowed: fewer replicas, or a smaller --replica-gpus")
            _LOG.warning("%s: the server waits until there are more", told)

    def _tell_wait(self, is_over: threading.Event) -> None:
        """Log what Ray Serve waits for, such as CPUs that others have; it says so after 30 s."""
        told = ""
        while not is_over.wait(_WAIT_LOOK):
            with suppress(Exception):  # it is asked again, and whoever waits hears what is wrong
                said = serve.status().applications[self._name].deployments[_DEPLOYMENT].message
                if said and said != told:
                    told = said
                    _LOG.warning("the replicas do not all run yet: %s", told)

    def _deploy(
        self, model: str, options: Mapping[str, Any], engine: EngineConfig, drain_seconds: float
    ) -> None:
        config = self._config
        share = self._share(engine, is_alone=self._is_own_ray)
        given = dict(options)
        if self._is_own_ray and engine.device == "cpu":  # they share one machine's memory
            given["kv_cache_fraction"] = engine.kv_cache_fraction / config.most
        deployment = serve.deployment(
            EngineReplica,
            name=_DEPLOYMENT,
            ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
            # The server admits requests; what waits, waits in the engine, which orders it.
            max_ongoing_requests=1 << 20,
            health_check_period_s=_HEALTH_PERIOD,
            health_check_timeout_s=_HEALTH_TIMEOUT,
            graceful_shutdown_timeout_s=drain_seconds,
            graceful_shutdown_wait_loop_s=_DRAIN_LOOK,
            request_router_config=RequestRouterConfig(
                request_router_class=_ROUTER,
                request_router_kwargs={"application": self._name},
            ),
            **self._number(),
        )
        # Ray Serve tells each step of its own on stderr.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        is_over = threading.Event()
        waiting = threading.Thread(target=self._tell_wait, args=(is_over,), daemon=True)
        waiting.start()
        try:
            serve.start(proxy_location=ProxyLocation.Disabled)
            replicas = deployment.bind(model, given, self._silence)
            serve.run(replicas, name=self._name, route_prefix=None)
        except (RayError, RayServeException, RuntimeError) as error:
            raise EngineError(f"the replicas did not start: {self._why(error)}") from error
        finally:
            is_over.set()

    def _join(self) -> int:
        """Wait until the replicas that another server deployed run; how many those are.

        Raises EngineError.
        """
        deadline = time.monotonic() + _START_PATIENCE
        while True:
            found = _ask(serve.status).applications.get(self._name)
            state = "gone" if found is None else found.status.value
            if found is not None and state == "RUNNING":
                break
            if state not in _STARTING or time.monotonic() >= deadline:
                raise EngineError(
                    f"another server deployed the replicas ({self._name}), and they are {state}; "
                    "allowed: RUNNING. Start this server again when they run or are gone"
                )
            time.sleep(_START_LOOK)
        states = found.deployments[_DEPLOYMENT].replica_states
        count, least, most = int(states.get("RUNNING", 0)), self._config.least, self._config.most
        if not least <= count <= most:
            asked = str(least) if least == most else f"{least} to {most}"
            _LOG.warning(
                "%s replicas run, as another server deployed them; this one was asked for %s",
                count,
                asked,
            )
        return count

    def _why(self, error: Exception) -> str:
        """What a replica said when it did not start; what Ray says if none said anything."""
        found = serve.status().applications.get(self._name)
        told = found.deployments[_DEPLOYMENT].message if found is not None else ""
        ours = [line for line in told.splitlines() if "headstart.errors." in line]
        return ours[-1].partition("headstart.errors.")[2] if ours else str(error)

    def _number(self) -> dict[str, Any]:
        config = self._config
        if config.max_replicas is None:
            return {"num_replicas": config.least}
        return {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=config.least,
                max_replicas=config.most,
                target_ongoing_requests=config.requests_per_replica + _FEEDS,
            )
        }

    def _watch_ray(self, driver: ReplicaDriver) -> None:
        """Have a server that lost its Ray say so: it can only be started anew."""
        node = next(iter(ray.nodes()))
        processes = {
            "gcs_server": ray.get_runtime_context().gcs_address,
            "raylet": f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}",
        }

        def tell(why: str) -> None:
            _LOG.error("%s: no request is taken any more; start the server anew", why)
            self._is_lost = True
            driver.break_off(why)

        given = (processes, self._is_over, tell)
        threading.Thread(target=watch_ray, args=given, name="headstart-ray", daemon=True).start()

    def _leave(self) -> None:
        self._is_over.set()
        try:
            if self._is_own_app and not self._is_lost:  # its replicas save what is to be kept
                _ask_in_time(lambda: serve.delete(self._name), _STOP_PATIENCE)
        except HeadstartError as error:
            _LOG.warning("the replicas may not have saved what they cached: %s", error)
        finally:
            self._forget()
            ray.shutdown()
            # Ray Serve keeps its controller's handle in this process: of a Ray that is gone.
            _set_global_client(None)


def _ask(function: Callable[[], Answer]) -> Answer:
    """Call it; what Ray raises is an error of ours."""
    try:
        return function()
    except Exception as error:
        raise read_error(error) from error


def _ask_in_time(function: Callable[[], object], seconds: float) -> None:
    """As `_ask`, of a Ray that may have died: its calls then wait for ever. Raises EngineError."""
    failed: list[HeadstartError] = []

    def ask() -> None:
        try:
            knock(ray.get_runtime_context().gcs_address)
            if not any(node["Alive"] for node in ray.nodes()):
                raise EngineError("no machine of Ray is alive")
            _ask(function)
        except Exception as error:
            failed.append(read_error(error))

    thread = threading.Thread(target=ask, name="headstart-replicas-end", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        failed.append(EngineError(f"Ray did not answer for {seconds:g} s"))
    for error in failed:
        raise error


def _check_address(address: str | None) -> None:
    """Raise ConfigError for an address that Ray cannot use, or where nobody answers."""
    host, _, port = (address or "").rpartition(":")
    if "://" in host:
        raise ConfigError(
            f"RAY_ADDRESS is {address!r}; allowed: auto, or host:port of a cluster that this "
            "machine is part of: Ray's client does not carry streams"
        )
    if port.isdecimal():
        try:
            knock(f"{host}:{port}")
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, and nobody answers there: {error}"
            ) from error


def _name_of(model: str, options: Mapping[str, Any]) -> str:
    """The application's name: another version, or other options, are other replicas."""
    told = json.dumps([model, dict(options)], sort_keys=True, default=str)
    return f"headstart-{__version__}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
