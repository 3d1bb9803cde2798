"""The page at `/`: the pool as a map, the tree of prefixes, hits over time, and a chat."""

import asyncio
import threading
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from headstart.server.errors import JsonResponse
from headstart.server.page.reference import complete_description, render_reference

__all__ = ["mount"]

_FILES = Path(__file__).parent / "files"
# Everything comes from this server, and nothing that a model writes can be run.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; form-action 'self'; frame-ancestors 'none'; "
        "base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class _Files(StaticFiles):
    """The page's files; an SVG that is opened alone is a page, too."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_HEADERS)
        return response


def mount(app: FastAPI, *, with_pool: bool = True) -> None:
    """Serve the page and its files, and the API's description at `/docs` and `/openapi.json`.

    with_pool: False if there is no single pool to show; then the description is the page.
    """
    lock = threading.Lock()

    def describe() -> dict[str, Any]:
        with lock:  # the first call takes a third of a second
            return complete_description(app.openapi(), app.state.service.name)

    @app.get("/", include_in_schema=False)
    async def show_page(request: Request) -> Response:
        if not with_pool:
            return RedirectResponse("/docs")
        return FileResponse(_FILES / "index.html", headers=_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def show_reference(request: Request) -> Response:
        text = await asyncio.to_thread(lambda: render_reference(describe()))
        return HTMLResponse(text, headers=_HEADERS)

    @app.get("/openapi.json", include_in_schema=False)
    async def show_description(request: Request) -> Response:
        return JsonResponse(await asyncio.to_thread(describe))

    app.mount("/page", _Files(directory=_FILES), name="page")
