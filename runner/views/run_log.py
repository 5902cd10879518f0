"""The history of a run for readers: stored events interleaved with the activity of the tasks.

The activity of agents comes from the files of their turns, during and after execution, regardless of the owner of the
run. Output with timestamps is sorted among the events by time; output without timestamps precedes the end of the
attempt. Messages of attempts without files are stored with the end of the attempt and precede that event. Turns of a
person's later conversation produce no events, and appear at the time of storage.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING

from plait.backends.agents.agent_output import TurnWatch
from plait.events import ATTEMPT_ENDS, RunCreated, SessionOpened, TaskAnswered, TasksAdded, TaskStarted, TaskWaiting
from plait.json_form import JsonValue, value
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import EventRecord, MessageRecord, TaskRecord
from plait.runner.domain.asked_question import answers_of
from plait.runner.state.attempt_files import attempt_files, files_root, run_folder
from plait.runner.state.stored_run import rows_file_of
from plait.runner.views.view_models import usage_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plait.backends.backend_protocol import Output

_LONGEST = 8000  # characters of incomplete lines held back
_LATER = "~"  # behind all times
_OF_ATTEMPTS = ATTEMPT_ENDS | {SessionOpened.kind}
_NEED_TASKS = frozenset({TasksAdded.kind, TaskWaiting.kind, TaskAnswered.kind})


@value
class RunLogEntry:
    """An entry of the log of a run, in the shape of a stored event."""

    at: str | None
    """The time, UTC in ISO 8601; None if unknown."""
    kind: str
    """"output" for the activity of a task, "message" for a message, otherwise the kind of a stored event."""
    task_id: str | None
    attempt: int | None
    detail: Mapping[str, JsonValue]
    """Of an output: `output` (text, tool, waiting, notice), `text` and the usage up to now; the texts of a turn in
    sequence are the whole text of the turn. Of a message: `role`, and `content`, or `damaged` (true) if the content
    does not fit its checksum. Of a stored event: the stored detail and the session, or the error, duration and cost, of
    the attempt.
    """
    seq: int | None = None
    """The number of a stored event; None for other entries."""


class RunLog:
    """Reader of the history of a run, or of a single task, oldest first. Must be closed."""

    def __init__(self, store: Store, run_id: str, task_id: str | None = None) -> None:
        self._store = store
        self._run_id = run_id
        self._task_id = task_id
        self._root = files_root(store)
        self._has_files = False
        self._after = 0
        self._running: list[_AttemptOutput] = []
        self._placed = 0
        self._asked: dict[str, int] = {}
        self._persons: list[tuple[str, int, RunLogEntry]] = []
        """Pending turns of persons: a heap by time, then by order of discovery."""
        self._found = 0
        self._known: dict[str, int] = {}
        """The number of messages in turns of persons found up to now, by task."""

    @property
    def is_at_work(self) -> bool:
        """Whether an agent is working on an attempt without a reported end."""
        return any(turn.watch is not None and turn.watch.is_alive for turn in self._running)

    async def more(self) -> AsyncIterator[RunLogEntry]:
        """Yield the entries since the previous call, as far as available. Raises StoreError."""
        self._has_files = self._root is not None and run_folder(self._root, self._run_id).is_dir()
        while records := await self._store.list_events(self._run_id, self._after):
            tasks: Mapping[str, TaskRecord] = {}
            if any(record.kind in _NEED_TASKS for record in records):  # read once for all records
                tasks = {task.task_id: task for task in await self._tasks_of(records)}
            for record in records:
                self._after = record.seq
                first = self._placed
                if record.kind in {RunCreated.kind, TasksAdded.kind}:
                    self._placed += json.loads(record.detail)["tasks"]
                if self._task_id in {None, record.task_id}:
                    async for entry in self._event(record, tasks, first):
                        yield entry
        for entry in chain(self._agent_activity(None), self._person_messages(None)):
            yield entry

    async def _tasks_of(self, records: Sequence[EventRecord]) -> Sequence[TaskRecord]:
        """Return all tasks of the run, or those that the events name of a run that reads its rows as it goes."""
        run = await self._store.get_run(self._run_id)
        if run is None or rows_file_of(run) is None:
            return await self._store.list_tasks(self._run_id)
        sizes = [json.loads(one.detail)["tasks"] for one in records if one.kind in {RunCreated.kind, TasksAdded.kind}]
        tasks = [*await self._store.list_tasks(self._run_id, range(self._placed, self._placed + sum(sizes)))]
        for name in {one.task_id for one in records if one.kind in _NEED_TASKS and one.task_id is not None}:
            tasks += await self._store.list_tasks(self._run_id, name)
        return tasks

    def rest(self) -> Iterator[RunLogEntry]:
        """Yield the text held back by `more`: lines without an end. Must be the last call before `close`."""
        for turn in self._running:
            yield from turn.rest()

    def close(self) -> None:
        """Close all files."""
        for turn in self._running:
            turn.close()

    async def _event(
        self, record: EventRecord, tasks: Mapping[str, TaskRecord], first: int
    ) -> AsyncIterator[RunLogEntry]:
        for entry in chain(self._agent_activity(record.at), self._person_messages(record.at)):
            yield entry
        for turn in [turn for turn in self._running if turn.ends_with(record)]:
            self._running.remove(turn)
            for entry in turn.rest():
                yield entry
            for entry in await self._stored_messages(turn):
                yield entry
            turn.close()
        if record.kind == TaskStarted.kind:
            task_id, attempt = record.task_id or "", record.attempt or 0
            files = None if self._root is None else attempt_files(self._root, self._run_id, task_id, attempt)
            self._running.append(_AttemptOutput(task_id, attempt, None if files is None else TurnWatch(files.turn)))
        of_attempt = await self._of_attempt(record)
        detail = {**json.loads(record.detail), **of_attempt, **self._of_tasks(record, tasks, first)}
        yield RunLogEntry(record.at, record.kind, record.task_id, record.attempt, detail, record.seq)

    def _agent_activity(self, until: str | None) -> Iterator[RunLogEntry]:
        """Yield the activity of agents up to the time `until`, by time; with None, all activity up to now."""
        if not self._has_files:
            return
        ready = [(at, n) for n, turn in enumerate(self._running) if (at := turn.next_at(until)) is not None]
        heapify(ready)
        while ready:
            turn = self._running[n := heappop(ready)[1]]
            yield from turn.step()
            if (at := turn.next_at(until)) is not None:
                heappush(ready, (at, n))

    async def _stored_messages(self, turn: _AttemptOutput) -> Sequence[RunLogEntry]:
        """Return the stored messages of an attempt; for an attempt with reported output, only system notes and damaged
        messages.
        """
        messages = await self._store.list_messages(self._run_id, turn.task_id)
        self._find_persons(turn.task_id, [one for one in messages if one.attempt == 0])
        return [
            RunLogEntry(None, "message", turn.task_id, turn.attempt, _said(one))
            for one in messages
            if one.attempt == turn.attempt and (one.damaged or one.role == "system" or not turn.has_entries)
        ]

    def _find_persons(self, task_id: str, messages: Sequence[MessageRecord]) -> None:
        for one in messages[self._known.get(task_id, 0) :]:
            self._found += 1
            entry = RunLogEntry(one.at, "message", task_id, 0, _said(one))
            heappush(self._persons, (one.at, self._found, entry))
        self._known[task_id] = len(messages)

    def _person_messages(self, until: str | None) -> Iterator[RunLogEntry]:
        """Yield the turns of persons up to the time `until`; with None, all pending turns."""
        while self._persons and (until is None or self._persons[0][0] <= until):
            yield heappop(self._persons)[2]

    async def _of_attempt(self, record: EventRecord) -> Mapping[str, JsonValue]:
        """Return stored values of the attempt named by the event: the session id; for an end, the error and usage."""
        if record.task_id is None or record.attempt is None or record.kind not in _OF_ATTEMPTS:
            return {}
        attempts = await self._store.list_attempts(self._run_id, record.task_id)
        row = next((one for one in attempts if one.attempt == record.attempt), None)
        if row is None:
            return {}
        columns: dict[str, JsonValue] = {"session_id": row.session_id}
        if record.kind != SessionOpened.kind:
            columns = {"error": row.error, "duration_s": row.duration_s, **asdict(row.usage)}
        return {name: value for name, value in columns.items() if value is not None}

    def _of_tasks(self, record: EventRecord, tasks: Mapping[str, TaskRecord], first: int) -> Mapping[str, JsonValue]:
        """Return the values stored with the tasks of the event: the ids of added tasks (from position `first` on), the
        question, or the answer and its source.
        """
        if record.kind not in _NEED_TASKS:
            return {}
        if record.kind == TasksAdded.kind:
            return {"ids": [name for name, task in tasks.items() if first <= task.position < self._placed]}
        task = tasks.get(record.task_id or "")
        if task is None:
            return {}
        if record.kind == TaskWaiting.kind:
            self._asked[task.task_id] = record.attempt or 0
        attempt = self._asked.get(task.task_id)
        answer = next((one for one in answers_of(task.answers) if one.attempt == attempt), None)
        if record.kind == TaskAnswered.kind:
            return {} if answer is None else {"by": answer.by, "answer": answer.text}
        question = (
            task.question if answer is None and task.attempt == attempt else None if answer is None else answer.question
        )
        return {} if question is None else {"question": question}


def _said(message: MessageRecord) -> Mapping[str, JsonValue]:
    """Return the detail of an entry for the message."""
    return {"role": message.role, **({"damaged": True} if message.damaged else {"content": message.content})}


class _AttemptOutput:
    """A running attempt with its unreported output."""

    def __init__(self, task_id: str, attempt: int, watch: TurnWatch | None) -> None:
        self.task_id = task_id
        self.attempt = attempt
        self.watch = watch
        self.has_entries = False
        self._text = ""
        self._last: tuple[str | None, Output] | None = None

    def ends_with(self, record: EventRecord) -> bool:
        """Return whether `record` ends the attempt."""
        if record.task_id != self.task_id:
            return False
        if record.kind == TaskStarted.kind:  # the end of the attempt was never stored
            return record.attempt != self.attempt
        return record.kind in ATTEMPT_ENDS and record.attempt in {None, self.attempt}

    def next_at(self, until: str | None) -> str | None:
        """Return the sort key of the next output up to `until`; None without output. Output without a time inherits the
        key of the previous output.
        """
        seen = None if self.watch is None else self.watch.peek()
        if seen is None:
            return None
        at = (seen.at or seen.since or _LATER).removesuffix("Z")  # with the Z, 12.3Z would sort after 12.34Z
        return at if until is None or at <= until.removesuffix("Z") else None

    def step(self) -> Iterator[RunLogEntry]:
        """Consume the next output. Yield the entries that are complete."""
        assert self.watch is not None
        seen = self.watch.take()
        if seen.output.kind != "text":
            yield from self._written(whole=True)
            yield self._entry(seen.at, seen.output, seen.output.text)
        else:
            self._text += seen.output.text
            self._last = seen.at, seen.output
            yield from self._written(whole=len(self._text) > _LONGEST)

    def rest(self) -> Iterator[RunLogEntry]:
        """Yield all remaining output."""
        if self.watch is not None:
            while self.watch.peek():
                yield from self.step()
            self.watch.finish()
            while self.watch.peek():
                yield from self.step()
        yield from self._written(whole=True)

    def close(self) -> None:
        """Close the files."""
        if self.watch is not None:
            self.watch.close()

    def _written(self, *, whole: bool) -> Iterator[RunLogEntry]:
        """Yield the complete lines written up to now; with `whole`, the incomplete last line too."""
        end = len(self._text) if whole else self._text.rfind("\n") + 1
        if end and self._last is not None:
            written, self._text = self._text[:end], self._text[end:]
            yield self._entry(*self._last, written)

    def _entry(self, at: str | None, output: Output, text: str) -> RunLogEntry:
        self.has_entries = True
        usage = output.usage
        detail: dict[str, JsonValue] = {"output": output.kind, "text": text}
        detail.update({name: number for name, number in usage_fields(usage).items() if number})
        return RunLogEntry(at, "output", self.task_id, self.attempt, detail)
