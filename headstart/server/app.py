"""The application: every API of the server over one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headstart.server import page, tokenize
from headstart.server.anthropic import messages
from headstart.server.cache import api as cache
from headstart.server.endpoints import Endpoints
from headstart.server.errors import ApiError, JsonResponse
from headstart.server.middleware import RequestMiddleware
from headstart.server.openai import chat, completions, models
from headstart.server.options import ServerOptions
from headstart.server.responses import api as responses
from headstart.server.service import BaseService, Service, front_of
from headstart.server.speech import chat as speech
from headstart.server.speech.chat import SpeechService
from headstart.server.stores import ResponseStore
from headstart.server.tenants import Tenants, open_tenants
from headstart.version import __version__

if TYPE_CHECKING:
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.omni.omni import AsyncOmni
    from headstart.server.monitoring.tracing import Tracer

__all__ = ["create_app", "create_speech_app"]

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


_ROUTERS = (  # the first that has a path counts
    chat.router,
    completions.router,
    messages.router,
    responses.router,
    router,
    models.router,
    tokenize.router,
)
_SPEECH_ROUTERS = (router, models.router, speech.router)


def create_app(
    llm: AsyncLLM,
    name: str,
    options: ServerOptions | None = None,
    tenants: Tenants | None = None,
    cache_api: APIRouter = cache.router,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Return an ASGI application that answers with a model; `name` is its name in the API.

    tenants: defaults to those of the options and of this machine's API keys. cache_api: the routes
    below `/cache`; the page at `/` needs those of a single engine. tracer: records every request
    that ended. The caller closes `llm`. Raises ConfigError.
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
    """Return an application like `create_app` for a model that speaks. Raises ConfigError."""
    options = options or ServerOptions()
    service = SpeechService(omni, name, options, tenants or open_tenants(options))
    app = _Application(service, _SPEECH_ROUTERS)
    page.mount(app, with_pool=False)
    return app


class _Application(FastAPI):
    """FastAPI's routes, behind the middleware of all requests, and without FastAPI's own.

    The middleware turns all exceptions into answers, so nothing else has to handle them.
    """

    def __init__(self, service: BaseService[Any, Any], routers: Sequence[APIRouter]) -> None:
        super().__init__(
            title="headstart",
            version=__version__,
            openapi_url=None,  # see `page`
            generate_unique_id_function=lambda route: route.name,
        )
        self.state.service = service
        for router in routers:
            self.include_router(router)
        routes = AsyncExitStackMiddleware(self.router)
        self._entry: ASGIApp = RequestMiddleware(Endpoints(routes, routers), service)
        if (origin := service.options.cors_origin) is not None:
            self._entry = CORSMiddleware(  # outside: browsers send preflights without a key
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
