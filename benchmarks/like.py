"""A run with `--like` against a resume: from the start of the process to the first call, and the growth of the store.

A plan with a task for each of 10,000 rows of 500 characters, with answers of 1,000 characters, runs once. Ten rows are
then changed, and `plait run PLAN --like last` calls these ten. The resume is that of the same plan, cut when ten tasks
were left. Both commands are whole processes; the function that is called writes the time of its first call.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

CHANGED = 10
PROMPT, ANSWER = 500, 1000
"""Characters."""
_WORK = f"""
import os, time
from pathlib import Path

def work(prompt):
    first = Path("first")
    if os.environ.get("TIMED") and not first.exists():
        first.write_text(repr(time.time()))
    if os.environ.get("CUT") and "changed" in prompt:
        time.sleep(0.5)  # the other tasks complete
        os._exit(9)
    return (prompt[:40] * {ANSWER})[:{ANSWER}]
"""


_PLAN = """
backends: {work: {kind: function, call: "work.py:work"}}
inputs:
  notes: {rows: notes.jsonl, max_rows: 100000}
tasks:
  - {id: note, prompt: "Summarize: {{ item.text }}", for_each: notes}
"""


def _write_rows(folder: Path, tasks: int, changed: str) -> None:
    """Write the rows, of which the last have the word `changed` in their texts."""
    with (folder / "notes.jsonl").open("w") as file:
        for number in range(tasks):
            mark = changed if number >= tasks - CHANGED else "same"
            text = f"{number} {mark} " + "all the words of this prompt " * PROMPT
            file.write(json.dumps({"text": text[:PROMPT]}) + "\n")


def _plait(folder: Path, *arguments: str, **environment: str) -> float:
    """Run the command. Return the seconds from the start of the process to its first call."""
    (folder / "first").unlink(missing_ok=True)
    command = [sys.executable, "-m", "plait", *arguments, "--store", "runs.db", "-q"]
    began = time.time()
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == (9 if "CUT" in environment else 0), done.stderr[-2000:]
    return float((folder / "first").read_text()) - began if "TIMED" in environment else 0.0


def _move_store(folder: Path) -> None:
    """Move the store, with the changes in its log, to `kept.db`."""
    with closing(sqlite3.connect(folder / "runs.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (folder / "runs.db").rename(folder / "kept.db")


async def like(tasks: str = "10000", times: str = "5") -> dict[str, float]:
    """Measure both commands in turn. The figures are medians of their times, and the growth as a share of the first
    run.
    """
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as root:
        done, cut = Path(root) / "done", Path(root) / "cut"
        for folder in (done, cut):
            folder.mkdir()
            (folder / "work.py").write_text(_WORK)
            (folder / "plan.yaml").write_text(_PLAN)
        _write_rows(done, int(tasks), "first")
        _write_rows(cut, int(tasks), "changed")
        _plait(done, "run", "plan.yaml")
        _plait(cut, "run", "plan.yaml", CUT="1")
        _write_rows(done, int(tasks), "changed")
        for folder in (done, cut):
            _move_store(folder)
        before, grown = (done / "kept.db").stat().st_size, 0.0
        rows: list[tuple[float, float]] = []
        for _ in range(int(times)):
            for folder in (done, cut):
                shutil.copy(folder / "kept.db", folder / "runs.db")
            like_s = _plait(done, "run", "plan.yaml", "--like", "last", TIMED="1")
            rows.append((like_s, _plait(cut, "resume", "last", TIMED="1")))
            grown = (done / "runs.db").stat().st_size / before - 1
    likes, resumes = (sorted(column)[len(rows) // 2] for column in zip(*rows, strict=True))
    return {"like_s": likes, "resume_s": resumes, "ratio": likes / resumes, "grown": grown}


MEASURES: dict[str, Callable[..., Awaitable[dict[str, float]]]] = {"like": like}
