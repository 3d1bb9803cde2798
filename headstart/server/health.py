"""`GET /health` and `/ready`: whether the server lives, and whether it takes requests."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.errors import ApiError, JsonResponse
from headstart.server.service import service_of

__all__ = ["router"]

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """Status 200 while the engine answers, 503 when it broke."""
    if not service_of(request).llm.is_running:
        raise ApiError(503, "the engine is closed")
    return JsonResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Status 200 while new requests are taken; 503 while the server stops."""
    if not service_of(request).is_ready:
        raise ApiError(503, "the server is stopping")
    return JsonResponse({"status": "ready"})
