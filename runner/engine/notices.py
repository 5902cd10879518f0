"""Notices: what a run tells people outside, such as a question or its end, sent to the targets of `notify`.

A notice is no record of its own. It is a stored event of a kind that a target asks for, and its id is made of the run
and the number of the event: so none is lost with a process, and none tells of something that did not happen. Only the
tries are kept, as notes of the run:

    event stored -> try noted -> sent -> end noted

The first process whose note tells of the next try makes that try, so that of several processes one sends. One that dies
in between leaves a try without an end, and any process makes the next try once that is due: a notice is sent at least
once, and always with the same id. The notices of a target go out in the order of the events.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread

from plait import events
from plait.backends.models.http_client import Client, Endpoint
from plait.backends.process.child_process import Launch, child_environment, running, scratch
from plait.clock_and_ids import Clock, iso, parse_time
from plait.errors import StoreError
from plait.json_form import to_json
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import EventRecord, Note, NoteRecord
from plait.program_log import logger
from plait.runner.domain.notify_target import NoticeWord, NotifyTarget, usable_targets, why_no_address
from plait.runner.engine.live_run import LiveRun
from plait.runner.state.budget import BUDGET
from plait.safe_text import clean_text, one_line, shorten, without_secrets
from plait.statuses import TaskStatus
from plait.usage import dollars

NOTICE: Final = "notice"
"""The kind of note about a try, or about the end of the tries."""
TRY_S = 10.0
"""The longest time of a try, in seconds."""
FIRST_WAIT_S = 15.0
"""Seconds from the first try to the second: longer than a try, which may be under way in another process. Each further
wait is twice as long.
"""
LONGEST_WAIT_S = 900.0
GIVE_UP_S = 86_400.0
"""A notice is given up once its event is so many seconds old, after LEAST_TRIES at the earliest."""
LEAST_TRIES = 5
LAST_S = 15.0
"""The longest time that the end of a run waits for its notices, in seconds."""
LOOK_AGAIN_S = 5.0
"""Seconds after which a store that failed is read again."""
_LONGEST_TEXT = 2_000
_PAGE = 1_000

_WORDS: Final[Mapping[str, Sequence[NoticeWord]]] = {
    events.TaskWaiting.kind: ("question", "budget"),
    events.RunParked.kind: ("parked",),
    events.RunFailed.kind: ("failed",),
    events.RunCompleted.kind: ("done",),
}
"""What an event of each kind may be told as."""
_NEWS = frozenset({*_WORDS, events.StoreRecovered.kind})


def wait_after(tries: int) -> float:
    """Return the seconds between the try of that number and the next one."""
    return min(FIRST_WAIT_S * 2.0 ** min(tries - 1, 20), LONGEST_WAIT_S)


@dataclass(slots=True)
class _Delivery:
    """What is known of a notice to one target."""

    tries: int = 0
    last: float = 0.0
    """The Unix time of the last try."""
    by: str = ""
    """Who makes the last try."""
    is_over: bool = False


def _deliveries(notes: Sequence[NoteRecord]) -> dict[tuple[int, int], _Delivery]:
    """Return what the notes tell, by the number of the target and of the event."""
    deliveries: dict[tuple[int, int], _Delivery] = {}
    for note in notes:
        if note.kind != NOTICE:
            continue
        try:
            body = json.loads(note.body)
            one = deliveries.setdefault((body["to"], body["event"]), _Delivery())
            if "end" in body:
                one.is_over = True
            elif body["try"] == one.tries + 1:
                one.tries, one.by, one.last = one.tries + 1, body["by"], parse_time(note.at)
        except (ValueError, TypeError, KeyError, AttributeError):  # not ours, as a part of a file that anyone may write
            continue
    return deliveries


async def send_due(store: Store, run_id: str, targets: Sequence[NotifyTarget | None], clock: Clock) -> float | None:
    """Send the notices of the run that are due, and return the Unix time at which the next try is; None if no target is
    left with one. None in place of a target leaves its notices to other processes.

    Raises StoreError. A cancelled call leaves the tries under way without an end, and another one repeats them.
    """
    occasions = await _occasions(store, run_id, targets)
    deliveries = _deliveries(await store.list_notes(run_id)) if occasions else {}
    later: list[float] = []
    failures: list[StoreError] = []

    async def serve(to: int, target: NotifyTarget) -> None:
        try:
            for event, word in occasions:
                one = deliveries.get((to, event.seq), _Delivery())
                if word not in target.on or one.is_over:
                    continue
                due = one.last + wait_after(one.tries) if one.tries else 0.0
                if due <= clock.wall():
                    due = await _try(store, run_id, to, target, event, word, one.tries + 1, clock)
                if due:  # the notices after it wait, too
                    later.append(due)
                    return
        except StoreError as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        for to, target in enumerate(targets):
            if target is not None:
                group.start_soon(serve, to, target)
    if failures:
        raise failures[0]
    return min(later, default=None)


async def _occasions(
    store: Store, run_id: str, targets: Sequence[NotifyTarget | None]
) -> list[tuple[EventRecord, NoticeWord]]:
    """Return the events that a target asks for, in their order, each with the word of `on` that it falls under."""
    wanted = {word for target in targets if target is not None for word in target.on}
    candidates: list[tuple[EventRecord, NoticeWord]] = []
    for kind, words in _WORDS.items():
        after = 0
        while not wanted.isdisjoint(words):
            page = await store.list_events(run_id, after, _PAGE, kind)
            candidates.extend((event, words[0]) for event in page)
            if len(page) < _PAGE:
                break
            after = page[-1].seq
    for_money: set[tuple[str | None, int | None]] = set()
    for task_id in {event.task_id for event, word in candidates if word == "question"}:
        attempts = await store.list_attempts(run_id, task_id)
        for_money |= {(one.task_id, one.attempt) for one in attempts if one.backend == BUDGET}
    occasions: list[tuple[EventRecord, NoticeWord]] = [
        (event, "budget" if word == "question" and (event.task_id, event.attempt) in for_money else word)
        for event, word in candidates
    ]
    return sorted(occasions, key=lambda one: one[0].seq)


async def _try(
    store: Store,
    run_id: str,
    to: int,
    target: NotifyTarget,
    event: EventRecord,
    word: NoticeWord,
    number: int,
    clock: Clock,
) -> float:
    """Make the try of that `number`, unless another process makes it. Return the Unix time of the next one; 0 if no
    other one is needed.
    """
    me = secrets.token_hex(8)

    async def note(**body: object) -> None:
        body_json = to_json({"to": to, "event": event.seq, **body})
        await store.send(run_id, Note(NOTICE, iso(clock.wall()), None, body_json))

    await note(**{"try": number, "by": me})
    one = _deliveries(await store.list_notes(run_id)).get((to, event.seq), _Delivery())
    if one.is_over:
        return 0.0
    if one.by != me:
        return one.last + wait_after(one.tries)
    try:
        why = await _deliver(target, await _notice(store, run_id, target, event, word))
    except StoreError as error:  # a run that is damaged for good must not be tried for ever
        why = type(error).__name__
    log = logger(run=run_id)
    if why is None:
        await note(end="sent")
        return 0.0
    if number >= LEAST_TRIES and clock.wall() - parse_time(event.at) > GIVE_UP_S:
        await note(end="given up")
        log.error("notice_given_up", notice=notice_id(run_id, event), to=str(target), tries=number, why=why)
        return 0.0
    tell = log.warning if number == 1 else log.info
    tell("notice_not_sent", notice=notice_id(run_id, event), to=str(target), why=why)
    return one.last + wait_after(number)


def notice_id(run_id: str, event: EventRecord) -> str:
    """Return the id of the notice, the same in each try."""
    return f"{run_id}:{event.seq}"


async def _notice(
    store: Store, run_id: str, target: NotifyTarget, event: EventRecord, word: NoticeWord
) -> dict[str, Any]:
    """Return the notice, as it is posted. Raises StoreError."""
    record = await store.get_run(run_id)
    name = "" if record is None else record.name
    run = f"{name} ({run_id})" if name else run_id
    notice: dict[str, Any] = {"id": notice_id(run_id, event), "on": word, "at": event.at, "run": run_id, "name": name}
    text = f"{run} is completed"
    if event.kind == events.RunFailed.kind:
        error = None if record is None else record.error
        notice["error"] = _told_text(error or "")
        text = f"{run} has failed" + (f": {one_line(notice['error'])}" if error else "")
    elif event.kind == events.RunParked.kind:
        notice["until"] = json.loads(event.detail).get("until")
        text = f"{run} waits until {notice['until']}"
    elif event.kind == events.RunCompleted.kind and record is not None:
        cost = record.usage.cost_usd
        notice |= {"cost_usd": cost}
        text += f", {dollars(cost)}" if cost is not None else ""
    elif event.task_id is not None:
        task = next(iter(await store.list_tasks(run_id, event.task_id)), None)
        is_open = task is not None and task.status == TaskStatus.WAITING_INPUT and task.attempt == event.attempt
        question = _told_text(task.question or "") if task is not None and is_open else ""
        notice |= {"task": event.task_id, "attempt": event.attempt, "open": is_open, "question": question}
        what = "asks for a higher budget" if word == "budget" else "asks"
        text = f"{run}: task {event.task_id} {what}"
        text += f": {question}" if question else ", and has its answer already"
        if is_open:
            notice["answer"] = f"plait answer {run_id} {event.task_id}"
            if link := target.link_to(os.environ, run_id, event.task_id, event.attempt or 0):
                notice["link"] = link
                text += f"\n{link}"
    return {**notice, "text": text}


def _told_text(text: str) -> str:
    return shorten(without_secrets(clean_text(text)), _LONGEST_TEXT)


async def _deliver(target: NotifyTarget, notice: Mapping[str, Any]) -> str | None:
    """Send the notice. Return None, or why it was not taken, without what may be a secret."""
    with anyio.move_on_after(TRY_S):
        if target.run:
            return await _run(target, to_json(dict(notice)).encode())
        return await _post(target, {"text": _for_slack(notice["text"])} if target.form == "slack" else notice)
    return f"no answer within {TRY_S:g} s"


def _for_slack(text: str) -> str:
    """Return the text without the signs by which Slack calls people and makes links: a model may have written it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


