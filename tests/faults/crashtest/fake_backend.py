"""The fake backend of every trial: records each execution in the ledger before the work, and answers by rule."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

import anyio
import anyio.lowlevel

from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.runner.engine.attempt import INTERRUPTED
from tests.faults.crashtest.cases import Case, answer
from tests.faults.crashtest.ledger import DONE, EXEC, FAIL, NOTE, Ledger

Keeps = Literal["nothing", "chosen", "own"]
"""The conversations kept by a fake backend: none, under ids chosen by the caller, or under ids of the backend."""
KEEPS: tuple[Keeps, ...] = get_args(Keeps)


class FakeBackend:
    """A backend of `case`. Each prompt is stored in the folder `sessions` before the session id is reported."""

    def __init__(self, case: Case, ledger: Ledger, sessions: Path, keeps: Keeps) -> None:
        self.case = case
        self.ledger = ledger
        self.sessions = sessions
        self.keeps = keeps
        self.failed = Counter(line[1] for line in ledger.lines() if line[0] == FAIL)

    def new_session_id(self) -> str | None:
        """Return a new session id for a backend that keeps conversations under chosen ids, otherwise None."""
        return secrets.token_hex(8) if self.keeps == "chosen" else None

    def open(self, request: ConversationRequest) -> FakeConversation:
        """Return a conversation about the task named by the idempotency key."""
        return FakeConversation(self, request)


class FakeConversation:
    def __init__(self, stand_in: FakeBackend, request: ConversationRequest) -> None:
        self._stand_in = stand_in
        self._request = request
        self._task_id = request.idempotency_key.rpartition(":")[2]
        self.session_id = request.session_id

    async def __aenter__(self) -> FakeConversation:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        return None

    async def send(self, prompt: str) -> Reply:
        task_id, ledger = self._task_id, self._stand_in.ledger
        part = self._stand_in.case.part(task_id)
        ledger.write(EXEC, task_id, os.getpid(), time.monotonic())
        if part.crashes:
            os.kill(os.getpid(), signal.SIGKILL)
        asked = self._remembered() if prompt == INTERRUPTED else self._kept(prompt)
        if part.seconds:
            await anyio.sleep(part.seconds)
        else:
            await anyio.lowlevel.checkpoint()
        self._fail_if_due(task_id)
        ledger.write(DONE, task_id, os.getpid())
        history = tuple(m.content for m in self._request.history if m.content != INTERRUPTED)
        text, data = answer(task_id, asked, history, part)
        # A backend with sessions reports the messages of a turn, like an agent.
        said = () if self._stand_in.keeps == "nothing" else (Message("user", prompt), Message("assistant", text))
        return Reply(text, data, self.session_id, messages=said, tasks=part.adds)

    def _kept(self, prompt: str) -> str:
        if self._stand_in.keeps != "nothing":
            self.session_id = self.session_id or secrets.token_hex(8)
            self._stand_in.sessions.mkdir(exist_ok=True)
            self._file().write_text(prompt, encoding="utf-8")
            self._request.on_session(self.session_id)
        return prompt

    def _remembered(self) -> str:
        """Return the prompt of the interrupted attempt from the session. Record a missing prompt as a violation."""
        if not self._request.resume or self.session_id is None or not self._file().exists():
            self._stand_in.ledger.write(NOTE, f"{self._task_id} went on with a session that does not hold its prompt")
            return ""
        return self._file().read_text(encoding="utf-8")

    def _file(self) -> Path:
        return self._stand_in.sessions / f"{self.session_id}.{self._task_id}"

    def _fail_if_due(self, task_id: str) -> None:
        stand_in = self._stand_in
        part = stand_in.case.part(task_id)
        if part.refused or stand_in.failed[task_id] < part.failures:
            stand_in.failed[task_id] += 1
            stand_in.ledger.write(FAIL, task_id, os.getpid())
            kind = ErrorKind.REFUSED if part.refused else ErrorKind.TRANSIENT
            raise BackendError(kind, "the stand-in was told to fail here")
