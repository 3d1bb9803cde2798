"""`GET /v1/models`: the model, and the adapters that a request may name in its place.

OpenAI's clients and Anthropic's read this path.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.errors import JsonResponse
from headstart.server.service import BaseService, front_of

router = APIRouter()


def _cards(service: BaseService[Any, Any]) -> list[dict[str, Any]]:
    """Return the models with the fields of both APIs; clients ignore unknown fields."""
    started = datetime.fromtimestamp(service.started, UTC)
    common = {
        "object": "model",
        "created": service.started,
        "owned_by": "headstart",
        "max_model_len": service.max_model_len,
        "root": service.name,
        "type": "model",
        "created_at": started.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": service.max_model_len - 1,
        "max_tokens": service.max_model_len - 1,
    }
    parents = dict.fromkeys(service.names) | dict.fromkeys(service.adapters, service.name)
    return [
        {"id": name, "display_name": name, **common, "parent": parent}
        for name, parent in parents.items()
    ]


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the model and its adapters."""
    cards = _cards(front_of(request))
    page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return JsonResponse({"object": "list", "data": cards, **page})


@router.get("/v1/models/{name:path}")
async def show_model(name: str, request: Request) -> Response:
    """Show the model, or an adapter."""
    front = front_of(request)
    front.adapter(name)  # raises ApiError for another name
    return JsonResponse(next(card for card in _cards(front) if card["id"] == name))
