"""The routes, each a method of `Runs` over HTTP: the shapes of requests, the event streams, the one shape of all
errors, and what answers have beside the views. All of it is published in /openapi.json.

At the end stands the web page: its files, served as they are; and the routes that only it uses and that may change with
it: sign-in, the live view, the graph, the rows as a file, the question of a signed link.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeAlias

import anyio
import anyio.to_thread
from anyio.abc import ObjectReceiveStream
from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from plait.errors import PlaitError, RunNotFound, RunNotResumable, RunOwned, StoreError
from plait.json_form import JsonValue
from plait.runner.client.answer_task import How
from plait.runner.client.create_run import MOST_KEY_CHARACTERS
from plait.runner.client.offered_plans import posted_plan
from plait.runner.client.run_backends import BackendSet
from plait.runner.client.runs import Runs
from plait.runner.domain.notify_target import linked_question
from plait.runner.engine.live_run import TextPiece
from plait.runner.plan.plan_positions import MAX_DEPTH, nests_too_deep
from plait.runner.serving.http_guard import PROOF, QUESTION, SIGN_IN, SignIn, problem
from plait.runner.state.stored_run import POSTED
from plait.runner.views.live_view import LiveView, ViewChange
from plait.runner.views.result_rows import as_csv, as_json_lines
from plait.runner.views.view_models import (
    EventView,
    Preview,
    QuestionView,
    ReplyView,
    RunDetail,
    RunView,
    TaskDetail,
    json_schema,
    json_text,
    view_json,
)
from plait.statuses import RUN_DONE, TO_START, RunStatus

_HTTP_KINDS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed"}
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


def add_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in the one shape."""
    app.add_exception_handler(HTTPException, _handle_http)
    app.add_exception_handler(RequestValidationError, _handle_validation)
    app.add_exception_handler(Exception, _handle_bug)
    app.add_exception_handler(PlaitError, _handle_error)


async def _handle_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PlaitError)
    return JSONResponse(problem(error.word, str(error)), error.http_status)


async def _handle_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 204:
        return Response(status_code=204)
    code, kind, message = error.status_code, _HTTP_KINDS.get(error.status_code, "refused"), str(error.detail)
    if code == 400:  # an unreadable body, treated like an invalid one
        code, kind = _INVALID
    # The framework gives no more than the phrase of the code.
    if code in _HTTP_KINDS and message == HTTPStatus(code).phrase:
        message = f"there is no {request.method} {request.url.path} here; GET /openapi.json says what there is"
    return JSONResponse(problem(kind, message), code, headers=error.headers)


async def _handle_validation(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    messages = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5]]
    code, kind = _INVALID
    return JSONResponse(problem(kind, "; ".join(messages)), code)


async def _handle_bug(_request: Request, _error: Exception) -> JSONResponse:
    return JSONResponse(problem("internal", "internal error; see the log of the server"), 500)


MOST_SEQ = 2**53


def _json(value: JsonValue) -> JsonValue:
    if nests_too_deep(value):
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
    json.dumps(value, allow_nan=False)
    return value


Json: TypeAlias = Annotated[Any, AfterValidator(_json)]
"""Any JSON value. Python's reader would accept NaN as well."""


class Received(BaseModel):
    """What a request holds."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class _Sent(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class NewRun(Received):
    """A run to create and start."""

    plan: dict[str, Any]
    """A plan as in a plan file, without `backends`, `concurrency` and inputs that are files."""
    inputs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Values of the plan's inputs, in place of the defaults."""
    key: Annotated[str, Field(min_length=1, max_length=MOST_KEY_CHARACTERS)] | None = None
    """Key of the request: the same request with the same key creates no second run."""


class ResumeBody(Received):
    """How a run continues."""

    answers: dict[str, Json] = Field(default_factory=dict[str, Any])
    """Answers to questions of waiting tasks, by task id."""
    retry_failed: StrictBool = False
    """Run failed tasks again, and completed tasks whose stored result is damaged."""


class AnswerBody(Received):
    """The answer to the question of a task."""

    value: Json
    """A value that fits the schema of the question: text if the schema is null, any value if the schema is empty."""
    attempt: Annotated[int, Field(ge=1, le=MOST_SEQ)] | None = None
    """The attempt that asked (`attempts` of the task). Without it, the answer is for the present question."""


