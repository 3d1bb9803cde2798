"""`AsyncLLM` over replicas, and the routes of `/cache` for a server with replicas."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.cluster.index import PromptKeys
from headstart.cluster.router import RouteRequest
from headstart.engine.metrics import Metric
from headstart.errors import ReplicaLostError
from headstart.frontend.async_llm import AsyncLLM
from headstart.frontend.chat.requests import ChatRequests
from headstart.frontend.facade import Started
from headstart.server.cache import api
from headstart.server.cache.api import CachePromptRequest
from headstart.server.errors import JsonResponse
from headstart.server.service import service_of
from headstart.validation import check_flag

if TYPE_CHECKING:
    from headstart.cluster.serving.dispatch import Dispatcher
    from headstart.cluster.serving.driver import ReplicaDriver, ReplicaFrontend
    from headstart.engine.params import SamplingParams

_LOG = logging.getLogger("headstart.server")


class ReplicatedLLM(AsyncLLM):
    """`AsyncLLM` over replicas. Methods that inspect an engine's pool do not work."""

    frontend: ReplicaFrontend

    def __init__(
        self,
        frontend: ReplicaFrontend,
        driver: ReplicaDriver,
        dispatcher: Dispatcher,
        sampling: SamplingParams,
        chat_template: str | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self._replicas = driver
        self._attach(Started(frontend, ChatRequests(frontend, chat_template), driver, sampling))

    @property
    def has_engine(self) -> bool:
        """True if a replica runs; until then requests wait."""
        return bool(self.dispatcher.live_replicas)

    def read_metrics(self) -> list[Metric]:
        """Return the metrics of all replicas: sums, and means of percentages. Thread-safe."""
        return self.dispatcher.sum_metrics()

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset the cache of every replica. Return False if a replica refused.

        See `AsyncLLM.reset_prefix_cache`.
        """
        running = check_flag("reset_running_requests", reset_running_requests)
        tiers = check_flag("reset_connector", reset_connector)
        return all(await asyncio.to_thread(self._replicas.call_all, "reset", running, tiers))

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter's name in the server and in all reachable replicas."""
        adapters = self.frontend.adapters
        adapter = adapters.find(name)
        await asyncio.to_thread(adapters.unload, name)
        try:
            await asyncio.to_thread(self._replicas.call_all, "unload_adapter", adapter)
        except ReplicaLostError as error:
            _LOG.info("adapter %r could not be unloaded from every replica: %s", name, error)

    async def forget_inputs(self) -> None:
        await super().forget_inputs()
        if self.takes_images:
            await asyncio.to_thread(self._replicas.call_all, "forget_inputs")


router = APIRouter(prefix="/cache")
router.add_api_route("/prewarm", api.prewarm_prompt, methods=["POST"])
router.add_api_route("/reset", api.reset_cache, methods=["POST"])


def _llm_of(request: Request) -> ReplicatedLLM:
    llm = service_of(request).llm
    assert isinstance(llm, ReplicatedLLM)
    return llm


@router.get("")
async def show_replicas(request: Request) -> Response:
    """Show each replica's metrics, by its name in Ray Serve."""
    dispatcher = _llm_of(request).dispatcher
    replicas: dict[str, dict[str, Any]] = {name: {} for name in dispatcher.replicas}
    for replica, metrics in dispatcher.metrics.items():
        values = replicas[replica] = {}
        for metric in metrics:
            labels = ",".join(f"{key}={value}" for key, value in metric.labels.items())
            name = f"{metric.name}{{{labels}}}" if labels else metric.name
            values[name] = getattr(metric, "value", None)
    return JsonResponse({"replicas": replicas})


@router.post("/explain")
async def explain_prompt(body: CachePromptRequest, request: Request) -> Response:
    """Show how much of a prompt each replica has cached, without computing it."""
    llm = _llm_of(request)
    prepared = await api.prepare(service_of(request), body, request, begins_reply=True)
    hasher, count = llm.frontend.facts.hasher, len(prepared.prompt_token_ids)
    keys = PromptKeys(hasher, prepared.requests[0].sequence)
    await asyncio.to_thread(list, keys)  # hashes the whole prompt
    route = RouteRequest(prepared.request_id, keys, count, hasher.block_size)
    cached = llm.dispatcher.cached_tokens(route)
    most = max(cached.values(), default=0) if prepared.requests[0].reads_cache else 0
    return JsonResponse({"prompt_tokens": count, "cached_tokens": most, "replicas": cached})


@router.get("/advice")
async def show_advice(request: Request) -> Response:
    """Show the same advice as a server with one engine, without the field `memory`.

    `memory` counts evicted prefixes. Here it would also count prefixes that another replica has.
    """
    advice = await api.read_advice(request)
    return JsonResponse({name: value for name, value in advice.items() if name != "memory"})
