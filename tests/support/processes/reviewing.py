"""A review by the workflow of the examples, in a process that kills itself at a named boundary:
python -m tests.support.processes.reviewing DATABASE LEDGER [BOUNDARY COUNT]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio

from examples.review import review
from plait import RunResult, failpoints
from plait.backends import ConversationRequest, Reply
from plait.errors import BackendError, ErrorKind
from plait.persistence import SQLiteStore
from tests.support.fakes import Talker

RUN_ID = "review-1"
FAILS = "execute_review.1"


def reviewer(ledger: Path) -> Talker:
    """A model that fails at the first try of the review, and notes in `ledger` the task of each thing it is asked."""

    def answer(prompt: str, request: ConversationRequest) -> Reply | Exception:
        task_id = request.idempotency_key.rpartition(":")[2]
        with ledger.open("a") as file:
            file.write(f"{task_id}\n")
        if task_id == FAILS:
            return BackendError(ErrorKind.REFUSED, "no review today")
        if request.output_schema is not None:
            return Reply('{"findings": ["no brakes"]}', {"findings": ["no brakes"]})
        return Reply(f"In short: {prompt.splitlines()[-1]}")

    return Talker(answer)


async def review_once(database: Path, ledger: Path) -> RunResult:
    async with SQLiteStore(database) as store:
        return await review("A bicycle.", RUN_ID, reviewer(ledger), store)


def kill_at(boundary: str, count: int) -> None:
    left = count

    def on_reach(name: str) -> None:
        nonlocal left
        left -= name == boundary
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.on_reach = on_reach


if __name__ == "__main__":
    if sys.argv[3:]:
        kill_at(sys.argv[3], int(sys.argv[4]))
    anyio.run(review_once, Path(sys.argv[1]), Path(sys.argv[2]))
