"""Random plans that act: commands, checks, loops, called plans, joins, races, samples, conditions, soft failures and
lists of lists, all within each other; and an oracle that plays them one task after the other, and knows nothing of the
engine.

Time decides who wins a race. The oracle is told which tasks were cancelled, says whether a race explains that, and
foretells everything else.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

DONE, FAILED, SKIPPED, PENDING, CANCELLED = "completed", "failed", "skipped", "pending", "cancelled"
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
        kinds = ["model"] * 4 + ["list", "list"] + ["command"] * 2 * commands + ["each", "lists"] * bool(lists)
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
        task["race"] = task["join"] == "any" and odds.random() < 0.5
        used = {each for one in tasks for each in (*one["after"], one.get("over"))}
        free = [one["id"] for one in tasks if one["id"] not in used]
        if len(free) > 1 and kind not in {"each", "lists", "call", "loop"} and odds.random() < 0.3:
            task |= {"after": free, "join": "any", "race": True}
        if kind in {"each", "lists"}:
            task |= {"after": [], "over": odds.choice(lists), "join": "all", "race": False}
        texts = [
            each["id"] for each in tasks if each["id"] in task["after"] and each["kind"] in {"model", "call", "loop"}
        ]
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
        part |= {"race": True} if task.get("race") else {}
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
    """What has to happen in a run of a plan in which the tasks ended as in `found`."""

    found: Mapping[str, str] = field(default_factory=dict[str, str])
    statuses: dict[str, str] = field(default_factory=dict[str, str])
    """How each task ends, by id: as foretold, or cancelled where it was found so."""
    texts: dict[str, str] = field(default_factory=dict[str, str])
    """The answers of the tasks that call a model or a plan."""
    calls: Counter[str] = field(default_factory=Counter[str])
    """How often the model is asked, by prompt."""
    commands: Counter[str] = field(default_factory=Counter[str])
    """How often each command runs."""
    evidence: Counter[str] = field(default_factory=Counter[str])
    """How many answers of each task are checked."""
    lost: dict[str, Counter[str]] = field(default_factory=lambda: {"calls": Counter(), "commands": Counter()})
    """The calls and the commands of cancelled tasks, which may have been made or not."""
    _by_condition: set[str] = field(default_factory=set[str])
    _needs: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The tasks that each task waits for, the tasks of its plan, its parts and its samples included."""
    _races: set[str] = field(default_factory=set[str])
    _gathering: set[str] = field(default_factory=set[str])
    """The tasks that stand for plans."""
    _lost_calls: list[str] = field(default_factory=list[str])

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
            self._note_needs(task, prefix)
            if task["kind"] in {"each", "lists"}:
                over = next(each for each in tasks if each["id"] == task["over"])
                values[task["id"]] = self._each(
                    task, prefix + task["id"], prefix + task["over"], over["mode"], values, x
                )
            elif not starts:
                self._end(task, prefix, PENDING)
            elif "when" in task and values[task["when"]] == "b":
                self._by_condition.update(_with_samples(prefix + task["id"], task))
                self._end(task, prefix, SKIPPED)
            else:
                values[task["id"]] = self._work(task, prefix, values, x)
        return values

    def unexplained(self) -> list[str]:
        """Return what no race explains: tasks that were cancelled, and losers that were not."""
        needed_by: dict[str, set[str]] = {}
        for name, needed in self._needs.items():
            for each in needed:
                needed_by.setdefault(each, set()).add(name)

        def has_won(race: str) -> bool:
            return race in self._races and any(self.found.get(each) == DONE for each in self._needs[race])

        def is_needed(name: str) -> bool:
            """Whether the task serves another one than races that are won; the plan that it belongs to only gathers."""
            others = (each for each in needed_by[name] if not self._gathers(each, name) and not has_won(each))
            return any(self.found.get(each, CANCELLED) == PENDING for each in others)

        cancelled = {name for name, status in self.found.items() if status == CANCELLED}
        waiting = [each for race in self._races if has_won(race) for each in self._needs[race]]
        explained = set[str]()
        while waiting:
            name = waiting.pop()
            if name in cancelled - explained and not is_needed(name):
                explained.add(name)
                waiting += self._needs.get(name, ())
        wrong = [f"{name} was cancelled, and no race explains it" for name in sorted(cancelled - explained)]
        for race in filter(has_won, self._races):
            needs = self._needs[race]
            others = [
                each
                for each in needs
                if all(self._gathers(by, each) or self._is_like(race, by) for by in needed_by[each])
            ]
            ends = [self.found.get(each, CANCELLED) for each in others]
            if ends.count(DONE) > 1 or (DONE in ends and PENDING in ends):
                wrong.append(f"the losers of the race for {race} were not cancelled: {others} are {ends}")
        return wrong

    def _is_like(self, race: str, other: str) -> bool:
        """Return whether the task is the race, or another sample of it."""
        return other in self._races and self._needs[other] == self._needs[race]

    def _gathers(self, name: str, part: str) -> bool:
        return name in self._gathering and part.startswith(f"{name}.")

    def _note_needs(self, task: dict[str, Any], prefix: str) -> None:
        name = prefix + task["id"]
        samples = _with_samples(name, task)[1:]
        needs = [prefix + each for each in (*task["after"], *([task["over"]] if "over" in task else []))]
        self._needs |= {name: samples} | dict.fromkeys(samples, needs) if samples else {name: needs}
        if task.get("race"):
            self._races.update(samples or [name])
        if task["kind"] in {"call", "loop"}:
            self._gathering.add(name)

    def _is_lost(self, name: str) -> bool:
        """Return whether the task was cancelled, or belongs to a cancelled one and was never there."""
        is_there = name in self.found or not any(name.startswith(f"{one}.") for one in self._lost_calls)
        return not is_there or self.found.get(name) == CANCELLED

    def _counted(self, name: str, what: str) -> Counter[str]:
        return self.lost[what] if self._is_lost(name) else {"calls": self.calls, "commands": self.commands}[what]

    @staticmethod
    def _is_dead(status: str, mode: str) -> bool:
        return status in {PENDING, CANCELLED} or (status == FAILED and mode == "hard")

    def _set(self, name: str, status: str) -> None:
        self.statuses[name] = CANCELLED if self._is_lost(name) else status

    def _end(self, task: dict[str, Any], prefix: str, status: str) -> None:
        name, repeat = prefix + task["id"], task.get("repeat", 1)
        if repeat > 1:
            for sample in _with_samples(name, task)[1:]:
                self._set(sample, status)
            # A vote without an answer ends as a failure does; behind a hard one it cannot start.
            status = PENDING if status == FAILED and task["mode"] == "hard" else status
        self._set(name, status)

    def _fail(self, task: dict[str, Any], prefix: str) -> str:
        self._end(task, prefix, SKIPPED if task["mode"] == "skip" else FAILED)
        return ""

    def _work(self, task: dict[str, Any], prefix: str, values: dict[str, Any], x: str) -> Any:
        name, kind = prefix + task["id"], task["kind"]
        given = _values([_shown(values[each]) for each in task["after"]], task)
        if kind == "command":
            self._counted(name, "commands")[task["name"]] += 1
            if exit_code(task["name"]):
                return self._fail(task, prefix)
            self._end(task, prefix, DONE)
            return "" if self._is_lost(name) else "a"
        if kind in {"call", "loop"}:
            if self._is_lost(name):
                self._lost_calls.append(name)
            return self._call(task, prefix, given)
        said: Any = None
        for sample in range(1, task.get("repeat", 1) + 1):
            whole = name if task.get("repeat", 1) == 1 else f"{name}.{sample}"
            calls, prompt = self._counted(whole, "calls"), f"{task['id']} {given} {x}"
            said = answer(prompt)
            calls[prompt] += 1
            if task.get("check") and said is not None:
                if not self._is_lost(whole):
                    self.evidence[whole] += 2 if said == "c" else 1
                if said == "c":
                    calls[CORRECTION] += 1
                    said = answer(CORRECTION)
        if said is None:
            return self._fail(task, prefix)
        self._end(task, prefix, DONE)
        if self._is_lost(name):
            return ""
        if isinstance(said, str):
            self.texts[name] = said
        return said

    def _each(self, task: dict[str, Any], name: str, over: str, mode: str, values: dict[str, Any], x: str) -> Any:
        """Play a task over the list, or the lists, of the task `over`, which fails as `mode` says."""
        if self._is_lost(name):
            self._lost_calls.append(name)
        inner = [one for one in self.statuses if _is_part(one, over)]
        if inner:
            parts = [f"{name}.{number}" for number in range(1, len(inner) + 1)]
            self._needs |= {part: [theirs] for part, theirs in zip(parts, inner, strict=True)}
            results = [
                self._each(task, part, theirs, mode, values, x) for part, theirs in zip(parts, inner, strict=True)
            ]
            return self._gather(name, parts, task["mode"], results)
        if self._is_dead(self.statuses[over], mode):
            self._set(name, PENDING)
            return ""
        elements = values.get(f"value {over}", values.get(over.rpartition(".")[2], ""))
        items = cast("list[str]", elements) if self.statuses[over] == DONE and isinstance(elements, list) else []
        results, parts = list[Any](), list[str]()
        for number, item in enumerate(items, 1):
            part, prompt = f"{name}.{number}", f"{task['id']} {item} {x}"
            parts.append(part)
            self._counted(part, "calls")[prompt] += 1
            said = answer(prompt)
            self._set(part, DONE if said is not None else SKIPPED if task["mode"] == "skip" else FAILED)
            values[f"value {part}"] = said
            results.append("" if said is None else said)
        return self._gather(name, parts, task["mode"], results)

    def _gather(self, name: str, parts: Sequence[str], mode: str, results: list[Any]) -> Any:
        self._needs[name] = [*self._needs.get(name, ()), *parts]
        is_blocked = any(self._is_dead(self.statuses[part], mode) for part in parts)
        self._set(name, PENDING if is_blocked else DONE)
        return "" if is_blocked else results

    def _call(self, task: dict[str, Any], prefix: str, given: str) -> str:
        name, previous = prefix + task["id"], ""
        is_loop = task["kind"] == "loop"
        for number in range(1, (task["max"] if is_loop else 1) + 1):
            value = f"{task['id']} {given}" + (f" {previous}" if is_loop else "")
            begin = f"{name}." + (f"{number}." if is_loop else "")
            values = self.play(task["inner"], begin, value)
            own = [(each, one["mode"]) for one in task["inner"] for each in _with_samples(begin + one["id"], one)]
            self._needs[name] = [*self._needs[name], *(one for one in self.statuses if one.startswith(begin))]
            if any(self.statuses[one] != CANCELLED and self._is_dead(self.statuses[one], mode) for one, mode in own):
                return self._fail(task, prefix)
            previous = values["end"]
            is_good = all(self.statuses[one] in {DONE, CANCELLED} or one in self._by_condition for one, _ in own)
            if not is_loop or (is_good and previous == "a" and self.statuses[f"{begin}end"] == DONE):
                self._end(task, prefix, DONE)
                if self._is_lost(name):
                    return ""
                self.texts[name] = previous
                return previous
        return self._fail(task, prefix)

    @property
    def absent(self) -> set[str]:
        """The tasks of cancelled ones that were never there."""
        return {name for name in self.statuses if name not in self.found and self._is_lost(name)}


def _with_samples(name: str, task: dict[str, Any]) -> list[str]:
    repeat = task.get("repeat", 1)
    return [name, *(f"{name}.{number}" for number in range(1, repeat + 1 if repeat > 1 else 1))]


def _is_part(task_id: str, whole: str) -> bool:
    before, _, number = task_id.rpartition(".")
    return before == whole and number.isdecimal()


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
