"""The application: every API of the server over one engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headstart.server import page, speech, tokenize
from headstart.server.anthropic import messages
from headstart.server.bodies import Body, decode
from headstart.server.cache import api as cache
from headstart.server.errors import ApiError, JsonResponse
from headstart.server.middleware import RequestMiddleware
from headstart.server.openai import api as openai
from headstart.server.options import ServerOptions
from headstart.server.responses import api as responses
from headstart.server.service import BaseService, ClientDisconnected, Service, base_service_of
from headstart.server.speech import SpeechService
from headstart.server.stores import ResponseStore
from headstart.server.tenants import Tenants, open_tenants
from headstart.version import __version__

if TYPE_CHECKING:
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.omni.omni import AsyncOmni
    from headstart.server.monitoring.logs import Tracer

_LONG = 1 << 15  # bytes; longer bodies are parsed in a thread
_MAX_VALUES = 1 << 20  # in a body; parsing delays all threads by up to 0.1 s
# Maximum number of objects, and of lists, in a body. Some APIs process them in the event loop.
_MAX_OBJECTS = 20_000


class _Endpoint(NamedTuple):
    """The body class of a path, and the function that answers its requests.

    is_optional: the function takes None for a request without a body.
    """

    body: type[Body]
    answer: Callable[..., Awaitable[Response]]
    is_optional: bool


def _find_endpoints(router: APIRouter) -> Iterator[tuple[str, _Endpoint]]:
    for route in router.routes:
        if isinstance(route, APIRoute) and route.methods == {"POST"}:
            hint = get_type_hints(route.endpoint).get("body")
            kinds = get_args(hint) or (hint,)
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, Body):
                    yield route.path, _Endpoint(kind, route.endpoint, type(None) in kinds)


def _parse_body(kind: type[Body], data: bytes) -> Body:
    """Parse and validate a body. Raises ApiError or, like FastAPI, RequestValidationError."""
    if data.count(b",") > _MAX_VALUES:
        raise ApiError(400, f"the body has more than {_MAX_VALUES:,} values")
    try:
        value = decode(data) if data else None
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": (error.pos,), "ctx": {"error": error.msg}}
        raise RequestValidationError([problem]) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, too many digits or brackets
        raise ApiError(400, "the body is not readable JSON") from error
    for container, bracket, name in ((dict, b"{", "objects"), (list, b"[", "lists")):
        if data.count(bracket) > _MAX_OBJECTS < _count(value, container):
            raise ApiError(400, f"the body has more than {_MAX_OBJECTS:,} {name}")
    if value is None:
        raise RequestValidationError([{"type": "missing", "loc": (), "msg": "Field required"}])
    try:
        # FastAPI also sets `from_attributes`, which changes the texts of errors.
        return kind.model_validate(value, from_attributes=True)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise RequestValidationError(details) from error


def _count(value: Any, kind: type) -> int:
    """Return the number of objects or lists in a value."""
    count, rest = 0, [value]
    while rest:
        item = rest.pop()
        count += isinstance(item, kind)
        if isinstance(item, dict | list):
            rest.extend(item.values() if isinstance(item, dict) else item)
    return count


router = APIRouter()


@router.get("/health")
async def check_health(request: Request) -> Response:
    """Return status 200 while the engine runs, 503 after it failed."""
    if not base_service_of(request).is_running:
        raise ApiError(503, "the engine is closed")
    return JsonResponse({"status": "ok"})


@router.get("/ready")
async def check_ready(request: Request) -> Response:
    """Return 200 while new requests are accepted; 503 if the server stops or no replica runs."""
    service = base_service_of(request)
    service.check_ready()
    if not service.has_engine:
        raise ApiError(503, "no replica is running; requests wait for one", retry_after=5)
    return JsonResponse({"status": "ready"})


@router.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """Return the server's metrics in the text format of Prometheus."""
    text = await base_service_of(request).read_metrics()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _cards(service: BaseService[Any, Any]) -> list[dict[str, Any]]:
    """Return the models with OpenAI's and Anthropic's fields; clients ignore unknown fields."""
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
    cards = _cards(base_service_of(request))
    page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return JsonResponse({"object": "list", "data": cards, **page})


