"""A run whose process died: from some moment on nothing of what it does is written down any more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from plait import DAG, ParallelRunner, Run
from plait.backends.backend_protocol import Conversation, ConversationRequest, Reply
from plait.persistence import Store
from tests.support.fakes import QuickClock, Talker
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

Hangs = Callable[[str], bool]
"""Whether the turn with this prompt is under way when the process dies."""


class Dying:
    """A backend whose turns with `hangs` never end; with `confirms`, it says first that it has the session."""

    def __init__(self, hangs: Hangs, confirms: Hangs = lambda _: False, answer: Talker | None = None) -> None:
        self._hangs = hangs
        self._confirms = confirms
        self._answers = answer or Talker()
        self.hanging: list[str] = []
        self.took_up: set[str] = set()
        """The tasks whose hanging turn took up one that was cut."""

    def new_session_id(self) -> str | None:
        return self._answers.new_session_id()

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        async with self._answers.open(request) as conversation:
            yield _Turn(self, request, conversation)

    async def turn(self, request: ConversationRequest, conversation: Conversation, prompt: str) -> Reply:
        if not self._hangs(prompt):
            return await conversation.send(prompt)
        if self._confirms(prompt):
            assert request.session_id is not None
            request.on_session(request.session_id)
        self.hanging.append(prompt)
        if request.resumes_interrupted:
            self.took_up.add(request.idempotency_key.partition(":")[2])
        await anyio.sleep_forever()
        raise AssertionError


class _Turn:
    def __init__(self, backend: Dying, request: ConversationRequest, conversation: Conversation) -> None:
        self._backend, self._opening, self._conversation = backend, request, conversation

    @property
    def session_id(self) -> str | None:
        return self._opening.session_id

    async def send(self, prompt: str) -> Reply:
        return await self._backend.turn(self._opening, self._conversation, prompt)


async def die(store: Store, backend: Dying, dag: DAG | None = None, run_id: str = "r") -> bool:
    """Run `dag`, or resume what is stored, until nothing but hanging turns is left; then die. True if there were none,
    so that the run came to its end.
    """
    dead = False
    dying = FaultyStore(store, on_write(lambda _: Fault.BEFORE if dead else None))
    # Its clock does not wait: a process that dies makes no last attempts to write.
    runner = ParallelRunner(backend, store=dying, concurrency=100, clock=QuickClock())
    async with runner.start_resume(run_id) if dag is None else runner.start(dag, run_id) as run:
        ended = await _until_at_rest(run, dying, backend)
        dead = True
        run.stop()
    return ended


async def _until_at_rest(run: Run, store: FaultyStore, backend: Dying) -> bool:
    """Until the run has ended (True), or turns hang and nothing else happened for a while (False)."""
    before: tuple[int, int] | None = None
    while not backend.hanging or store.under_way or (store.writes, len(backend.hanging)) != before:
        before = (store.writes, len(backend.hanging))
        with anyio.move_on_after(0.0005):
            await run.result()
            return True
        for _ in range(
            20
        ):  # a machine with too much to do may have slept in the meantime, and the loop not yet gone on
            await anyio.lowlevel.checkpoint()
    return False
