"""What has to hold of a case of the adoptions, whoever died in it and when."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.backends.process.process_table import start_time
from tests.faults.campaigns.adoption_plans import SAYS, Script
from tests.faults.campaigns.adoption_steps import Stock
from tests.support.agents.detached_backend import AGENT
from tests.support.agents.outliving import World

_COST = 0.5  # of each answer of the stand-in, in dollars
_TOKENS = 10


@dataclass(slots=True)
class Facts:
    """What a case showed. `turns` are the agents' own witness of what was said, see `World.turns`."""

    turns: list[dict[str, Any]]
    stock: Stock
    killed: set[int] = field(default_factory=set[int])
    """The agents that were killed."""
    told: set[int] = field(default_factory=set[int])
    """The agents that have said which session they have."""
    settled: set[str] = field(default_factory=set[str])
    """The tasks of which a person had to say what became of them."""
    talks: int = 0
    """How often a person went on with a conversation."""


def judged(script: Script, facts: Facts) -> list[str]:
    """What is wrong with the end of a case."""
    wrong = [*_answered(script, facts), *_said_twice_in_a_session(script, facts)]
    if not facts.killed:
        wrong += [*_said_too_often(script, facts), *_interrupted(script, facts), *_asked_about(script, facts)]
        wrong += _paid(facts)
    return wrong


def _answered(script: Script, facts: Facts) -> Iterable[str]:
    passed = {task["task_id"] for task in facts.stock.tasks if task["status"] in {"completed", "skipped"}}
    for task in facts.stock.tasks:
        task_id, status = task["task_id"], task["status"]
        asked = script.tasks[task_id]
        if status == "completed":
            if not facts.talks and task["text"] not in _texts(task_id, asked):
                yield f"{task_id} has the answer {task['text']!r}"
            continue
        to_fail = "failure_mode" in asked and status in {"failed", "skipped"}
        crashed = status == "failed" and task["error_kind"] == "crashed"
        waits_for = {*task["depends_on"], asked.get("continues", task_id)} - {task_id}
        behind_it = status == "pending" and not waits_for <= passed
        if not to_fail and not (facts.killed and (crashed or behind_it)):
            yield f"{task_id} is {status}: {task['error_kind']}: {task['error']}"


def _texts(task_id: str, asked: Any) -> set[str]:
    """What may be answered: to the prompt, in a turn that goes on with it, and by a person."""
    prompt = asked["prompt"].split(" [[")[0]
    said = {prompt, f"ans {task_id}"} if "[[ask" in asked["prompt"] else {prompt}
    texts = {f"{how} {words}" for how in ("re:", "went on with") for words in said}
    if "adds_tasks" in asked:
        texts.add("[]")
    return texts | {"settled"} if "at_most_once" in asked else texts


def _said_twice_in_a_session(script: Script, facts: Facts) -> Iterable[str]:
    # Of who was killed before it said that it has the session nobody knows that it heard the prompt.
    unheard = facts.killed - facts.told
    times = Counter((turn["session"], turn["prompt"]) for turn in _new(facts) if turn["pid"] not in unheard)
    for (session, prompt), count in times.items():
        # Whether the agent that was killed had taken the answer nobody knows, so it is said again.
        again = prompt == SAYS or (prompt.startswith("ans ") and facts.killed)
        if count > script.said_at_most(prompt) and not again:
            yield f"{prompt!r} was said {count} times in session {session}"


def _said_too_often(script: Script, facts: Facts) -> Iterable[str]:
    for prompt, count in Counter(turn["prompt"] for turn in _new(facts)).items():
        if count > script.said_at_most(prompt) and prompt != SAYS:
            yield f"{prompt!r} was said {count} times, and no agent was killed"


def _interrupted(script: Script, facts: Facts) -> Iterable[str]:
    fails_once = {turn["session"] for turn in facts.turns if "[[kept" in turn["prompt"]}
    for turn in facts.turns:
        if turn["goes_on"] and turn["session"] not in fails_once:
            yield f"session {turn['session']} was told of an interruption, and no agent was killed"


def _new(facts: Facts) -> list[dict[str, Any]]:
    """The turns that did not go on with one that was cut."""
    return [turn for turn in facts.turns if not turn["goes_on"]]


def _asked_about(script: Script, facts: Facts) -> Iterable[str]:
    heard = {turn["prompt"] for turn in facts.turns}
    for task_id in facts.settled:
        # One whose runner died before the agent was there is rightly asked about.
        if script.tasks[task_id]["prompt"] in heard:
            yield f"a person was asked about {task_id}, whose agent was never killed"


def _paid(facts: Facts) -> Iterable[str]:
    """Each answer is paid for once. What a person's own turns cost is not among the attempts."""
    answers = sum(attempt["input_tokens"] == _TOKENS for attempt in facts.stock.attempts)
    turns = [turn for turn in facts.turns if _answers(turn)]
    if facts.talks:
        return
    if facts.stock.cost != _COST * answers:
        yield f"the run's cost is {facts.stock.cost}, and {answers} of its attempts were answered"
    if answers != len(turns):
        yield f"agents have answered {len(turns)} times, and {answers} answers are paid for"


def _answers(turn: dict[str, Any]) -> bool:
    return turn["goes_on"] or re.search(r"\[\[(ask|kept|error) ", turn["prompt"]) is None


def left_alive(world: World) -> list[int]:
    """The agents and their children that live, by what they said of themselves and by the kernel's table."""
    found = set(world.alive())
    ours = {os.fsencode(world.folder), os.fsencode(AGENT)}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if ours.issubset(words) and start_time(int(entry.name)) is not None:
                    found.add(int(entry.name))
    return sorted(found)


def open_to_others(root: Path) -> list[str]:
    """The files from `root` down that others than this user may read or write."""
    found: list[str] = []
    for path in (root, *root.rglob("*")):
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.lstat().st_mode)
            found += [f"{path.relative_to(root.parent)} has mode {mode:o}"] if mode & 0o077 else []
    return found
