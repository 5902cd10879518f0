"""Error responses: one shape, and a status code for each kind of error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from plait.backends.errors import BackendError
from plait.persistence.errors import StoreError
from plait.runner.errors import (
    AnswerConflict,
    BackendMissing,
    KeyConflict,
    PlaitError,
    RunNotFound,
    RunNotResumable,
    RunOwned,
    TaskNotFound,
    TurnNotStored,
)
from plait.runner.operations.error_kinds import ERROR_KINDS
from plait.runner.plan import PlanError
from plait.runner.web.schemas import ErrorBody
from plait.runner.web.security import problem

_CODES: dict[type[Exception], int] = {
    RunNotFound: 404,
    TaskNotFound: 404,
    RunOwned: 409,
    RunNotResumable: 409,
    KeyConflict: 409,
    PlanError: 422,
    AnswerConflict: 409,
    BackendMissing: 422,
    PlaitError: 422,
    BackendError: 502,
    TurnNotStored: 503,
    StoreError: 503,
}
_HTTP_KINDS = {404: "not_found", 405: "method_not_allowed"}
_INVALID = 422, "invalid_request"

DOCUMENTED: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody, "description": what}
    for code, what in {
        401: "The token is missing or wrong.",
        403: "Another host, origin or site than this server's.",
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
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for code, answer in DOCUMENTED.items()
}
"""The same for a route whose responses have another media type."""

_Handler: TypeAlias = Callable[[Request, Exception], Awaitable[JSONResponse]]


class NothingLeft(Exception):  # noqa: N818 - a normal response
    """No event can follow in an ended run: status 204 keeps an `EventSource` from reconnecting."""


def add_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in the one shape."""
    app.add_exception_handler(HTTPException, _handle_http)
    app.add_exception_handler(RequestValidationError, _handle_validation)
    app.add_exception_handler(NothingLeft, _handle_nothing_left)
    app.add_exception_handler(Exception, _handle_bug)
    for error, code in _CODES.items():
        app.add_exception_handler(error, _make_handler(code, ERROR_KINDS[error]))


def _make_handler(code: int, kind: str) -> _Handler:
    async def answer(_request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(problem(kind, str(error)), code)

    return answer


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
