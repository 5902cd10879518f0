"""The routes that only the web page uses, and that may change with the page: sign-in, the live view, the graph."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import anyio
import anyio.to_thread
from anyio.abc import ObjectReceiveStream
from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from plait.errors import PlaitError
from plait.runner.client.runs import Runs
from plait.runner.serving import http_bodies
from plait.runner.serving.http_guard import CodeRefused, SignIn, problem
from plait.runner.serving.http_routes import StrictJsonRoute, open_stream
from plait.runner.views.live_view import LiveView, ViewChange
from plait.runner.views.result_rows import as_csv, as_json_lines, result_rows


class PageApi:
    """The routes, one method each."""

    def __init__(self, runs: Runs, sign_in: SignIn, stopping: anyio.Event) -> None:
        self._runs = runs
        self._sign_in = sign_in
        self._stopping = stopping

    def router(self) -> APIRouter:
        """Return all routes with their paths."""
        router = APIRouter(prefix="/page", route_class=StrictJsonRoute, include_in_schema=False)
        router.add_api_route("/sign-in", self.sign_in, methods=["POST"])
        router.add_api_route("/proof", self.prove, methods=["GET"])
        router.add_api_route("/runs/{run_id}/graph", self.graph, methods=["GET"])
        router.add_api_route("/runs/{run_id}/rows", self.rows, methods=["GET"])

        async def live(
            stream: ObjectReceiveStream[ServerSentEvent] = Depends(self.open_live),  # noqa: B008 - the interface of FastAPI
        ) -> AsyncGenerator[ServerSentEvent]:
            async for event in stream:
                yield event

        router.add_api_route("/runs/{run_id}/live", live, methods=["GET"], response_class=EventSourceResponse)
        return router

    async def sign_in(self, given: http_bodies.SignInBody) -> Response:
        """Give the browser the token for a code."""
        try:
            return JSONResponse({"token": self._sign_in.redeem(given.code)})
        except CodeRefused as refusal:
            return JSONResponse(problem("unauthorized", str(refusal)), 401)

    async def prove(self, challenge: str) -> Response:
        """Prove that this server holds the token."""
        return PlainTextResponse(self._sign_in.prove(challenge))

    async def graph(self, run_id: str) -> Response:
        """Return the picture of the run's graph."""
        return JSONResponse(await self._runs.graph(run_id))

    async def rows(self, run_id: str, chosen: Annotated[http_bodies.RowsQuery, Query()]) -> Response:
        """Return the results of the run as a file, as `plait export` writes them."""
        run = await self._runs.get(run_id)

        def written() -> str:
            rows = result_rows(run.tasks.values())
            if chosen.group is not None:
                rows = [row for row in rows if row["group"] == chosen.group]
            return as_csv(rows) if chosen.format == "csv" else as_json_lines(rows)

        kind = "text/csv" if chosen.format == "csv" else "application/jsonl"
        return Response(await anyio.to_thread.run_sync(written), media_type=kind)

    async def open_live(
        self, run_id: str, chosen: Annotated[http_bodies.LiveQuery, Query()]
    ) -> AsyncGenerator[ObjectReceiveStream[ServerSentEvent]]:
        """Open the stream of the changes of a run. Raises RunNotFound, TaskNotFound."""
        view = self._runs.view(run_id, chosen.task)
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
    yield ServerSentEvent(event=first.kind, data=first.value)
    try:
        while True:
            async with aclosing(changes):
                async for change in changes:
                    yield ServerSentEvent(event=change.kind, data=change.value)
            await anyio.sleep(view.pause)
            changes = view.changes()
    except PlaitError as error:
        yield ServerSentEvent(event="failed", data={"message": str(error)})