async def _post(target: NotifyTarget, body: Mapping[str, Any]) -> str | None:
    url = target.url or os.environ.get(target.url_env or "", "").strip()
    if why := why_no_address(url):
        return why
    headers = {name: os.environ.get(variable, "").strip() for name, variable in target.headers_env.items()}
    try:
        make = partial(Client, request_timeout=TRY_S, connect_timeout=TRY_S, keep_alive=False)
        client = await anyio.to_thread.run_sync(make, Endpoint(url, ""), headers)
    except Exception as error:  # a proxy, or certificates, that cannot be used
        return type(error).__name__
    async with aclosing(client):
        try:
            with await client.post(url, body) as response:  # its body is not read
                return None if 200 <= response.status < 300 else f"HTTP status {response.status}"
        except Exception as error:  # whatever the client raises: its text may hold the address
            return type(error).__name__


async def _run(target: NotifyTarget, stdin: bytes) -> str | None:
    environment = child_environment(target.pass_env)
    path = shutil.which(target.run[0], path=environment.get("PATH"))
    if path is None:
        return f"there is no program {one_line(target.run[0], 80)}"
    try:
        with scratch() as folder:
            launch = Launch([path, *target.run[1:]], environment, folder, stdin, guarded=True)
            async with running(launch, folder / NOTICE) as child:
                await child.wait(TRY_S)
            return None if child.status == 0 else f"exit code {child.status}"
    except Exception as error:
        return type(error).__name__


