"""The public calls that are cancelled, and the databases that they start from."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import anyio
import anyio.lowlevel

from plait import DAG, ParallelRunner, Retry, Task
from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.errors import BackendError, ErrorKind
from plait.events import LeaseRenewed
from plait.persistence import Batch, Note, SQLiteStore
from plait.usage import Usage

RUN: Final = "r"
DIAMOND: Final = DAG(
    [
        Task("a", prompt="a"),
        Task("b", prompt="b {{ a }}", depends_on=["a"], continues="a"),
        Task("c", prompt="c {{ a }}", depends_on=["a"], retry=Retry(attempts=9, base_delay=0)),
        Task("d", prompt="d {{ b }} {{ c }}", depends_on=["b", "c"], at_most_once=True),
    ],
    name="cancelled",
)
TEXTS: Final = {"a": "<a>", "b": "<b <a>>", "c": "<c <a>>", "d": "<d <b <a>> <c <a>>>"}
"""What the tasks come to, in every order."""

Stage = Literal["nothing", "empty", "crashed", "interrupted", "waiting", "ended"]
"""No file; no run; a run whose owner is dead; one that was left; one whose task `d` waits for a person; a whole one."""
HELD: Final[dict[Stage, frozenset[str]]] = {
    "crashed": frozenset("bc"),
    "interrupted": frozenset("bc"),
    "waiting": frozenset("d"),
}
"""The tasks that are under way when a run is left at that stage."""


@dataclass(slots=True)
class Server:
    """What stands behind the backend and outlives the runner's process: sessions, and what was executed.

    Tasks in `held` are never answered; the event `holding` is set once all of them have asked.
    """

    sessions: dict[tuple[str | None, str], str] = field(default_factory=dict[tuple[str | None, str], str])
    executed: Counter[str] = field(default_factory=Counter[str])
    held: frozenset[str] = frozenset()
    holding: anyio.Event = field(default_factory=anyio.Event)

    def new_session_id(self) -> str:
        return f"session-{len(self.sessions) + 1}"

    def open(self, request: ConversationRequest) -> _Talk:
        return _Talk(self, request)

    async def answer(self, request: ConversationRequest, prompt: str) -> Reply:
        task_id = request.idempotency_key.split(":")[1]
        key = request.session_id, task_id
        self.executed[task_id] += 1
        await anyio.lowlevel.checkpoint()
        if prompt.startswith(f"{task_id} ") or prompt in {task_id, "more"}:
            self.sessions[key] = prompt
        request.on_session(request.session_id or "")
        if task_id in self.held:
            if self.held <= self.executed.keys():
                self.holding.set()
            await anyio.sleep_forever()
        if task_id == "c" and self.executed["c"] == 1:
            raise BackendError(ErrorKind.TRANSIENT, "only this once")
        await anyio.lowlevel.checkpoint()
        return Reply(f"<{self.sessions[key]}>", session_id=request.session_id, usage=Usage(3, 4))


class _Talk:
    def __init__(self, server: Server, request: ConversationRequest) -> None:
        self._server = server
        self._opening = request

    @property
    def session_id(self) -> str | None:
        return self._opening.session_id

    async def __aenter__(self) -> _Talk:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def send(self, prompt: str) -> Reply:
        return await self._server.answer(self._opening, prompt)


async def prepare(stage: Stage, path: Path) -> Server:
    """Make the database of `stage` at `path`; the server as the run left it."""
    server = Server(
        held={"crashed": frozenset("bc"), "interrupted": frozenset("bc"), "waiting": frozenset("d")}.get(
            stage, frozenset()
        )
    )
    if stage == "nothing":
        return server
    made = path.with_suffix(".made") if stage == "crashed" else path
    async with SQLiteStore(made) as store:
        if stage == "ended":
            await ParallelRunner(server, store=store).run(DIAMOND, RUN)
        elif stage != "empty":
            async with ParallelRunner(server, store=store).start(DIAMOND, RUN) as run:
                await server.holding.wait()
                if stage == "crashed":
                    await store.list_runs()
                    _copy_alive(made, path)
                run.stop()
    return server


def _copy_alive(source: Path, target: Path) -> None:
    """The database as a crash at this moment would leave it."""
    target.touch(0o600)
    with closing(sqlite3.connect(source)) as alive, closing(sqlite3.connect(target)) as copy:
        alive.backup(copy)


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a call is made."""

    store: SQLiteStore
    runner: ParallelRunner


