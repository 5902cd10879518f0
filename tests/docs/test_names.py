"""Each name of plait on the page with the names of other designs is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import plait
from plait import RunStatus, TaskStatus, backends, errors, orchestration, persistence, results, workflows
from plait.runner.cli.command_line import COMMANDS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "explanation" / "names.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ") and "| in plait" not in line]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])})
HOMES = (plait, errors, results, workflows, orchestration, backends, persistence)
BESIDE = {"registry", "store", "backends", "key", "resume", "output", "strict=True", "answers={task: payload}"}
"""Arguments and fields of what is named beside them."""
OTHER_WORDS = {*map(str, RunStatus), *map(str, TaskStatus), *BESIDE, "tool", "run", "run:task"}
ASKED = (
    "update_loop_state",
    "save_result",
    "get_next_interaction",
    "persist_run_state",
    "checkpoint_thread",
    "Command(resume=",
    "verify_report",
    "verify_blocked",
    "on_tool_start",
    "SaveMessage",
)


def is_there(path: str) -> bool:
    if path.startswith("plait "):
        return path.split()[1] in COMMANDS
    if call := re.fullmatch(r"(\w+)\((\w+)=\.\.\.\)", path):
        return call[2] in inspect.signature(getattr(plait, call[1])).parameters
    if path in OTHER_WORDS or path == "ValueError":
        return True
    first, *_ = path.split(".")
    found: object = next((home for home in HOMES if hasattr(home, first)), plait)
    for name in path.split("."):
        if hasattr(found, name):
            found = getattr(found, name)
        else:  # a field of a dataclass
            return inspect.isclass(found) and any(name in inspect.get_annotations(base) for base in found.__mro__)
    return True


def test_the_words_of_each_design_are_explained() -> None:
    assert [word for word in ASKED if not any(word in row[0] for row in ROWS)] == []


def test_each_name_of_plait_is_there() -> None:
    assert NAMES
    assert [name for name in NAMES if not is_there(name)] == []
