"""The page at `/`: the pool as a map, the tree of prefixes, hits over time, and a chat."""

from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

__all__ = ["mount"]

_FILES = Path(__file__).parent / "files"
# Everything comes from this server, and nothing that a model writes can be run.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def mount(app: FastAPI) -> None:
    """Serve the page and its files."""

    @app.get("/", include_in_schema=False)
    async def show_page(request: Request) -> Response:
        return FileResponse(_FILES / "index.html", headers=_HEADERS)

    app.mount("/page", StaticFiles(directory=_FILES), name="page")
