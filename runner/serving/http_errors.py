"""Error responses: one shape, and a status code for each kind of error."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from plait.errors import PlaitError
from plait.runner.serving.http_guard import problem

_HTTP_KINDS = {404: "not_found", 405: "method_not_allowed"}
_INVALID = 422, "invalid_request"


class ErrorFacts(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    kind: str
    """One word for programs, such as run_not_found."""
    message: str
    """The cause and the remedy, for people."""


class ErrorBody(BaseModel):
    """The shape of every error."""

    error: ErrorFacts


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody, "description": what}
    for code, what in {
        401: "The token is missing or wrong.",
        403: "Another host than this server's.",
        404: "There is no such run, task or path.",
        408: "The request was incomplete.",
        409: "The request conflicts with the state of the run.",
        413: "The request is too large.",
        415: "The body is not application/json.",
        422: "The request, or the plan in it, has mistakes.",
        502: "The backend failed.",
        503: "The store does not answer.",
    }.items()
}

DOCUMENTED_BESIDE_OTHERS: dict[int | str, dict[str, Any]] = {
    code: {
        "description": answer["description"],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
    }
    for code, answer in DOCUMENTED.items()
}
"""The same for a route whose responses have another media type."""


class NothingLeft(Exception):  # noqa: N818 - a normal response
    """No event can follow in an ended run: status 204 keeps an `EventSource` from reconnecting."""


def add_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in the one shape."""
    app.add_exception_handler(HTTPException, _handle_http)
    app.add_exception_handler(RequestValidationError, _handle_validation)
    app.add_exception_handler(NothingLeft, _handle_nothing_left)
    app.add_exception_handler(Exception, _handle_bug)
    app.add_exception_handler(PlaitError, _handle_error)


async def _handle_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PlaitError)
    return JSONResponse(problem(error.word, str(error)), error.http_status)


async def _handle_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code, kind, said = error.status_code, _HTTP_KINDS.get(error.status_code, "refused"), str(error.detail)
    if code == 400:  # an unreadable body, treated like an invalid one
        code, kind = _INVALID
    if (
        code in _HTTP_KINDS and said == HTTPStatus(code).phrase
    ):  # the framework gives no more than the phrase of the code
        said = f"there is no {request.method} {request.url.path} here; GET /openapi.json says what there is"
    headers = error.headers
    if code == 405 and (
        methods := _allowed_methods(request)
    ):  # the framework names the methods of one route; two routes may share a path
        headers = {"allow": ", ".join(methods)}
    return JSONResponse(problem(kind, said), code, headers=headers)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods that the path of the request allows."""
    published: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    return sorted(
        method.upper()
        for path, methods in published.items()
        if compile_path(path)[0].match(request.url.path)
        for method in methods
    )


async def _handle_validation(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    said = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5]]
    code, kind = _INVALID
    return JSONResponse(problem(kind, "; ".join(said)), code)


async def _handle_bug(_request: Request, _error: Exception) -> JSONResponse:
    return JSONResponse(problem("internal", "internal error; see the log of the server"), 500)


async def _handle_nothing_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=204)
