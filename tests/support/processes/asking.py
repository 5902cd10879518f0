"""A run whose task asks, in a process of its own that may kill itself at a moment that is named.

`python -m tests.support.processes.asking FOLDER MOMENT` runs it;
the ledger in FOLDER has a line for each turn that was begun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from plait import DAG, OpenQuestion, ParallelRunner, Task, events
from plait.backends.backend_protocol import Conversation, ConversationRequest, Reply
from plait.dialogue import Question
from plait.persistence import SQLiteStore

RUN = "r"
PLAN = DAG(
    [Task("hold", "hold", weight=9), Task("a", "order"), Task("later", "later", continues="a"), Task("c", "hold")]
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Keeper:
    """Answers every prompt in a session, and asks where it is `order`. `deadly` names the moment to die at; meanwhile
    the prompt `hold` is answered only after the question.
    """

    def __init__(self, folder: Path, deadly: str = "none") -> None:
        self._ledger = folder / "ledger"
        self._deadly = deadly
        self.answered = anyio.Event()
        self._made = 0

    def new_session_id(self) -> str:
        self._made += 1
        return f"{os.getpid()}-{self._made}"

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        yield _Turn(self, request)

    async def turn(self, prompt: str, request: ConversationRequest) -> Reply:
        history = [message.content for message in request.history]
        answer = None if request.answer is None else request.answer.value
        line = {"prompt": prompt, "session": request.session_id, "history": history, "answer": answer}
        with self._ledger.open("a") as ledger:
            ledger.write(json.dumps({**line, "goes_on": request.resumes_interrupted}) + "\n")
        if prompt == "hold" and self._deadly != "none":
            await self.answered.wait()
        if prompt == "order":
            return Reply("Where to?", session_id=request.session_id, question=Question("Where to?"))
        if request.answer is not None or request.resumes_interrupted:
            self.answered.set()
            await self._on_answer(request)
        return Reply(f"re: {prompt}", session_id=request.session_id)

    async def _on_answer(self, request: ConversationRequest) -> None:
        if self._deadly == "begun":
            die()
        if self._deadly == "confirmed":
            assert request.session_id is not None
            request.on_session(request.session_id)
            await anyio.sleep_forever()


class _Turn:
    def __init__(self, keeper: Keeper, request: ConversationRequest) -> None:
        self._keeper, self._opening = keeper, request

    @property
    def session_id(self) -> str | None:
        return self._opening.session_id

    async def send(self, prompt: str) -> Reply:
        return await self._keeper.turn(prompt, self._opening)


def turns(folder: Path) -> list[dict[str, Any]]:
    """Every turn that was begun but those of the task that only holds a place."""
    lines = [json.loads(line) for line in (folder / "ledger").read_text().splitlines()]
    return [line for line in lines if line["prompt"] != "hold"]


async def _rome(_question: OpenQuestion) -> str:
    return "Rome"


async def run(folder: Path, moment: str) -> None:
    """Run the plan, and die at `moment`; with `live`, go on until somebody else has answered."""
    by_itself = {"answered", "begun", "confirmed"}
    async with SQLiteStore(folder / "runs.db") as store:
        runner = ParallelRunner(
            Keeper(folder, "asked" if moment == "live" else moment),
            store=store,
            # With two places, both held by the time of the answer, nothing follows from it yet.
            concurrency=2 if moment == "answered" else 8,
            on_question=_rome if moment in by_itself else None,
        )
        async with runner.start(PLAN, RUN) as live:
            async for event in live.events():
                if isinstance(event, events.TaskWaiting):
                    print("asked", flush=True)
                    if moment == "asked":
                        die()
                if isinstance(event, events.TaskAnswered) and moment == "answered":
                    die()
                if isinstance(event, events.SessionOpened) and moment == "confirmed":
                    die()
            print((await live.result()).status.value, flush=True)


if __name__ == "__main__":
    anyio.run(run, Path(sys.argv[1]), sys.argv[2])
