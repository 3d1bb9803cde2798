"""`GET /health`, `/ready` and `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.errors import ApiError, JsonResponse
from headstart.server.service import front_of

__all__ = ["router"]

router = APIRouter()


@router.get("/health")
async def check_health(request: Request) -> Response:
    """Status 200 while the engine answers, 503 when it broke."""
    if not front_of(request).is_running:
        raise ApiError(503, "the engine is closed")
    return JsonResponse({"status": "ok"})


@router.get("/ready")
async def check_ready(request: Request) -> Response:
    """Status 200 while new requests are taken; 503 while the server stops, or no replica runs."""
    front = front_of(request)
    front.check_ready()
    if not front.has_engine:
        raise ApiError(503, "no replica runs; requests wait until one does", retry_after=5)
    return JsonResponse({"status": "ready"})


@router.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """The server's metrics as Prometheus reads them."""
    text = await front_of(request).read_metrics()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
