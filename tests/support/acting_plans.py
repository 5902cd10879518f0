"""Random plans that act: commands, checks, loops, called plans, joins, samples, conditions, soft failures and lists of
lists, all within each other; and an oracle that plays them one task after the other, and knows nothing of the engine.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

DONE, FAILED, SKIPPED, PENDING = "completed", "failed", "skipped", "pending"
Plan = list[dict[str, Any]]
_ALONE = """
trap 'rmdir busy; exit 1' TERM
mkdir busy || exit 9
echo "$1" >> "$0"
sleep 0.02
rmdir busy
printf a
exit "$2"
"""
"""Notes the name of the command, and fails if another one works in the folder."""
CHECKED = "{{ answer }} != 'c'"
CORRECTION = "The check of the answer failed"
"""The beginning of the prompt after an answer that did not pass, by which all these prompts are counted."""


def _number(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[0]


def answer(prompt: str) -> str | list[str] | None:
    """Return what the model says to the prompt: a letter, for a prompt of a list up to three, or None for a failure."""
    if prompt.startswith(CORRECTION):
        return "a"
    number = _number(prompt)
    if number % 11 == 0:
        return None
    return [*"abc"][: number % 4] if prompt.startswith("l") else "abc"[number % 3]


def exit_code(name: str) -> int:
    """Return the exit code of the command `name`."""
    return int(_number(name) % 5 == 0)


def random_plan(odds: random.Random, depth: int, *, commands: bool, name: str = "") -> Plan:
    """Return the tasks of a plan, in a form of its own: `kind` says what each does."""
    tasks: Plan = []
    for number in range(odds.randint(2, 5)):
        before = [task["id"] for task in tasks if odds.random() < 0.5]
        lists = [task["id"] for task in tasks if task["kind"] in {"list", "lists"}]
        kinds = ["model"] * 4 + ["list", "list"] + ["command"] * commands + ["each", "lists"] * bool(lists)
        kind = odds.choice([*kinds, *(["call", "loop"] if depth else [])])
        join = odds.choice(["all", "all", "any", "done"]) if before and kind not in {"each", "lists"} else "all"
        task: dict[str, Any] = {
            "id": f"{'l' if kind in {'list', 'lists'} else 't'}{number}",
            "kind": kind,
            "name": f"{name}.{number}",
            "mode": odds.choice(["hard", "hard", "soft", "skip"]),
            "after": before,
            "join": "all" if join == "any" and kind in {"call", "loop"} else join,
        }
        if kind in {"each", "lists"}:
            task |= {"after": [], "over": odds.choice(lists), "join": "all"}
        texts = [each["id"] for each in tasks if each["id"] in before and each["kind"] in {"model", "call", "loop"}]
        if texts and task["join"] == "all" and kind != "each" and kind != "lists" and odds.random() < 0.3:
            task["when"] = texts[0]
        if kind == "model":
            task |= {"check": odds.random() < 0.3, "repeat": odds.choice([1, 1, 1, 2, 3])}
        if kind in {"call", "loop"}:
            inner = random_plan(odds, depth - 1, commands=commands, name=task["name"])
            inner.append({**_LAST, "name": f"{task['name']}.end", "after": [inner[-1]["id"]], "join": "done"})
            task |= {"inner": inner, "max": odds.randint(1, 3)}
        tasks.append(task)
    return tasks


_LAST: dict[str, Any] = {"id": "end", "kind": "model", "mode": "soft", "check": False, "repeat": 1}


def written(tasks: Plan, folder: Path, log: Path, name: str = "plan") -> Plan:
    """Return the tasks as in a plan file, and write the plans that they call. Commands note their names in `log`."""
    kinds, plan = {task["id"]: task["kind"] for task in tasks}, list[dict[str, Any]]()
    for task in tasks:
        kind, mode = task["kind"], task["mode"]
        part: dict[str, Any] = {"id": task["id"], "depends_on": task["after"], "failure_mode": mode}
        part |= {"join": task["join"]} if task["join"] != "all" else {}
        part |= {"when": f"{{{{ {task['when']} }}}} != 'b'"} if "when" in task else {}
        values = _values([f"{{{{ {each}{'.stdout' * (kinds[each] == 'command')} }}}}" for each in task["after"]], task)
        if kind in {"model", "list"}:
            part["prompt"] = f"{task['id']} {values} {{{{ x }}}}"
            part |= {"output_schema": {"type": "array"}} if kind == "list" else {}
            part |= {"check": {"passes": CHECKED, "tries": 3}} if task.get("check") else {}
            part |= {"repeat": task["repeat"], "vote": "majority"} if task.get("repeat", 1) > 1 else {}
        elif kind in {"each", "lists"}:
            part |= {"for_each": task["over"], "prompt": f"{task['id']} {{{{ item }}}} {{{{ x }}}}"}
            part |= {"output_schema": {"type": "array"}} if kind == "lists" else {}
        elif kind == "command":
            part["run"] = ["sh", "-c", _ALONE, str(log), task["name"], str(exit_code(task["name"]))]
        else:
            inner, file = written(task["inner"], folder, log, f"{name}{task['name']}"), f"{name}{task['name']}.json"
            value = f"{task['id']} {values}"
            call: dict[str, Any] = {"plan": file, "with": {"x": value}}
            if kind == "loop":
                call["with"]["x"] += " {{ previous.end }}"
                call |= {"until": "{{ end }} == 'a'", "max": task["max"]}
            plan_file = {"inputs": {"x": ""}, "tasks": inner, "returns": "{{ end }}"}
            (folder / file).write_text(json.dumps(plan_file))
            part |= {"loop": call} if kind == "loop" else call
        plan.append(part)
    return plan


def _values(values: Sequence[str], task: dict[str, Any]) -> str:
    """Return the values of the dependencies in the prompt; none if time decides which are there."""
    return " ".join(values) if task["join"] != "any" else "any"


@dataclass
class Oracle:
    """What has to happen in a run of a plan."""

    statuses: dict[str, str] = field(default_factory=dict[str, str])
    """How each task ends, by id."""
    texts: dict[str, str] = field(default_factory=dict[str, str])
    """The answers of the tasks that call a model or a plan."""
    calls: Counter[str] = field(default_factory=Counter[str])
    """How often the model is asked, by prompt."""
    commands: Counter[str] = field(default_factory=Counter[str])
    """How often each command runs."""
    evidence: Counter[str] = field(default_factory=Counter[str])
    """How many answers of each task are checked."""
    _by_condition: set[str] = field(default_factory=set[str])

    def play(self, tasks: Plan, prefix: str = "", x: str = "") -> dict[str, Any]:
        """Play the tasks, whose ids begin with `prefix`. Return the value of each, by its id in the plan."""
        values: dict[str, Any] = {}
        modes = {task["id"]: task["mode"] for task in tasks}
        for task in tasks:
            ends = [(self.statuses[prefix + each], modes[each]) for each in task["after"]]
            dead = sum(self._is_dead(*each) for each in ends)
            good = any(status == DONE for status, _ in ends)
            starts = {"all": not dead, "any": good or not dead, "done": True}[task["join"]]
            values[task["id"]] = ""
            if task["kind"] in {"each", "lists"}:
                over = next(each for each in tasks if each["id"] == task["over"])
                values[task["id"]] = self._each(
                    task, prefix + task["id"], prefix + task["over"], over["mode"], values, x
                )
            elif not starts:
                self._end(task, prefix, PENDING)
            elif "when" in task and values[task["when"]] == "b":
                self._by_condition.add(prefix + task["id"])
                self._end(task, prefix, SKIPPED)
            else:
                values[task["id"]] = self._work(task, prefix, values, x)
        return values

    @staticmethod
    def _is_dead(status: str, mode: str) -> bool:
        return status == PENDING or (status == FAILED and mode == "hard")

    def _end(self, task: dict[str, Any], prefix: str, status: str) -> None:
        name, repeat = prefix + task["id"], task.get("repeat", 1)
        self.statuses[name] = status
        if repeat > 1:
            self.statuses |= {f"{name}.{number}": status for number in range(1, repeat + 1)}
            # A vote without an answer ends as a failure does; behind a hard one it cannot start.
            self.statuses[name] = PENDING if status == FAILED and task["mode"] == "hard" else status

    def _fail(self, task: dict[str, Any], prefix: str) -> str:
        self._end(task, prefix, SKIPPED if task["mode"] == "skip" else FAILED)
        return ""

    def _work(self, task: dict[str, Any], prefix: str, values: dict[str, Any], x: str) -> Any:
        name, kind = prefix + task["id"], task["kind"]
        given = _values([_shown(values[each]) for each in task["after"]], task)
        if kind == "command":
            self.commands[task["name"]] += 1
            if exit_code(task["name"]):
                return self._fail(task, prefix)
            self._end(task, prefix, DONE)
            return "a"
        if kind in {"call", "loop"}:
            return self._call(task, prefix, given)
        said: Any = None
        for sample in range(1, task.get("repeat", 1) + 1):
            prompt = f"{task['id']} {given} {x}"
            said = answer(prompt)
            self.calls[prompt] += 1
            if task.get("check") and said is not None:
                whole = name if task["repeat"] == 1 else f"{name}.{sample}"
                self.evidence[whole] += 2 if said == "c" else 1
                if said == "c":
                    self.calls[CORRECTION] += 1
                    said = answer(CORRECTION)
        if said is None:
            return self._fail(task, prefix)
        self._end(task, prefix, DONE)
        if isinstance(said, str):
            self.texts[name] = said
        return said

    def _each(self, task: dict[str, Any], name: str, over: str, mode: str, values: dict[str, Any], x: str) -> Any:
        """Play a task over the list, or the lists, of the task `over`, which fails as `mode` says."""
        inner = [one for one in self.statuses if _is_part(one, over)]
        if inner:
            results = [
                self._each(task, f"{name}.{number}", part, mode, values, x) for number, part in enumerate(inner, 1)
            ]
            parts = [f"{name}.{number}" for number in range(1, len(inner) + 1)]
            return self._gather(name, parts, task["mode"], results)
        if self._is_dead(self.statuses[over], mode):
            self.statuses[name] = PENDING
            return ""
        elements = values.get(f"value {over}", values.get(over.rpartition(".")[2], ""))
        items = cast("list[str]", elements) if self.statuses[over] == DONE and isinstance(elements, list) else []
        results, parts = list[Any](), list[str]()
        for number, item in enumerate(items, 1):
            part, prompt = f"{name}.{number}", f"{task['id']} {item} {x}"
            parts.append(part)
            self.calls[prompt] += 1
            said = answer(prompt)
            self.statuses[part] = DONE if said is not None else SKIPPED if task["mode"] == "skip" else FAILED
            values[f"value {part}"] = said
            results.append("" if said is None else said)
        return self._gather(name, parts, task["mode"], results)

    def _gather(self, name: str, parts: Sequence[str], mode: str, results: list[Any]) -> Any:
        is_blocked = any(self._is_dead(self.statuses[part], mode) for part in parts)
        self.statuses[name] = PENDING if is_blocked else DONE
        return "" if is_blocked else results

    def _call(self, task: dict[str, Any], prefix: str, given: str) -> str:
        name, previous = prefix + task["id"], ""
        is_loop = task["kind"] == "loop"
        for number in range(1, (task["max"] if is_loop else 1) + 1):
            value = f"{task['id']} {given}" + (f" {previous}" if is_loop else "")
            begin = f"{name}." + (f"{number}." if is_loop else "")
            values = self.play(task["inner"], begin, value)
            own = [(begin + one["id"], one["mode"]) for one in task["inner"]]
            if any(self._is_dead(self.statuses[one], mode) for one, mode in own):
                return self._fail(task, prefix)
            previous = values["end"]
            is_good = all(self.statuses[one] == DONE or one in self._by_condition for one, _ in own)
            if not is_loop or (is_good and previous == "a" and self.statuses[f"{begin}end"] == DONE):
                self._end(task, prefix, DONE)
                self.texts[name] = previous
                return previous
        return self._fail(task, prefix)


def _is_part(task_id: str, whole: str) -> bool:
    before, _, number = task_id.rpartition(".")
    return before == whole and number.isdecimal()


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
