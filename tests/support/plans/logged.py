"""A folder with a plan whose functions leave a trace: a line in `log` for every call, before anything else."""

from __future__ import annotations

import time
from pathlib import Path

_LIMIT = 60.0  # seconds

CHAIN = """
  - {id: a, prompt: one}
  - {id: b, prompt: "two {{ a }}", depends_on: a}
"""
"""Two tasks, one behind the other."""
FUNCTIONS = """
import os
import time
from pathlib import Path

import anyio

from plait.errors import ErrorKind, BackendError


def log(prompt):
    # One write a line: two processes may log at the same time.
    with os.fdopen(os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w") as file:
        file.write(prompt.replace("\\n", " ") + "\\n")


async def say(prompt):
    log(prompt)
    return "re: " + prompt


async def hold(prompt):
    log(prompt)
    if not Path("go").exists():
        await anyio.sleep_forever()
    return "held: " + prompt


async def wait(prompt):
    log(prompt)
    while not Path("go").exists():
        await anyio.sleep(0.01)
    return "done"


async def stubborn(prompt):
    log(prompt)
    with anyio.CancelScope(shield=True):
        await anyio.sleep_forever()


async def finish(prompt):
    log(prompt)
    with anyio.CancelScope(shield=True):
        while not Path("go").exists():
            await anyio.sleep(0.01)
    return "held: " + prompt


def block(prompt):
    log(prompt)
    time.sleep(120)


async def sleep(prompt):
    log(prompt)
    if not Path("go").exists():
        time.sleep(120)
    return "held: " + prompt


async def seize(prompt):
    log(prompt)
    if not Path("go").exists():
        sum(range(10**13))  # holds the interpreter: no handler in Python runs
    return "held: " + prompt


async def fail(prompt):
    log(prompt)
    if not Path("go").exists():
        raise BackendError(ErrorKind.AUTH, "the door is shut")
    return "in: " + prompt


async def crash(prompt):
    return look(prompt, {})


def look(prompt, known):
    return known[prompt]


async def classify(prompt):
    log(prompt)
    return {"kind": "good", "words": len(prompt.split())}
"""


def backend(function: str) -> str:
    return f'{{kind: function, call: "functions.py:{function}"}}'


def make(folder: Path, tasks: str, **backends: str) -> Path:
    """A plan file `plan.yaml` in `folder` with `tasks`, in YAML; backend `say` is the default one."""
    folder.mkdir(exist_ok=True)
    (folder / "functions.py").write_text(FUNCTIONS)
    named = "".join(f"  {name}: {backend(function)}\n" for name, function in {"say": "say", **backends}.items())
    plan = folder / "plan.yaml"
    plan.write_text(f"name: trial\nbackends:\n{named}defaults: {{backend: say}}\ntasks:\n{tasks}")
    return plan


def calls(folder: Path) -> list[str]:
    """The prompts of all calls so far."""
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


def wait_for_call(folder: Path, prompt: str) -> None:
    """Until a function was called with `prompt`."""
    ends = time.monotonic() + _LIMIT
    while prompt not in calls(folder):
        assert time.monotonic() < ends, f"no call with {prompt!r}, only {calls(folder)}"
        time.sleep(0.01)