class SettleBody(Received):
    """The decision of a person about a task that waits: see `plait answer`."""

    how: How
    """`done` completes the task with `text` as its result, `again` runs the task again, `fail` fails it for the reason
    `text`. `again` is for a task marked at_most_once that was interrupted.
    """
    text: str = ""


class ContinueBody(Received):
    """One more message in the conversation of a task."""

    message: Annotated[str, Field(min_length=1, pattern=r"\S")]
    """The message, which is not blank."""


class PauseBody(Received):
    """What is paused."""

    backend: str | None = None
    """A backend of the run; null for the whole run."""
    off: StrictBool = False
    """Lift the pause of the run, or of the backend."""


class TuneBody(Received):
    """How many tasks run at once: of the whole run, on backends, or both."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["concurrency"], "properties": {"concurrency": {"type": "integer"}}},
                {"required": ["limits"], "properties": {"limits": {"minProperties": 1}}},
            ]
        }
    )
    concurrency: StrictInt | None = None
    """Of the whole run."""
    limits: dict[str, StrictInt] = Field(default_factory=dict[str, int])
    """On backends, by name."""


class PreviewQuery(Received):
    """The resume to preview."""

    retry_failed: bool = False
    """Run failed tasks again, and completed tasks whose stored result is damaged."""


class ListQuery(Received):
    """Which runs to list."""

    limit: int = Field(default=50, ge=1, le=1000)
    """Number of runs at most."""
    offset: int = Field(default=0, ge=0, le=10_000)
    """Number of newer runs to leave out."""
    status: list[RunStatus] = Field(default_factory=list[RunStatus])
    """Only runs in one of these statuses; may be given more than once."""
    name: str | None = None
    """Only runs with exactly this name."""
    search: str = ""
    """Only runs with this text in their id or name, in any case."""


class EventsQuery(Received):
    """Which events to stream."""

    after: int = Field(default=0, ge=0, le=MOST_SEQ)
    """Stream only events with a higher number."""
    text: bool = False
    """Also stream the texts of answers while they are written, of attempts that execute on this server."""


class RunStatusBody(_Sent):
    """A run and its status."""

    run_id: str
    status: RunStatus


class WakeResult(_Sent):
    """The runs that go on."""

    woken: list[str]
    errors: dict[str, str]
    """Why due runs do not go on, by id."""


class TuneResult(RunStatusBody):
    """A run after a change."""

    is_live: bool
    """True if a process works on the run, which reads the change within a second; false if the next one does."""


class AnswerResult(RunStatusBody):
    """A run after an answer."""

    taken: bool
    """True if the task has the answer; false if the answer is stored for the process that runs the run."""


class QuestionList(_Sent):
    """The tasks of all runs that wait for a person, those of the newest run first."""

    questions: list[QuestionView]


class RunList(_Sent):
    """Runs, newest first."""

    runs: list[RunView]


_RECONNECT_MS = 1000
_BUFFERED = 16  # events
ITEM_SCHEMA = {
    "properties": {
        "id": {"type": "string", "description": "Number of the event, for `Last-Event-ID`; none for `task_text`."},
        "event": {"type": "string", "description": "Kind of the event."},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": [json_schema(EventView), json_schema(TextPiece)]},
        },
    },
    "required": ["event", "data"],
}
"""Schema of each event, merged into FastAPI's own in /openapi.json."""


@asynccontextmanager
async def open_stream(
    stopping: anyio.Event,
    source: AsyncGenerator[ServerSentEvent],
    beside: AsyncGenerator[ServerSentEvent] | None = None,
) -> AsyncGenerator[ObjectReceiveStream[ServerSentEvent]]:
    """Open a stream of the events of `source`, with those of `beside` between them. The stream ends with `source`, and
    once `stopping` is set.

    A task of its own reads the events: a generator that FastAPI consumes must not hold a cancel scope across `yield`,
    and a scope for each event doubles the cost of an event, from 57 to 110 µs (2,000 tasks in a MemoryStore).
    """
    sender, receiver = anyio.create_memory_object_stream[ServerSentEvent](_BUFFERED)
    reading = anyio.CancelScope()

    async def send(events: AsyncGenerator[ServerSentEvent]) -> None:
        async with aclosing(events):
            async for event in events:
                await sender.send(event)

    async def read() -> None:
        with sender, reading:
            async with anyio.create_task_group() as both:
                if beside is not None:
                    both.start_soon(send, beside)
                await send(source)
                both.cancel_scope.cancel()

    async def stop_reading() -> None:
        await stopping.wait()
        reading.cancel()

    async with receiver, anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(stop_reading)
        yield receiver
        group.cancel_scope.cancel()