@dataclass(frozen=True, slots=True)
class Call:
    """A public call, from the database that it starts from. The store is `opened` before it, and `open` after it."""

    make: Callable[[Scene], Awaitable[object]]
    stage: Stage
    opened: bool = True
    open: bool = True


AT: Final = "2026-01-01T00:00:00.000Z"


async def _write(scene: Scene) -> None:
    record = await scene.store.get_run(RUN)
    assert record is not None
    await scene.store.write(
        Batch(RUN, record.epoch, record.last_seq + 1, (LeaseRenewed("2026-11-21T23:00:00.000Z", 1.0),))
    )


async def _open(scene: Scene) -> None:
    async with scene.store:
        await scene.store.list_runs()


async def _start(scene: Scene) -> None:
    async with scene.runner.start(DIAMOND, RUN) as run:
        await run.result()


async def _resume(scene: Scene) -> None:
    async with scene.runner.start_resume(RUN) as run:
        async for _event in run.events():
            pass


CALLS: Final[dict[str, Call]] = {
    "SQLiteStore, opened new": Call(_open, "nothing", opened=False, open=False),
    "SQLiteStore, opened": Call(_open, "crashed", opened=False, open=False),
    "SQLiteStore.close": Call(lambda scene: scene.store.close(), "crashed", open=False),
    "SQLiteStore.write": Call(_write, "crashed"),
    "SQLiteStore.get_run": Call(lambda scene: scene.store.get_run(RUN), "crashed"),
    "SQLiteStore.list_runs": Call(lambda scene: scene.store.list_runs(), "crashed"),
    "SQLiteStore.list_tasks": Call(lambda scene: scene.store.list_tasks(RUN), "crashed"),
    "SQLiteStore.list_attempts": Call(lambda scene: scene.store.list_attempts(RUN), "crashed"),
    "SQLiteStore.list_messages": Call(lambda scene: scene.store.list_messages(RUN, "a"), "crashed"),
    "SQLiteStore.list_events": Call(lambda scene: scene.store.list_events(RUN), "crashed"),
    "SQLiteStore.send": Call(lambda scene: scene.store.send(RUN, Note("remark", AT)), "crashed"),
    "SQLiteStore.list_notes": Call(lambda scene: scene.store.list_notes(RUN), "crashed"),
    "run": Call(lambda scene: scene.runner.run(DIAMOND, RUN), "empty"),
    "start": Call(_start, "empty"),
    "resume": Call(lambda scene: scene.runner.resume(RUN), "interrupted"),
    "resume after a crash": Call(lambda scene: scene.runner.resume(RUN), "crashed"),
    "start_resume": Call(_resume, "crashed"),
    "preview_resume": Call(lambda scene: scene.runner.runs.preview(RUN), "crashed"),
    "cancel_run": Call(lambda scene: scene.runner.runs.cancel(RUN), "interrupted"),
    "cancel_run after a crash": Call(lambda scene: scene.runner.runs.cancel(RUN), "crashed"),
    "answer again": Call(lambda scene: scene.runner.runs.settle(RUN, "d", "again"), "waiting"),
    "answer done": Call(lambda scene: scene.runner.runs.settle(RUN, "d", "done", TEXTS["d"]), "waiting"),
    "continue_task": Call(lambda scene: scene.runner.runs.continue_task(RUN, "b", "more"), "ended"),
}
