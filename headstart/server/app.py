"""The application: every API of the server over one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from headstart.server import page, tokenize
from headstart.server.anthropic import messages
from headstart.server.cache import api as cache
from headstart.server.errors import add_handlers
from headstart.server.middleware import Frontdoor
from headstart.server.monitoring import health
from headstart.server.monitoring.logs import RequestLog
from headstart.server.openai import chat, completions, models
from headstart.server.options import ServerOptions
from headstart.server.responses import api as responses
from headstart.server.responses.store import ResponseStore
from headstart.server.service import Service
from headstart.server.tenants import Tenants, open_tenants
from headstart.version import __version__

if TYPE_CHECKING:
    from headstart.engine.async_llm import AsyncLLM
    from headstart.server.monitoring.tracing import Tracer

__all__ = ["create_app"]

_ROUTERS = (
    health.router,
    models.router,
    completions.router,
    chat.router,
    messages.router,
    responses.router,
    tokenize.router,
)


def create_app(
    llm: AsyncLLM,
    name: str,
    options: ServerOptions | None = None,
    tenants: Tenants | None = None,
    cache_api: APIRouter = cache.router,
    tracer: Tracer | None = None,
) -> FastAPI:
    """An ASGI application that answers with a model; `name` is the model's in the API.

    tenants: None for those that the options and the API keys on this machine make. Whoever made
    `llm` closes it. cache_api: what is below `/cache`; the page at `/` shows that of one engine
    alone. tracer: is told of every request that ended. Raises ConfigError.
    """
    options = options or ServerOptions()
    tenants = tenants or open_tenants(options)
    app = FastAPI(title="headstart", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = Service(llm, name, options, tenants, tracer)
    app.state.responses = ResponseStore()
    for router in (*_ROUTERS, cache_api):
        app.include_router(router)
    page.mount(app, with_pool=cache_api is cache.router)
    add_handlers(app)
    app.add_middleware(Frontdoor, service=app.state.service)
    app.add_middleware(RequestLog)
    if options.cors_origin is not None:  # outermost, since browsers ask first, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[one.strip() for one in options.cors_origin.split(",")],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
