"""A backend whose turns outlive their runner, on real processes. Host processes import this module, and little else."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import ClassVar

import anyio

from plait.backends.backend_protocol import Conversation, ConversationRequest, DetachedTurn, Files, Reply
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Launch, adopted, child_environment, running
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.usage import Usage

AGENT = Path(__file__).with_name("outliving_child.py")
_SECONDS = 30.0


class Outliver:
    """Runs `outliving_child.py` for each turn, in the world of `folder`. Every opening is kept."""

    limit: ClassVar[float] = _SECONDS
    """Seconds for a turn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[ConversationRequest] = []

    def new_session_id(self) -> str | None:
        return secrets.token_hex(4)

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        self.requests.append(request)
        yield _Talk(self, request)

    def inspect(self, files: Files) -> DetachedTurn | None:
        known = read_manifest(files.turn)
        if known is None:
            return None
        told = _told(files.turn)
        state = "ended" if _is_over(told) else "alive" if known.is_alive else "dead"
        goes_on = known.note.get("goes_on") == "yes"
        return DetachedTurn(state, told.get("session"), goes_on, f"outliver, pid {known.pid}")


class _Talk:
    def __init__(self, backend: Outliver, request: ConversationRequest) -> None:
        self._backend = backend
        self._opening = request
        self.session_id = request.session_id

    async def send(self, prompt: str) -> Reply:
        request, folder = self._opening, self._backend.folder
        assert request.files is not None
        turn, told = request.files.turn, dict[str, str]()

        def on_line(line: bytes) -> bool:
            told.update(json.loads(line))
            if request.session_id is not None and "session" in told:
                request.on_session(told["session"])
            return _is_over(told)

        async with AsyncExitStack() as held:
            child = await held.enter_async_context(adopted(turn)) if request.attaches else None
            if child is None:
                goes_on = "yes" if request.resumes_interrupted else "no"
                argv = (sys.executable, "-S", str(AGENT), str(folder), str(request.session_id), goes_on)
                start = Launch(argv, child_environment(), folder, prompt.encode(), note={"goes_on": goes_on})
                child = await held.enter_async_context(running(start, turn))
            limit = self._backend.limit
            await child.follow(on_line, idle=limit, until=anyio.current_time() + limit)
        return self._reply(told)

    def _reply(self, told: Mapping[str, str]) -> Reply:
        if "error" in told:
            kind = ErrorKind(told["error"])
            raise BackendError(kind, "as it was told to", usage=Usage(1, 0), continues_session="goes_on" in told)
        if "question" in told:
            return Reply(told["question"], session_id=self.session_id, question=Question(told["question"]))
        if "answer" not in told:
            raise BackendError(ErrorKind.CRASHED, "it ended without an answer", continues_session=True)
        return Reply(told["answer"], session_id=self.session_id, usage=Usage(10, 7, 0.5))


def _told(turn: Path) -> dict[str, str]:
    """What a turn's output says so far."""
    told: dict[str, str] = {}
    path = turn / "stdout"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            told.update(json.loads(line))
    return told


def _is_over(told: Mapping[str, str]) -> bool:
    return not told.keys().isdisjoint({"answer", "error", "question"})