@router.get("/v1/models/{name:path}")
async def show_model(name: str, request: Request) -> Response:
    """Show the model, or an adapter."""
    if not name:  # a slash after "models"
        return await list_models(request)
    service = base_service_of(request)
    service.adapter(name)  # raises ApiError for an unknown name
    cards = {card["id"]: card for card in _cards(service)}
    any_model = {**cards[service.name], "id": name, "display_name": name}
    return JsonResponse(cards.get(name, any_model))


_ROUTERS = (  # the first router with a matching path is used
    openai.router,
    messages.router,
    responses.router,
    router,
    tokenize.router,
)
_SPEECH_ROUTERS = (router, speech.router)


def create_app(
    llm: AsyncLLM,
    name: str,
    options: ServerOptions | None = None,
    tenants: Tenants | None = None,
    cache_api: APIRouter = cache.router,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Return an ASGI application for a text model. name: the model's name in the API.

    tenants: the default is `open_tenants(options)`. cache_api: the routes below `/cache`. tracer:
    records every request that ended. The caller closes `llm`. Raises ConfigError.
    """
    options = options or ServerOptions()
    tenants = tenants or open_tenants(options)
    service = Service(llm, name, options, tenants, tracer)
    app = _Application(service, (*_ROUTERS, cache_api))
    app.state.responses = ResponseStore()
    page.mount(app, with_pool=cache_api is cache.router)
    return app


def create_speech_app(
    omni: AsyncOmni,
    name: str,
    options: ServerOptions | None = None,
    tenants: Tenants | None = None,
) -> FastAPI:
    """Return an ASGI application for a model with speech output. Arguments as for `create_app`."""
    options = options or ServerOptions()
    service = SpeechService(omni, name, options, tenants or open_tenants(options))
    app = _Application(service, _SPEECH_ROUTERS)
    page.mount(app, with_pool=False)
    return app


class _Application(FastAPI):
    """FastAPI's routes behind `RequestMiddleware`, which replaces FastAPI's middleware.

    A `POST` with a body is dispatched here; FastAPI uses its route only for the API's description.
    FastAPI's dispatch would take as much time of the event loop as several tokens of a small model.
    """

    def __init__(self, service: BaseService[Any, Any], routers: Sequence[APIRouter]) -> None:
        super().__init__(
            title="headstart",
            version=__version__,
            openapi_url=None,  # see `page`
            generate_unique_id_function=lambda route: route.name,
        )
        self.state.service = service
        self._endpoints: dict[str, _Endpoint] = {}
        for router in routers:
            self.include_router(router)
            for path, endpoint in _find_endpoints(router):
                self._endpoints.setdefault(path, endpoint)
        self._routes = AsyncExitStackMiddleware(self.router)
        self._entry: ASGIApp = RequestMiddleware(self._dispatch, service)
        if (origin := service.options.cors_origin) is not None:
            self._entry = CORSMiddleware(  # outermost, as browsers send preflights without a key
                self._entry,
                allow_origins=[name.strip() for name in origin.split(",")],
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-headstart-ignored", "retry-after"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await self._entry(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removesuffix("\n")  # as FastAPI's routes do
        endpoint = self._endpoints.get(path) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._routes(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            data = await request.body()
            body = None
            if not endpoint.is_optional or data not in (b"", b"null"):
                if len(data) <= _LONG:
                    body = _parse_body(endpoint.body, data)
                else:
                    body = await asyncio.to_thread(_parse_body, endpoint.body, data)
            response = await endpoint.answer(body=body, request=request)
        except ClientDisconnect as error:
            raise ClientDisconnected from error
        await response(scope, receive, send)
