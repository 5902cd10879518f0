"""What can be asked over HTTP, in terms of `RunService`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import anyio
import anyio.to_thread
from anyio.abc import ObjectReceiveStream
from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from plait.backends.protocol import JsonValue
from plait.runner.domain.status import RUN_DONE, RunStatus
from plait.runner.errors import RunNotFound, RunNotResumable, RunOwned
from plait.runner.operations.create_run import run_id_of
from plait.runner.operations.inspect import RunInfo
from plait.runner.service import RunService
from plait.runner.web import schemas
from plait.runner.web.errors import DOCUMENTED, DOCUMENTED_BESIDE_OTHERS, NothingLeft
from plait.runner.web.json_body import ReadOnce
from plait.runner.web.posted_plan import posted_plan
from plait.runner.web.sse import ITEM_SCHEMA, open_stream

_Stream: TypeAlias = ObjectReceiveStream[ServerSentEvent]
_Answers: TypeAlias = dict[int | str, dict[str, Any]]
_TO_START = frozenset({RunStatus.QUEUED, RunStatus.INTERRUPTED})


@dataclass(frozen=True, slots=True)
class ServedRuns:
    """What is served: runs of `service` on `backends`, made with `settings`. `stopping` is set when the end is near."""

    service: RunService
    backends: Collection[str]
    settings: Mapping[str, JsonValue]
    stopping: anyio.Event = field(default_factory=anyio.Event)


class Api:
    """The routes, each a method."""

    def __init__(self, served: ServedRuns) -> None:
        self._served = served
        self._runs = served.service

    def router(self) -> APIRouter:
        """Every route under its path."""
        router = APIRouter(prefix="/api/runs", responses=DOCUMENTED, route_class=ReadOnce)
        again: _Answers = {
            200: {"model": schemas.RunStatusShape, "description": "The run of this key was there already."}
        }
        router.add_api_route("", self.create, methods=["POST"], status_code=201, responses={**DOCUMENTED, **again})
        router.add_api_route("", self.list_all, methods=["GET"])
        router.add_api_route("/{run_id}", self.get, methods=["GET"], response_model=schemas.RunDetailShape)
        router.add_api_route("/{run_id}/resume", self.resume, methods=["POST"])
        router.add_api_route("/{run_id}/cancel", self.cancel, methods=["POST"])
        router.add_api_route("/{run_id}/tasks/{task_id}/answer", self.answer, methods=["POST"])
        streamed: _Answers = {
            200: {"content": {"text/event-stream": {"itemSchema": ITEM_SCHEMA}}},
            204: {"description": "The run has ended, and no event is left."},
        }

        async def events(
            stream: _Stream = Depends(self.open_events),  # noqa: B008 - FastAPI's way
        ) -> AsyncGenerator[ServerSentEvent]:
            """The run's events, stored ones and those to come, up to the one that ends it, as server-sent events."""
            async for event in stream:
                yield event

        router.add_api_route(
            "/{run_id}/events",
            events,
            methods=["GET"],
            response_class=EventSourceResponse,
            responses={**DOCUMENTED_BESIDE_OTHERS, **streamed},
        )
        return router

    async def create(self, new: schemas.NewRun, response: Response) -> schemas.RunStatusShape:
        """Make a run and start it."""
        served = self._served
        plan = await anyio.to_thread.run_sync(posted_plan, new.plan, new.inputs, served.backends)
        if new.key is not None and await self._exists(run_id_of(new.key)):
            response.status_code = 200
        run_id = await self._runs.create_run(plan.dag, key=new.key, settings=served.settings, policy=plan.policy)
        status = await self._status(run_id)
        if status in _TO_START:
            with suppress(RunOwned, RunNotResumable):  # another process was quicker
                await self._runs.start_run(run_id)
            status = await self._status(run_id)
        response.headers["location"] = f"/api/runs/{run_id}"
        return schemas.RunStatusShape(run_id=run_id, status=status)

    async def list_all(self, page: Annotated[schemas.ListQuery, Query()]) -> schemas.RunList:
        """The last created runs, newest first."""
        return schemas.RunList(runs=[schemas.run_shape(run) for run in await self._runs.list_runs(page.limit)])

    async def get(self, run_id: str) -> Response:
        """A run with its tasks and their results."""
        told = await anyio.to_thread.run_sync(_detail, await self._runs.get_run(run_id))
        return Response(told, media_type="application/json")

    async def resume(self, run_id: str, how: schemas.Resumption | None = None) -> schemas.RunStatusShape:
        """Go on with a run that was interrupted, waits or failed. Changes nothing for one that goes on here."""
        how = how or schemas.Resumption()
        await self._runs.resume_run(run_id, how.answers, retry_failed=how.retry_failed)
        return schemas.RunStatusShape(run_id=run_id, status=await self._status(run_id))

    async def cancel(self, run_id: str) -> schemas.RunStatusShape:
        """Cancel a run for good, wherever it runs. Changes nothing for one that has ended."""
        return schemas.RunStatusShape(run_id=run_id, status=await self._runs.cancel_run(run_id))

    async def answer(self, run_id: str, task_id: str, given: schemas.Answer) -> schemas.AnswerResult:
        """Answer what a task asks. The first answer counts. A run that nobody runs goes on when it is resumed."""
        taken = await self._runs.answer_question(run_id, task_id, given.value, attempt=given.attempt)
        return schemas.AnswerResult(run_id=run_id, status=await self._status(run_id), taken=taken)

    async def open_events(
        self,
        run_id: str,
        start: Annotated[schemas.EventsQuery, Query()],
        last_event_id: Annotated[
            int,
            Header(ge=0, le=schemas.MOST_SEQ, description="As `after`, of who was cut off; the higher counts."),
        ] = 0,
    ) -> AsyncGenerator[_Stream]:
        """Open the stream of a run's events. Raises RunNotFound; NothingLeft if no event can follow."""
        after = max(start.after, last_event_id)
        if await self._status(run_id) in RUN_DONE:
            async with aclosing(self._runs.events(run_id, after)) as left:
                if await anext(left, None) is None:
                    raise NothingLeft
        async with open_stream(self._runs.events(run_id, after), self._served.stopping) as stream:
            yield stream

    async def _status(self, run_id: str) -> RunStatus:
        return (await self._runs.get_run(run_id, tasks=False)).status

    async def _exists(self, run_id: str) -> bool:
        try:
            return bool(await self._status(run_id))
        except RunNotFound:
            return False


def _detail(run: RunInfo) -> str:
    """In a thread of its own: thousands of tasks take their time, in which other runs would stand still."""
    return schemas.run_detail_shape(run).model_dump_json(by_alias=True)
