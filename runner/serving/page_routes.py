"""The routes that only the web page uses, and that may change with the page: sign-in, the live view, the graph."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from plait.errors import PlaitError
from plait.runner.client.runs import Runs
from plait.runner.serving import http_bodies
from plait.runner.serving.http_guard import problem
from plait.runner.serving.json_body import StrictJsonRoute
from plait.runner.serving.sign_in import CodeRefused, SignIn
from plait.runner.views.live_view import LiveView, ViewChange


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

    async def open_live(
        self, run_id: str, chosen: Annotated[http_bodies.LiveQuery, Query()]
    ) -> AsyncGenerator[ObjectReceiveStream[ServerSentEvent]]:
        """Open the stream of the changes of a run. Raises RunNotFound, TaskNotFound."""
        view = self._runs.view(run_id, chosen.task)
        try:
            async with aclosing(view.changes()) as changes:
                first = await anext(changes)  # an unknown run or task is the answer, not an event
                async with self._open(view, first, changes) as stream:
                    yield stream
        finally:
            view.close()

    @asynccontextmanager
    async def _open(
        self, view: LiveView, first: ViewChange, changes: AsyncGenerator[ViewChange]
    ) -> AsyncGenerator[ObjectReceiveStream[ServerSentEvent]]:
        sender, receiver = anyio.create_memory_object_stream[ServerSentEvent](16)
        async with receiver, anyio.create_task_group() as group:
            group.start_soon(self._send, view, sender, first, changes)
            yield receiver
            group.cancel_scope.cancel()

    async def _send(
        self,
        view: LiveView,
        sender: ObjectSendStream[ServerSentEvent],
        first: ViewChange,
        changes: AsyncGenerator[ViewChange],
    ) -> None:
        """Send `first`, then `changes`, then all later changes until the server stops. The page reconnects after a
        failure of the store.
        """
        async with sender:
            await sender.send(_event(first.kind, first.value))
            try:
                while True:
                    async with aclosing(changes):
                        async for change in changes:
                            await sender.send(_event(change.kind, change.value))
                    with anyio.move_on_after(view.pause):
                        await self._stopping.wait()
                        return
                    changes = view.changes()
            except PlaitError as error:
                await sender.send(_event("failed", {"message": str(error)}))


def _event(kind: str, value: object) -> ServerSentEvent:
    return ServerSentEvent(event=kind, data=value)
