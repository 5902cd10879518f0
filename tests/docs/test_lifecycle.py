"""The pages show the table of transitions and the events that the stores write; the service of the guide works."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, Task
from plait.errors import StoreError
from plait.events import NewTask, RunCreated
from plait.persistence import Batch, MemoryStore
from plait.persistence.store_records import RunRecord
from plait.statuses import RUN_DONE, RUN_TRANSITIONS, RunStatus, Transition
from tests.contracts.store.samples import run_becomes
from tests.docs import reference
from tests.support.quick_runs import quick_runs

DOCS = Path(__file__).parent.parent.parent / "docs"
GUIDE = (DOCS / "guides" / "lifecycle.md").read_text(encoding="utf-8")
PAGE = (DOCS / "reference" / "events-and-statuses.md").read_text(encoding="utf-8")
AT = "2026-01-01T00:00:00.000Z"


def diagram(transitions: Mapping[str, Transition[RunStatus]], done: frozenset[RunStatus]) -> str:
    """The table as a Mermaid state diagram, in the order in which the statuses are declared."""
    moves = {(old, after) for before, after in transitions.values() for old in before if old is not after}
    lines = ["stateDiagram-v2", f"[*] --> {RunStatus.QUEUED}"]
    for old in RunStatus:
        reopens = ": retry_failed" if old in done else ""
        lines += [f"{old} --> {after}{reopens}" for after in RunStatus if (old, after) in moves]
    lines += [f"{status} --> [*]" for status in RunStatus if status in done]
    return "\n    ".join(lines) + "\n"


def drawn() -> str:
    return PAGE.partition("```mermaid\n")[2].partition("```")[0]


def test_the_diagram_is_the_table() -> None:
    assert drawn() == diagram(RUN_TRANSITIONS, RUN_DONE)


def test_another_table_is_another_diagram() -> None:
    fewer = {kind: move for kind, move in RUN_TRANSITIONS.items() if kind != "run_cancelling"}
    assert drawn() != diagram(fewer, RUN_DONE)


async def test_the_table_of_events_is_what_a_store_writes() -> None:
    rows = re.findall(r"^\| `(run_\w+)` \| `(\w+)` \|", reference.stored_events(), re.MULTILINE)
    written: set[tuple[str, str]] = set()
    for number, path in enumerate(_paths()):
        store, changes = MemoryStore(), [run_becomes(AT, status, resumed=again) for status, again in path]
        await store.write(
            Batch(f"r{number}", 0, 1, (RunCreated(AT, f"r{number}", "", "{}", (NewTask("a", "p"),)), *changes))
        )
        kinds = [event.kind for event in await store.list_events(f"r{number}")]
        written |= set(zip(kinds, [RunStatus.QUEUED.value, *(status for status, _ in path)], strict=True))
    assert set(rows) == written
    assert {status for _, status in rows} == set(RunStatus) - {RunStatus.INTERRUPTED, RunStatus.PARKED}


class Away(MemoryStore):
    """Cannot be read once."""

    looks = 0

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        self.looks += 1
        if self.looks == 1:
            raise StoreError("it is away")
        return await super().list_runs(limit)


async def test_the_service_of_the_page_outlasts_a_store_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    code = GUIDE.partition("# worker.py\n")[2].partition("asyncio.run(")[0].replace("sleep(30)", "sleep(0)")
    page: dict[str, Any] = {}
    exec(code, page)

    async def echo(prompt: str) -> str:
        return prompt

    async with quick_runs(ParallelRunner(echo, store=Away())) as service:
        run_id = await service.create(DAG([Task("hello", prompt="Hello.")]))
        looking = asyncio.create_task(page["look_after"](service))
        with anyio.fail_after(60):
            assert [event.kind async for event in service.events(run_id)][-1] == "run_completed"
        looking.cancel()
    assert capsys.readouterr().out == "looking again in 30 s: it is away\n"


def _paths() -> list[list[tuple[str, bool]]]:
    running, waiting, again = ("running", False), ("waiting_input", False), ("running", True)
    return [
        [running, waiting, again, ("completed", False)],
        [running, ("failed", False), again],
        [running, ("cancelling", False), ("cancelled", False)],
    ]