async def _sent_events(events: AsyncGenerator[EventView]) -> AsyncGenerator[ServerSentEvent]:
    """Yield a line that says when a client reconnects, then the events.

    The status is sent by then, so a failure of the store is a comment: a client that reconnects receives the rest, or
    the error.
    """
    yield ServerSentEvent(retry=_RECONNECT_MS)
    async with aclosing(events):
        try:
            async for event in events:
                yield ServerSentEvent(id=str(event.seq), event=event.kind, raw_data=json_text(event).decode())
        except (StoreError, RunNotFound) as error:
            yield ServerSentEvent(comment=json.dumps(str(error)))


async def _sent_texts(texts: AsyncGenerator[TextPiece]) -> AsyncGenerator[ServerSentEvent]:
    """Yield the pieces without numbers: a client that reconnects receives the whole text again."""
    async with aclosing(texts):
        async for piece in texts:
            yield ServerSentEvent(event="task_text", raw_data=json_text(piece).decode())


_Stream: TypeAlias = ObjectReceiveStream[ServerSentEvent]
_Answers: TypeAlias = dict[int | str, dict[str, Any]]


class ServedRuns:
    """The runs that are served, with a method for each route. Posted plans run on `backends`; without these, no runs
    are created here. Unless it `starts` runs, the workers of the store execute those that are created and resumed here.
    """

    def __init__(self, runs: Runs, backends: BackendSet | None = None, *, starts: bool = True) -> None:
        self.runs = runs
        self.stopping = anyio.Event()
        """Set when the server stops."""
        self._backends = backends
        self._settings = {} if backends is None else {**backends.settings(), POSTED: True}
        """The settings stored with each new run."""
        self._starts = starts

    def router(self) -> APIRouter:
        """Return all routes with their paths."""
        router = APIRouter(prefix="/api", responses=DOCUMENTED)
        again: _Answers = {200: {"model": RunStatusBody, "description": "A run with this key exists already."}}
        if self._backends is not None:
            router.add_api_route(
                "/runs", self.create, methods=["POST"], status_code=201, responses={**DOCUMENTED, **again}
            )
        router.add_api_route("/runs", self.list_all, methods=["GET"])
        router.add_api_route("/runs/wake", self.wake, methods=["POST"])
        router.add_api_route("/runs/{run_id}", self.get, methods=["GET"], response_model=RunDetail)
        router.add_api_route("/runs/{run_id}/resume", self.resume, methods=["POST"])
        router.add_api_route("/runs/{run_id}/pause", self.pause, methods=["POST"])
        router.add_api_route("/runs/{run_id}/tune", self.tune, methods=["POST"])
        router.add_api_route("/runs/{run_id}/cancel", self.cancel, methods=["POST"])
        router.add_api_route("/runs/{run_id}/preview", self.preview, methods=["GET"], response_model=Preview)
        router.add_api_route(
            "/runs/{run_id}/tasks/{task_id}", self.get_task, methods=["GET"], response_model=TaskDetail
        )
        router.add_api_route("/runs/{run_id}/tasks/{task_id}/answer", self.answer, methods=["POST"])
        router.add_api_route("/runs/{run_id}/tasks/{task_id}/retry", self.retry, methods=["POST"])
        router.add_api_route("/runs/{run_id}/tasks/{task_id}/settle", self.settle, methods=["POST"])
        router.add_api_route(
            "/runs/{run_id}/tasks/{task_id}/continue", self.continue_task, methods=["POST"], response_model=ReplyView
        )
        streamed: _Answers = {
            200: {"content": {"text/event-stream": {"itemSchema": ITEM_SCHEMA}}},
            204: {"description": "The run has ended, and no event is left."},
        }

        async def events(
            stream: _Stream = Depends(self.open_events),  # noqa: B008 - the interface of FastAPI
        ) -> AsyncGenerator[ServerSentEvent]:
            """Stream the events of a run, stored and future ones, up to the event that ends the run."""
            async for event in stream:
                yield event

        router.add_api_route(
            "/runs/{run_id}/events",
            events,
            methods=["GET"],
            response_class=EventSourceResponse,
            responses={**DOCUMENTED_BESIDE_OTHERS, **streamed},
        )
        router.add_api_route("/questions", self.list_questions, methods=["GET"])
        return router

    async def create(self, new: NewRun, response: Response) -> RunStatusBody:
        """Create a run, and start it unless the server queues runs for workers."""
        assert self._backends is not None
        plan = await anyio.to_thread.run_sync(posted_plan, new.plan, new.inputs, self._backends.specs)
        plan = plan.fitted_to(self._backends.specs, self._backends.default)
        run_id, is_new = await self.runs.find_or_create(
            plan.dag,
            key=new.key,
            settings=self._settings,
            policy=plan.policy,
            budget=plan.budget,
            priority=plan.priority,
        )
        if not is_new:
            response.status_code = 200
        status = await self._status(run_id)
        if self._starts and status in TO_START:
            with suppress(RunOwned, RunNotResumable):  # another process has started the run
                await self.runs.start(run_id)
            status = await self._status(run_id)
        response.headers["location"] = f"/api/runs/{run_id}"
        return RunStatusBody(run_id=run_id, status=status)

    async def list_all(self, page: Annotated[ListQuery, Query()]) -> RunList:
        """List the newest runs that fit."""
        records = await self.runs.list(
            page.limit, offset=page.offset, statuses=page.status, name=page.name, search=page.search
        )
        return RunList(runs=list(records))

    async def wake(self) -> WakeResult:
        """Continue the parked runs that are due at once, as this server does by itself every few seconds. Of a server
        that takes posted plans, only posted runs. If it queues runs, its workers continue them.
        """
        woken: dict[str, PlaitError | None] = {}
        if self._starts:
            await self.runs.wake(woken.__setitem__, fits=None if self._backends is None else self.runs.is_posted)
        return WakeResult(
            woken=[run_id for run_id, error in woken.items() if error is None],
            errors={run_id: str(error) for run_id, error in woken.items() if error is not None},
        )

    async def list_questions(self) -> QuestionList:
        """List the tasks of all runs that wait for a person."""
        return QuestionList(questions=list(await self.runs.questions()))

    async def get(self, run_id: str) -> Response:
        """Return a run with its tasks and their results."""
        return await _answer(await self.runs.get(run_id))

    async def resume(self, run_id: str, how: ResumeBody | None = None) -> RunStatusBody:
        """Continue a run that was interrupted, waits or failed. A run in progress on this server is not changed. If the
        server queues runs for workers, only the answers are stored, because the workers continue the run.
        """
        how = how or ResumeBody()
        if self._starts:
            await self.runs.start(run_id, how.answers, retry_failed=how.retry_failed)
        elif how.retry_failed:
            raise RunNotResumable(
                f"this server executes no runs, and the workers of its store do not retry failed tasks; "
                f"run `plait resume {run_id} --retry-failed`"
            )
        else:
            for task_id, answer in how.answers.items():
                await self.runs.answer(run_id, task_id, answer)
        return RunStatusBody(run_id=run_id, status=await self._status(run_id))

    async def preview(self, run_id: str, how: Annotated[PreviewQuery, Query()]) -> Response:
        """Return the action of a resume for each task, and the tasks that may be billed twice. Changes nothing."""
        return await _answer(await self.runs.preview(run_id, retry_failed=how.retry_failed))

    async def get_task(self, run_id: str, task_id: str) -> Response:
        """Return a task with its conversation and its attempts."""
        return await _answer(await self.runs.task(run_id, task_id))

    async def retry(self, run_id: str, task_id: str) -> RunStatusBody:
        """Run a failed task again while its run goes on, or at once one that waits for its next attempt."""
        await self.runs.retry(run_id, task_id)
        return RunStatusBody(run_id=run_id, status=await self._status(run_id))

    async def settle(self, run_id: str, task_id: str, how: SettleBody) -> RunStatusBody:
        """Settle a task that waits for a person, as `plait answer --done`, `--again` and `--fail` do."""
        await self.runs.settle(run_id, task_id, how.how, how.text)
        return RunStatusBody(run_id=run_id, status=await self._status(run_id))

    async def continue_task(self, run_id: str, task_id: str, said: ContinueBody) -> Response:
        """Send one more message in the conversation of a task after the run, and return the answer."""
        reply = await self.runs.continue_task(run_id, task_id, said.message)
        return await _answer(ReplyView.of(run_id, task_id, reply))

    async def pause(self, run_id: str, how: PauseBody) -> TuneResult:
        """Start no further task of a run, or on one of its backends, or let it go on. Calls under way end normally."""
        is_live = await self.runs.pause(run_id, backend=how.backend, off=how.off)
        return TuneResult(run_id=run_id, status=await self._status(run_id), is_live=is_live)

    async def tune(self, run_id: str, how: TuneBody) -> TuneResult:
        """Change how many tasks of a run are under way at once. Calls under way end normally."""
        is_live = await self.runs.tune(run_id, concurrency=how.concurrency, limits=how.limits)
        return TuneResult(run_id=run_id, status=await self._status(run_id), is_live=is_live)

    async def cancel(self, run_id: str) -> RunStatusBody:
        """Cancel a run for good, wherever it runs. A run that has ended is not changed."""
        return RunStatusBody(run_id=run_id, status=await self.runs.cancel(run_id))

    async def answer(self, run_id: str, task_id: str, given: AnswerBody) -> AnswerResult:
        """Answer the question of a task. The first answer counts. A run without an owner continues when resumed."""
        taken = await self.runs.answer(run_id, task_id, given.value, attempt=given.attempt)
        return AnswerResult(run_id=run_id, status=await self._status(run_id), taken=taken)

    async def open_events(
        self,
        run_id: str,
        start: Annotated[EventsQuery, Query()],
        last_event_id: Annotated[
            int,
            Header(
                ge=0,
                le=MOST_SEQ,
                description="As `after`, sent by a client that reconnects; the higher number counts.",
            ),
        ] = 0,
    ) -> AsyncGenerator[_Stream]:
        """Open the stream of the events of a run. Raises RunNotFound; HTTPException if no event can follow."""
        after = max(start.after, last_event_id)
        if await self._status(run_id) in RUN_DONE:
            async with aclosing(self.runs.events(run_id, after)) as left:
                if await anext(left, None) is None:
                    raise HTTPException(204)  # keeps an `EventSource` from reconnecting
        events = _sent_events(self.runs.events(run_id, after))
        texts = _sent_texts(self.runs.texts(run_id)) if start.text else None
        async with open_stream(self.stopping, events, texts) as stream:
            yield stream

    async def _status(self, run_id: str) -> RunStatus:
        return (await self.runs.get(run_id, tasks=False)).status


async def _answer(shown: object) -> Response:
    """Return the view as JSON, made in a worker thread: thousands of tasks take long, and other runs would stand
    still.
    """
    return Response(await anyio.to_thread.run_sync(json_text, shown), media_type="application/json")


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
        router = APIRouter(include_in_schema=False)
        router.add_api_route(SIGN_IN, self.sign_in, methods=["POST"])
        router.add_api_route(PROOF, self.prove, methods=["GET"])
        router.add_api_route(QUESTION, self.question, methods=["POST"])
        router.add_api_route("/page/runs/{run_id}/graph", self.graph, methods=["GET"])
        router.add_api_route("/page/runs/{run_id}/rows", self.rows, methods=["GET"])

        async def live(
            stream: _Stream = Depends(self.open_live),  # noqa: B008 - the interface of FastAPI
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
        questions = await self._runs.questions(run_id)
        question = next((one for one in questions if (one.task_id, one.attempt) == (task_id, attempt)), None)
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

    async def open_live(self, run_id: str, task: str | None = None) -> AsyncGenerator[_Stream]:
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
