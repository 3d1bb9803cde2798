"""`GET /v1/models`: the model, and the adapters that a request may name in its place."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.errors import JsonResponse
from headstart.server.service import Front, front_of

__all__ = ["router"]

router = APIRouter()


def _cards(service: Front) -> list[dict[str, Any]]:
    common = {
        "object": "model",
        "created": service.started,
        "owned_by": "headstart",
        "max_model_len": service.max_model_len,
    }
    models = [
        {"id": name, **common, "root": service.name, "parent": None} for name in service.names
    ]
    adapters = [
        {"id": adapter, **common, "root": service.name, "parent": service.name}
        for adapter in service.adapters
    ]
    return [*models, *adapters]


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The model and its adapters."""
    return JsonResponse({"object": "list", "data": _cards(front_of(request))})


@router.get("/v1/models/{name:path}")
async def show_model(name: str, request: Request) -> Response:
    """One of them."""
    front = front_of(request)
    front.adapter(name)  # raises what any request does that names what there is not
    return JsonResponse(next(card for card in _cards(front) if card["id"] == name))