class _Sender:
    """Sends the notices of a run while this process executes it."""

    def __init__(self, run: LiveRun, store: Store) -> None:
        self._run, self._store = run, store
        self._targets, refused = usable_targets(run.notify, run.options.notify, os.environ)
        for target, why in refused:
            run.program_log.warning("notices_left_to_others", to=str(target or "unknown"), why=why)
        self._news = anyio.Event()
        self._ends = False
        self._failed = False
        self._ended = anyio.Event()

    async def follow(self) -> None:
        """Wake the sender at events that may be told."""
        async for event in self._run.feed.reader():
            if event.kind in _NEWS:
                self._news.set()

    async def send(self) -> None:
        """Send until `finish` is called."""
        clock = self._run.options.clock
        while True:
            self._news, last = anyio.Event(), self._ends
            try:
                due = await send_due(self._store, self._run.run_id, self._targets, clock)
            except Exception as error:  # no notice ends a run
                if not self._failed:
                    why = str(error) if isinstance(error, StoreError) else type(error).__name__
                    self._run.program_log.warning("notices_not_read", error=why)
                self._failed, due = True, clock.wall() + LOOK_AGAIN_S
            if last:
                self._ended.set()
                return
            async with anyio.create_task_group() as group:
                if due is not None:
                    group.start_soon(self._wake_at, due)
                await self._news.wait()
                group.cancel_scope.cancel()

    async def finish(self) -> None:
        """Send what is due now, and return, after LAST_S at the latest. A stop of the run ends the wait."""
        with anyio.move_on_after(LAST_S) as wait:
            self._run.on_late_end = wait.cancel
            self._ends = True
            self._news.set()
            await self._ended.wait()

    async def _wake_at(self, due: float) -> None:
        clock = self._run.options.clock
        await clock.sleep(max(0.0, due - clock.wall()))
        self._news.set()


@asynccontextmanager
async def sending_notices(run: LiveRun, store: Store) -> AsyncGenerator[None]:
    """Send the notices of `run` inside the block, and at its normal end what is due then, unless the run was stopped or
    cancelled. An exception of the block is raised unchanged.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        sender = _Sender(run, store)
        group.start_soon(sender.follow)
        group.start_soon(sender.send)
        try:
            yield
        except Exception as error:
            failure = error
        else:
            if run.ended_by is None:
                await sender.finish()
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
