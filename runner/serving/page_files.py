"""The files of the web page, served as they are: no build step, no file from elsewhere."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request, Response

FOLDER = "/page/"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""The content security policy of the page: its own files alone, and text never becomes markup or a script."""
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INDEX = "index.html"


def page_files() -> Mapping[str, tuple[bytes, str]]:
    """Return the contents and the media type of each file, by the path under which the file is served."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in (files(__package__ or "") / "page").iterdir():
        name, dot, ending = file.name.rpartition(".")
        if name and dot + ending in _TYPES:
            path = "/" if file.name == _INDEX else FOLDER + file.name
            found[path] = file.read_bytes(), f"{_TYPES[dot + ending]}; charset=utf-8"
    return found


def page_router() -> APIRouter:
    """Return the routes of the files. The page holds no data, so the guard asks for no token here."""
    router = APIRouter(include_in_schema=False)
    for path, (content, kind) in page_files().items():
        router.add_api_route(path, _answer(content, kind), methods=["GET"])
    return router


def _answer(content: bytes, kind: str) -> Callable[[Request], Response]:
    packed = gzip.compress(content, mtime=0)

    def answer(request: Request) -> Response:
        if request.url.path == "/" and "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)  # a program that asks for `/` receives no page
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type=kind, headers={"content-encoding": "gzip"})
        return Response(content, media_type=kind)

    return answer
