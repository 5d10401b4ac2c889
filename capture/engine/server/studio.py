"""The studio: a page for browsers at ``/headgate/`` on vLLM's server.

`make studio` builds its files from the folder ``studio`` of the repository. They hold no data and need no key; whatever
the page shows, it asks of documented routes with the key that its reader typed in.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter, HTTPException
from starlette.responses import RedirectResponse, Response

PATH = "/headgate/"
FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
TYPES = {INDEX: "text/html", "studio.css": "text/css", "studio.js": "text/javascript"}
"""The page's files, and their types."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: it runs and loads its own files alone, and calls its own server alone."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def open_studio() -> APIRouter:
    """Return the router of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get(PATH.rstrip("/"))
    async def without_slash() -> Response:
        # Relative, so that a proxy may serve it under another path.
        return RedirectResponse(PATH.strip("/") + "/")

    @router.get(PATH)
    async def index() -> Response:
        return page(INDEX)

    @router.get(f"{PATH}{{name}}")
    async def file(name: str) -> Response:
        return page(name)

    return router


def page(name: str) -> Response:
    """Return a file of the page.

    Raises:
        HTTPException: With status 404, if it has none of that name.
    """
    if name not in TYPES:
        raise HTTPException(404, f"the studio has no file of that name; it has {', '.join(TYPES)}")
    return Response(_content(name), media_type=TYPES[name], headers=HEADERS)


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
