"""`/cache` of a server with replicas: what each has, where a prompt would hit, and resets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.cluster.index import prefix_keys
from headstart.cluster.router import RouteRequest
from headstart.server.cache import api
from headstart.server.cache.api import CachePromptRequest
from headstart.server.errors import JsonResponse
from headstart.server.service import service_of

if TYPE_CHECKING:
    from headstart.cluster.serving.front import ReplicaFrontend
    from headstart.cluster.serving.llm import ReplicatedLLM

__all__ = ["router"]

router = APIRouter(prefix="/cache")
router.add_api_route("/prewarm", api.prewarm_prompt, methods=["POST"])
router.add_api_route("/reset", api.reset_cache, methods=["POST"])


@router.get("")
async def show_replicas(request: Request) -> Response:
    """Each replica's metrics, by its name in Ray Serve."""
    llm = cast("ReplicatedLLM", service_of(request).llm)
    told: dict[str, Any] = {name: {} for name in llm.dispatcher.replicas}
    for name, metrics in llm.dispatcher.metrics.items():
        told[name] = {_spell(one.name, one.labels): getattr(one, "value", None) for one in metrics}
    return JsonResponse({"replicas": told})


@router.post("/explain")
async def explain_prompt(body: CachePromptRequest, request: Request) -> Response:
    """How much of a prompt each replica has cached, without running it."""
    service = service_of(request)
    prepared = await api.prepare(service, body, request, begins_reply=True)
    llm = cast("ReplicatedLLM", service.llm)
    front = cast("ReplicaFrontend", service.llm.frontend)
    names = await asyncio.to_thread(front.names, prepared)
    size = front.facts.names.block_size
    count = len(prepared.prompt_token_ids)
    held = llm.dispatcher.held(RouteRequest(prepared.request_id, prefix_keys(names), count, size))
    most = max(held.values(), default=0) if prepared.requests[0].reads_cache else 0
    return JsonResponse({"prompt_tokens": count, "cached_tokens": most, "replicas": held})


@router.get("/advice")
async def show_advice(request: Request) -> Response:
    """As with one engine, without its memory.

    What another replica has looks as if this one had evicted it.
    """
    told = await api.read_advice(request)
    return JsonResponse({name: value for name, value in told.items() if name != "memory"})


def _spell(name: str, labels: dict[str, str]) -> str:
    told = ",".join(f"{key}={value}" for key, value in labels.items())
    return f"{name}{{{told}}}" if told else name
