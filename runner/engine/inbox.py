"""The notes that other processes send to a run's owner.

The owner reads a note within a second, or within 5 seconds if a server's notification is lost: the owner polls a local
store, and a server notifies the owner of a note. A sender in the owner's own process wakes the owner instead (`wake`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress

import anyio
import anyio.abc

from plait.clock_and_ids import parse_time
from plait.errors import PlaitError, StoreError
from plait.events import Owner
from plait.json_form import JsonInput, JsonValue, to_json, value
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import Note, NoteRecord
from plait.program_log import logger
from plait.runner.domain.asked_question import Asking, OnQuestion, OpenQuestion
from plait.runner.domain.run_tuning import retry_in, tuned_in
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.run_options import Cancels, server_of
from plait.runner.state.stored_run import asks_for_cancel

LOOK_EVERY_S = 1.0
"""Seconds between two reads of the inbox by the owner, unless a server notifies the owner."""
ANSWER = "answer"
"""The kind of note that answers the question of a task."""


class Inbox:
    """The inbox of a run, read by the owner of the run.

    While the store is away it is not read. A failed read does not end the run: the first failure is logged, and
    the inbox is read again later.
    """

    def __init__(self, run: LiveRun, store: Store) -> None:
        self._run = run
        self._store = store
        self._server = server_of(store)
        self._run_id = run.run_id
        self._after = 0
        self._failure_logged = False
        self._asleep = anyio.CancelScope()
        self._woken = False

    async def handle(self, owner: Owner) -> None:
        """Pass on answers as they arrive. Return when a valid cancel request has arrived. `wake` finds the inbox by
        `owner`.
        """
        with _wakes(owner, self._wake):
            while True:
                await self._sleep()
                notes = await self._new_notes()
                try:
                    if await asks_for_cancel(self._store, self._run_id, notes):
                        return
                except StoreError as error:
                    self._log_failure(error)
                    continue
                self._after = notes[-1].number if notes else self._after
                for note in filter(None, map(answer_in, notes)):
                    self._pass_on(note)
                if tuned := [one for one in map(tuned_in, notes) if one is not None]:
                    self._run.tune(tuned)
                for task_id, attempt in filter(None, map(retry_in, notes)):
                    if self._run.execution is not None:
                        self._run.execution.retry(task_id, attempt)

    def read_again(self) -> None:
        """Read all notes again. A store that has lost notes may number new notes like lost ones; notes that were passed
        on before have no further effect.
        """
        self._after = 0

    def _wake(self) -> None:
        self._woken = True
        self._asleep.cancel()

    async def _sleep(self) -> None:
        """Sleep until the next read of the inbox is due. A wake since the last read counts."""
        with anyio.CancelScope() as self._asleep:
            if not self._woken:
                if self._server is not None and not self._run.sink.away:
                    await self._server.wait_for_note(self._run_id)
                else:
                    await self._run.options.clock.sleep(LOOK_EVERY_S)
        self._woken = False

    async def look_for_answer(self, task_id: str, attempt: int, deadline_at: str) -> None:
        """Pass on the unread answers to the `attempt` of the task that were sent by `deadline_at`."""
        for note in filter(None, map(answer_in, await self._new_notes())):
            if (note.task_id, note.attempt) == (task_id, attempt) and note.at <= deadline_at:
                self._pass_on(note)

    async def _new_notes(self) -> Sequence[NoteRecord]:
        if self._run.sink.away:
            return ()
        try:
            return await self._store.list_notes(self._run_id, self._after)
        except StoreError as error:
            self._log_failure(error)
            return ()

    def _log_failure(self, error: StoreError) -> None:
        if not self._failure_logged:
            logger(run=self._run_id).warning("inbox_not_read", error=str(error))
        self._failure_logged = True

    def _pass_on(self, note: AnswerNote) -> None:
        try:
            self._run.answer(note.task_id, note.attempt, note.value, "person")
        except PlaitError as error:
            logger(run=self._run_id).warning("answer_refused", task=note.task_id, error=str(error))


_awake: dict[str, Callable[[], object]] = {}
"""For each owner in this process, by id: wakes the owner. Callable from any thread."""


@contextmanager
def _wakes(owner: Owner, wake: Callable[[], None]) -> Generator[None]:
    loop = asyncio.get_running_loop()
    _awake[owner.owner_id] = lambda: loop.call_soon_threadsafe(wake)
    try:
        yield
    finally:
        del _awake[owner.owner_id]


def wake(owner: Owner | None) -> None:
    """Have `owner` read its inbox now, if the owner is in this process; otherwise do nothing."""
    if owner is not None and (wakes := _awake.get(owner.owner_id)) is not None:
        with suppress(RuntimeError):  # the owner's event loop is closed
            wakes()


@value
class AnswerNote:
    """An answer in the inbox."""

    task_id: str
    """The task that asked."""
    attempt: int
    """The number of the attempt that ended with the question."""
    value: JsonValue
    """The answer."""
    at: str
    """The time of sending."""
    nonce: str
    """A text that makes two equal answers distinct."""


def answer_note(answer: AnswerNote) -> Note:
    """Return the note that carries `answer`."""
    body = to_json({"attempt": answer.attempt, "value": answer.value, "nonce": answer.nonce})
    return Note(ANSWER, answer.at, answer.task_id, body)


def answer_in(note: NoteRecord) -> AnswerNote | None:
    """Return the answer in `note`; None if `note` is of another kind or cannot be decoded."""
    if note.kind != ANSWER or note.task_id is None:
        return None
    try:
        body = json.loads(note.body)
        return AnswerNote(note.task_id, int(body["attempt"]), body["value"], note.at, str(body["nonce"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


class PendingQuestions:
    """Waits for answers to the questions of one run.

    Calls `answer` with an answer of the callback or a default, and `expire` after a deadline without a default. Calls
    `look_on` after each call of the callback, with or without an answer.
    """

    def __init__(
        self,
        run: LiveRun,
        answer: Callable[[str, int, JsonInput, str], bool],
        expire: Callable[[int], None],
        look_on: Callable[[], None],
    ) -> None:
        self._run = run
        self._state = run.state
        self._scheduler = run.scheduler
        self._answer = answer
        self._expire = expire
        self._look_on = look_on
        self._calls: dict[int, anyio.CancelScope] = {}
        self._deadlines: dict[int, anyio.CancelScope] = {}

    def begin(self, workers: anyio.abc.TaskGroup, position: int, asking: Asking) -> None:
        """Start the callback and the deadline, if any, for the question of the task at `position`."""
        # The scopes are created here because `end` and `close` may be called before the new tasks first run.
        if self._run.options.on_question is not None:
            task_id, attempt = self._state.dag.tasks[position].id, self._state.attempts[position]
            question = OpenQuestion.of(self._run.run_id, task_id, attempt, asking)
            self._calls[position] = scope = anyio.CancelScope()
            self._scheduler.keep_open()
            workers.start_soon(self._ask, self._run.options.on_question, question, scope)
        if asking.deadline_at is not None:
            self._deadlines[position] = scope = anyio.CancelScope()
            workers.start_soon(self._wait_for_deadline, position, asking, scope)

    def close(self, position: int) -> None:
        """Cancel the callback and the deadline of a question that is answered or no longer open."""
        for waiting in (self._calls, self._deadlines):
            scope = waiting.pop(position, None)
            if scope is not None:
                scope.cancel()

    def end(self) -> None:
        """Cancel all deadlines, because nothing else is left to do in the run."""
        for scope in self._deadlines.values():
            scope.cancel()

    async def _ask(self, on_question: OnQuestion, question: OpenQuestion, scope: anyio.CancelScope) -> None:
        """Call `on_question` once the question is stored, and pass the answer on. Errors of the callback are logged."""
        cancels = Cancels()
        try:
            with scope:
                await self._run.sink.submit([]).wait()
                value = await on_question(question)
                if value is not None:
                    try:
                        self._answer(question.task_id, question.attempt, value, "callback")
                    except PlaitError as error:
                        self._run.program_log.warning("answer_refused", task=question.task_id, error=str(error))
        except (asyncio.CancelledError, Exception) as error:
            if isinstance(error, asyncio.CancelledError) and cancels.since:
                raise
            self._run.program_log.warning("on_question_failed", task=question.task_id, error=type(error).__name__)
            self._run.program_log.debug("on_question_failed", error, task=question.task_id)
        finally:
            self._scheduler.end_keep_open()
        self._look_on()

    async def _wait_for_deadline(self, position: int, asking: Asking, scope: anyio.CancelScope) -> None:
        assert asking.deadline_at is not None
        clock, task_id, attempt = (
            self._run.options.clock,
            self._state.dag.tasks[position].id,
            self._state.attempts[position],
        )
        with scope:
            while (remaining := parse_time(asking.deadline_at) - clock.wall()) > 0:
                await clock.sleep(remaining)
            # The inbox is read at intervals only: an answer sent in time may still be unread.
            await self._run.look_for_answer(task_id, attempt, asking.deadline_at)
        if scope.cancelled_caught or self._state.asking.get(position) is not asking:
            return
        if asking.question.default is None:
            self._expire(position)
        else:
            self._answer(task_id, attempt, asking.question.default, "default")
