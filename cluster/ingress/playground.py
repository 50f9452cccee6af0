"""The playground: one static page at `/` that talks to this server's own API.

Its files are read once and served from memory. The content security policy lets the page load nothing from elsewhere,
whatever a model writes into it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    content: bytes
    media_type: str
    etag: str


def playground_router() -> APIRouter:
    router = APIRouter()
    pages = {
        path.relative_to(STATIC).as_posix(): _page(path) for path in STATIC.rglob("*") if path.suffix in MEDIA_TYPES
    }

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _respond(request, pages["index.html"])

    @router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
    async def static(request: Request, name: str) -> Response:
        page = pages.get(name)
        if page is None:
            raise HTTPException(404)
        return _respond(request, page)

    return router


def _page(path: Path) -> Page:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return Page(content=content, media_type=MEDIA_TYPES[path.suffix], etag=etag)


def _respond(request: Request, page: Page) -> Response:
    headers = {**HEADERS, "ETag": page.etag}
    if request.headers.get("if-none-match") == page.etag:
        return Response(status_code=304, headers=headers)
    return Response(page.content, media_type=page.media_type, headers=headers)
