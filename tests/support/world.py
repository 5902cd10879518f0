"""Backends that remember what they were asked, and what must hold while a run goes on, checked at each call and event.

Nothing here trusts the runner: what is stored is read from the store beneath all faults, what was executed is what the
backends saw, and what was told is what a reader of the events was given.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

import anyio

from plait import events
from plait.backends.backend_protocol import Backend, ConversationRequest, Reply
from plait.clock_and_ids import iso
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore
from plait.persistence.store_records import TaskRecord
from plait.statuses import TASK_DONE, TaskStatus
from plait.usage import Usage
from tests.support.seeded_loop import VirtualClock
from tests.support.stores.faulty_store import at_once
from tests.support.story import TALKERS, Story, answer

RUN = "r"
MOST_TRIES = 4
"""Three by the retry policy, and one with a session that turns out to be lost."""


@dataclass(slots=True)
class Round:
    """What was seen since the run was last started or resumed."""

    executed: Counter[str] = field(default_factory=Counter[str])
    answered: Counter[str] = field(default_factory=Counter[str])
    told: list[events.Event] = field(default_factory=list[events.Event])
    running: dict[str, int] = field(default_factory=dict[str, int])
    """Attempts that were told to have started and not to have ended."""
    done: set[str] = field(default_factory=set[str])
    """Tasks that were told, or known before, to be done."""
    away: bool = False
    unstored: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """When the store lacked something that it should have had, and what; allowed while it is away."""


class World:
    """The backends of one story, and its witness; what must not happen is added to `violations`."""

    def __init__(self, story: Story, store: MemoryStore | None, rng: random.Random) -> None:
        self.story = story
        self.store = store
        self.rng = rng
        self.clock = VirtualClock()
        self.violations: list[str] = []
        self.acknowledged: dict[str, str] = {}
        """Results that were told while they were stored."""
        self.executions: Counter[str] = Counter()
        self.stumbled: Counter[str] = Counter()
        self.active: Counter[str] = Counter()
        self.round = Round()
        self.sessions: dict[tuple[str | None, str], str] = {}
        """The prompt that a session holds for a task."""
        self.made = 0
        self.trace = 0
        self.again: Counter[str] = Counter()
        """How often a person had a task run again."""
        self.is_cancelled = False
        """Whether the run was cancelled by somebody else or told to be, which may show only when it is resumed."""

    def begin_round(self) -> None:
        self.round = Round()
        self.round.done = {task_id for task_id, record in self.stored().items() if record.status in set(TASK_DONE)}

    def backends(self) -> dict[str, Backend]:
        return {name: _Talker(self, name) for name in TALKERS}

    def stored(self) -> dict[str, TaskRecord]:
        """What the store has of the tasks right now."""
        if self.store is None:
            return {}
        return {record.task_id: record for record in at_once(self.store.list_tasks(RUN))}

    def wrong(self, what: str) -> None:
        self.violations.append(what)

    async def ask(self, name: str, request: ConversationRequest, prompt: str) -> Reply:
        """One turn of a backend."""
        task_id = request.idempotency_key.partition(":")[2]
        self.executions[task_id] += 1
        self.round.executed[task_id] += 1
        self._check_call(task_id)
        self.active[name] += 1
        self._check_caps(name)
        try:
            await self._take_time()
            return await self._behave(name, request, task_id, prompt)
        finally:
            self.active[name] -= 1

    async def _behave(self, name: str, request: ConversationRequest, task_id: str, prompt: str) -> Reply:
        goes_on = prompt.split(maxsplit=1)[0] != task_id
        if goes_on and self.rng.random() < 0.2 and not self.story.dag[task_id].at_most_once:
            raise BackendError(ErrorKind.SESSION_LOST, "never heard of it")
        session_id = self._session(name, request)
        if session_id is not None:
            if not goes_on:
                self.sessions[session_id, task_id] = prompt
            elif (session_id, task_id) not in self.sessions:
                self.wrong(f"{task_id} goes on in session {session_id}, which does not hold its prompt")
            prompt = self.sessions.get((session_id, task_id), prompt)
            request.on_session(session_id)
        elif goes_on:
            self.wrong(f"{task_id} goes on without a session")
        await self._take_time()
        await self._fail(task_id)
        self.round.answered[task_id] += 1
        said = [message.content for message in request.history if message.role == "assistant"]
        return Reply(answer(task_id, prompt, said), session_id=session_id, usage=Usage(3, 4))

    def _session(self, name: str, request: ConversationRequest) -> str | None:
        if name == "naming" and request.session_id is None:
            self.made += 1
            return f"named-{self.made}"
        return request.session_id

    async def _take_time(self) -> None:
        usual = 0.0 if self.story.hasty else self.story.pace
        await anyio.sleep(self.rng.choice((0, 0, 0.1, 1, 1.5)) * self.rng.random() * usual)

    async def _fail(self, task_id: str) -> None:
        behaviour, pace = self.story.behaviours[task_id], self.story.pace
        half = (Message("user", "?"), Message("assistant", "half an answ"))
        if behaviour == "refuses":
            raise BackendError(ErrorKind.REFUSED, "no")
        if behaviour == "breaks":
            raise BackendError(ErrorKind.TRANSIENT, "broken", messages=half)
        if behaviour == "dawdles":
            await anyio.sleep(100 * pace)
        if behaviour == "stumbles" and self.stumbled[task_id] < 2:
            self.stumbled[task_id] += 1
            hint = self.rng.choice((None, 0.0, 20 * pace * self.rng.random()))
            raise BackendError(ErrorKind.RATE_LIMITED, "later", retry_after=hint, messages=half)

    def _check_caps(self, name: str) -> None:
        if self.active.total() > self.story.concurrency:
            self.wrong(f"I6: {self.active.total()} tasks at once, {self.story.concurrency} allowed")
        if self.active[name] > self.story.limits.get(name, 99):
            self.wrong(f"I6: {self.active[name]} tasks at once on {name}, {self.story.limits[name]} allowed")

    def _check_call(self, task_id: str) -> None:
        if task_id in self.acknowledged:
            self.wrong(f"I2: {task_id} executed after its result was acknowledged")
        if self.round.answered[task_id]:
            self.wrong(f"I2: {task_id} executed again in the process that had its answer")
        most = 1 + self.again[task_id] if self.story.dag[task_id].at_most_once else None
        if most is not None and self.executions[task_id] > most:
            self.wrong(f"I3: {task_id} is at_most_once, executed {self.executions[task_id]} times")
        if self.round.executed[task_id] > MOST_TRIES:
            self.wrong(f"I3: {task_id} executed {self.round.executed[task_id]} times in one process")
        record = None if self.store is None else at_once(self.store.get_run(RUN))
        if record is not None and record.status == "cancelling":
            self.wrong(f"{task_id} executed while its run is being cancelled")
        stored = self.stored()
        if stored:
            self._check_stored_call(task_id, stored)
        elif self.store is not None:
            self._lacks(f"{task_id} executed, the run is not stored")

    def _check_stored_call(self, task_id: str, stored: dict[str, TaskRecord]) -> None:
        status = TaskStatus(stored[task_id].status)
        if status is TaskStatus.COMPLETED:
            self.wrong(f"I2: {task_id} executed after it was stored as completed")
        elif status is not TaskStatus.RUNNING:
            self._lacks(f"{task_id} executed while stored as {status.value}")
        for upstream in self.story.dag[task_id].upstream:
            if TaskStatus(stored[upstream].status) not in TASK_DONE:
                self._lacks(f"I4: {task_id} executed while {upstream} is stored as {stored[upstream].status}")

    def _lacks(self, what: str) -> None:
        self.round.unstored.append((iso(self.clock.wall()), what))

    def hear(self, event: events.Event) -> None:
        """The run told of `event`."""
        seen = self.round
        whose = (event.task_id, event.attempt) if isinstance(event, events.TaskEvent) else ()
        self.trace = zlib.crc32(f"{event.kind} {whose} {self.clock.wall()}".encode(), self.trace)
        if seen.told and isinstance(seen.told[-1], events.RunEnded):
            self.wrong(f"{event.kind} told after the run's end")
        if isinstance(event, events.TaskStarted) and any(isinstance(one, events.RunCancelling) for one in seen.told):
            self.wrong(f"{event.task_id} told to start after the run was told to be cancelled")
        seen.told.append(event)
        # Whatever happens to this process, a later one completes the cancellation.
        self.is_cancelled |= isinstance(event, events.RunCancelling)
        if isinstance(event, events.StoreDegraded | events.StoreRecovered):
            seen.away = isinstance(event, events.StoreDegraded)
        if isinstance(event, events.TaskEvent):
            self._check_order(event)
            self._check_told(event)

    def _check_order(self, event: events.TaskEvent) -> None:
        task_id, running, done = event.task_id, self.round.running, self.round.done
        match event:
            case events.TaskStarted():
                missing = [name for name in self.story.dag[task_id].upstream if name not in done]
                if missing or task_id in running or task_id in done:
                    self.wrong(f"{task_id} told to start; running: {running}, done: {done}, missing: {missing}")
                running[task_id] = event.attempt
            case events.TaskCompleted() | events.TaskFailed() | events.TaskRetried():
                if running.pop(task_id, None) != event.attempt:
                    self.wrong(f"{event.kind} of {task_id}, attempt {event.attempt}, which was not told to run")
                if not isinstance(event, events.TaskRetried):
                    done.add(task_id)
            case events.FolderAwaited():
                pass
            case events.SessionOpened() | events.TaskPlaced() | events.NodeStarted() | events.TaskOutput():
                if running.get(task_id) != event.attempt:
                    self.wrong(f"{event.kind} of {task_id}, attempt {event.attempt}, which was not told to run")
            case _:
                running.pop(task_id, None)

    def _check_told(self, event: events.TaskEvent) -> None:
        """What is told is stored, unless the store is away."""
        record = self.stored().get(event.task_id)
        if self.store is None or not isinstance(event, events.TaskStarted | events.TaskCompleted | events.TaskFailed):
            return
        status = None if record is None else TaskStatus(record.status)
        if isinstance(event, events.TaskStarted):
            is_there = record is not None and record.attempt >= event.attempt
        elif isinstance(event, events.TaskCompleted):
            is_there = record is not None and status is TaskStatus.COMPLETED and record.text == event.text
            if is_there:
                self.acknowledged[event.task_id] = event.text
        else:
            is_there = status is event.status
        if not is_there and not self.round.away:
            self.wrong(f"I1: {event.kind} of {event.task_id} told while stored as {status}")


class _Talker:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def new_session_id(self) -> str | None:
        if self._name != "choosing":
            return None
        self._world.made += 1
        return f"chosen-{self._world.made}"

    def open(self, request: ConversationRequest) -> _Talk:
        return _Talk(self._world, self._name, request)


class _Talk:
    def __init__(self, world: World, name: str, request: ConversationRequest) -> None:
        self._world = world
        self._name = name
        self._opening = request

    @property
    def session_id(self) -> str | None:
        return self._opening.session_id

    async def __aenter__(self) -> _Talk:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def send(self, prompt: str) -> Reply:
        return await self._world.ask(self._name, self._opening, prompt)
