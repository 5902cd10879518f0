"""The web page over HTTP: its files, served as they are; and the routes that only it uses and that may change with it:
sign-in, the live view, the graph, the rows as a file, the question of a signed link.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from importlib.resources import files
from typing import Annotated, Literal

import anyio
import anyio.to_thread
from anyio.abc import ObjectReceiveStream
from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic_core import to_json

from plait.errors import PlaitError
from plait.runner.client.runs import Runs
from plait.runner.domain.notify_target import linked_question
from plait.runner.serving.http_guard import PROOF, QUESTION, SIGN_IN, SignIn
from plait.runner.serving.http_routes import AnswerBody, Received, SettleBody, StrictJsonRoute, open_stream
from plait.runner.views.live_view import LiveView, ViewChange
from plait.runner.views.result_rows import as_csv, as_json_lines
from plait.runner.views.view_models import view_json

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""The content security policy of the page: its own files alone, and text never becomes markup or a script."""
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INDEX = "index.html"


class SignInBody(Received):
    """The sign-in of a browser."""

    code: str
    """The code in the address that the command opened."""


class LinkBody(Received):
    """A signed link to a question, and what a person says to it."""

    link: str
    """What stands behind the `#` of the link."""
    said: AnswerBody | SettleBody | None = None
    """The answer, or the decision if the task waits for one; None to read the question."""


def page_files() -> Mapping[str, tuple[bytes, str]]:
    """Return the contents and the media type of each file, by the path under which the file is served."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in (files(__package__ or "") / "page").iterdir():
        name, dot, ending = file.name.rpartition(".")
        if name and dot + ending in _TYPES:
            path = "/" if file.name == _INDEX else f"/page/{file.name}"
            found[path] = file.read_bytes(), f"{_TYPES[dot + ending]}; charset=utf-8"
    return found


def files_router() -> APIRouter:
    """Return the routes of the files. The page holds no data, so the guard asks for no token here."""
    router = APIRouter(include_in_schema=False)
    for path, (content, kind) in page_files().items():
        router.add_api_route(path, _file(content, kind), methods=["GET"])
    return router


def _file(content: bytes, kind: str) -> Callable[[Request], Response]:
    packed = gzip.compress(content, mtime=0)

    def answer(request: Request) -> Response:
        if request.url.path == "/" and "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)  # a program that asks for `/` receives no page
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type=kind, headers={"content-encoding": "gzip"})
        return Response(content, media_type=kind)

    return answer


class PageApi:
    """The routes, one method each."""

    def __init__(self, runs: Runs, sign_in: SignIn, stopping: anyio.Event) -> None:
        self._runs = runs
        self._sign_in = sign_in
        self._stopping = stopping

    def router(self) -> APIRouter:
        """Return all routes with their paths."""
        router = APIRouter(route_class=StrictJsonRoute, include_in_schema=False)
        router.add_api_route(SIGN_IN, self.sign_in, methods=["POST"])
        router.add_api_route(PROOF, self.prove, methods=["GET"])
        router.add_api_route(QUESTION, self.question, methods=["POST"])
        router.add_api_route("/page/runs/{run_id}/graph", self.graph, methods=["GET"])
        router.add_api_route("/page/runs/{run_id}/rows", self.rows, methods=["GET"])

        async def live(
            stream: ObjectReceiveStream[ServerSentEvent] = Depends(self.open_live),  # noqa: B008 - the interface of FastAPI
        ) -> AsyncGenerator[ServerSentEvent]:
            async for event in stream:
                yield event

        router.add_api_route("/page/runs/{run_id}/live", live, methods=["GET"], response_class=EventSourceResponse)
        return router

    async def sign_in(self, given: SignInBody) -> Response:
        """Give the browser the token for a code."""
        try:
            return JSONResponse({"token": self._sign_in.redeem(given.code)})
        except ValueError as error:
            raise HTTPException(401, str(error)) from None

    async def prove(self, challenge: str) -> Response:
        """Prove that this server holds the token."""
        return PlainTextResponse(self._sign_in.prove(challenge))

    async def question(self, given: LinkBody) -> Response:
        """Return the question of a signed link, or give it the answer. The link is good while the question is open."""
        try:
            run_id, task_id, attempt = linked_question(os.environ, given.link)
        except ValueError as error:
            raise HTTPException(403, str(error)) from None
        asked = await self._runs.questions(run_id)
        question = next((one for one in asked if (one.task_id, one.attempt) == (task_id, attempt)), None)
        if question is None:
            raise HTTPException(410, "this link is over: the question was answered, or its run has ended")
        if given.said is None:
            return JSONResponse(view_json(question))
        if isinstance(given.said, AnswerBody):
            await self._runs.answer(run_id, task_id, given.said.value, attempt=attempt)
        elif question.asks is None:
            await self._runs.settle(run_id, task_id, given.said.how, given.said.text)
        else:
            raise HTTPException(422, "this question takes an answer, and no decision")
        return JSONResponse({"status": (await self._runs.get(run_id, tasks=False)).status})

    async def graph(self, run_id: str) -> Response:
        """Return the picture of the run's graph."""
        return JSONResponse(await self._runs.graph(run_id))

    async def rows(
        self,
        run_id: str,
        form: Annotated[Literal["csv", "jsonl"], Query(alias="format")] = "csv",
        group: str | None = None,
    ) -> Response:
        """Return the results of the run as a file, as `plait export` writes them; with `group` those of its parts."""
        rows = await self._runs.export(run_id)
        if group is not None:
            rows = [row for row in rows if row["group"] == group]
        as_text, kind = (as_csv, "text/csv") if form == "csv" else (as_json_lines, "application/jsonl")
        return Response(await anyio.to_thread.run_sync(as_text, rows), media_type=kind)

    async def open_live(
        self, run_id: str, task: str | None = None
    ) -> AsyncGenerator[ObjectReceiveStream[ServerSentEvent]]:
        """Open the stream of the changes of a run, with `task` in full. Raises RunNotFound, TaskNotFound."""
        view = self._runs.view(run_id, task)
        try:
            async with aclosing(view.changes()) as changes:
                first = await anext(changes)  # an unknown run or task is the answer, not an event
                async with open_stream(self._stopping, _live_events(view, first, changes)) as stream:
                    yield stream
        finally:
            view.close()


async def _live_events(
    view: LiveView, first: ViewChange, changes: AsyncGenerator[ViewChange]
) -> AsyncGenerator[ServerSentEvent]:
    """Yield `first`, then `changes`, then all later changes. The page reconnects after a failure of the store."""
    yield _sent(first)
    try:
        while True:
            async with aclosing(changes):
                async for change in changes:
                    yield _sent(change)
            await anyio.sleep(view.pause)
            changes = view.changes()
    except PlaitError as error:
        yield ServerSentEvent(event="failed", data={"message": str(error)})


def _sent(change: ViewChange) -> ServerSentEvent:
    """Return the change as an event. FastAPI's own way to JSON takes half a second for 20,000 rows."""
    return ServerSentEvent(event=change.kind, raw_data=to_json(change.value, inf_nan_mode="null").decode())
