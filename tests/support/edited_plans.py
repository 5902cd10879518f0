"""Random plans, and random edits of them, for runs that take answers over from earlier runs.

`#1` in a prompt is not seen by the model, so an edit of the number gives the same answer. The prompt `dice`, which many
nodes may have, gives another answer in every run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait import DAG, Task

LIST = {"type": "array"}
ELEMENTS = ("ant", "bee", "cat", "dog", "eel")
_MODELLED = {"text", "list", "mapped", "talk"}


@dataclass(frozen=True)
class Node:
    """A task of a plan."""

    id: str
    kind: str
    """text, list, mapped, talk, planner, person or dice."""
    words: str
    reads: tuple[str, ...] = ()
    over: str | None = None
    """The list of a mapped node, or the conversation of a talk."""
    agent: bool = False
    once: bool = False
    soft: bool = False
    gate: tuple[str, str] | None = None
    """A condition: a name that is read and a digit that its answer holds, or `item` and an element to leave out."""
    file: int | None = None
    """The contents of the file of the task."""
    model: str | None = None
    system: str | None = None
    temperature: float | None = None
    cache: bool = False
    quiet: bool = False
    """Whether a mapped node has no element in its prompt."""

    @property
    def when(self) -> str | None:
        """The condition of the task."""
        if self.gate is None:
            return None
        name, value = self.gate
        return f"{{{{ item }}}} != '{value}'" if name == "item" else f"'{value}' in {{{{ {name} }}}}"

    def task(self, folder: Path) -> Task:
        """Return the task of plait, with its file below `folder`."""
        names = "".join(f" {{{{ {name} }}}}" for name in self.reads)
        item = " {{ item }}" if self.kind == "mapped" and not self.quiet else ""
        upstream = [*self.reads, *([self.over] if self.kind == "mapped" and self.over not in self.reads else [])]
        return Task(
            self.id,
            "dice" if self.kind == "dice" else f"{self.id} {self.words}{item}{names}",
            [name for name in upstream if name is not None and not (self.kind == "talk" and name == self.over)],
            "person" if self.kind == "person" else "agent" if self.agent else None,
            continues=self.over if self.kind == "talk" else None,
            for_each=self.over if self.kind == "mapped" else None,
            adds_tasks=self.kind == "planner",
            output_schema=LIST if self.kind == "list" else None,
            at_most_once=self.once,
            failure_mode="soft" if self.soft else "hard",
            when=self.when,
            files=[] if self.file is None else [str(folder / str(self.file) / "notes.txt")],
            model=self.model,
            system=self.system,
            temperature=self.temperature,
            cache=self.cache,
        )


Plan = tuple[Node, ...]


def write_files(folder: Path) -> None:
    """Write the files that nodes may have."""
    for number in range(3):
        (folder / str(number)).mkdir()
        (folder / str(number) / "notes.txt").write_text(f"text {number}")


def dag_of(plan: Plan, folder: Path) -> DAG:
    """Return the plan for plait."""
    return DAG([node.task(folder) for node in plan])


def random_plan(rng: random.Random) -> Plan:
    """Return a plan of three to nine nodes."""
    plan: list[Node] = []
    for _ in range(rng.randint(3, 9)):
        plan.append(_random_node(rng, plan))
    return tuple(plan)


def _random_node(rng: random.Random, plan: Sequence[Node]) -> Node:
    number = max((int(node.id[1:]) for node in plan), default=0) + 1
    reads = tuple(node.id for node in rng.sample(plan, min(len(plan), rng.choice((0, 1, 1, 2)))))
    lists = [node.id for node in plan if node.kind == "list"]
    talks = [node for node in plan if node.kind in {"text", "talk"} and not node.once]
    soft = rng.random() < 0.25
    words = f"word{rng.randint(1, 3)} #1{' fail' if soft and rng.random() < 0.5 else ''}"
    kinds = ["text", "text", "list", "planner", "person", "dice"]
    kinds += ["mapped"] * 3 if lists else []
    kinds += ["talk"] if talks else []
    kind = rng.choice(kinds)
    node = Node(f"{kind[0]}{number}", kind, words, reads, soft=soft)
    if kind == "planner":
        return replace(node, id=f"q{number}", words=words.replace(" fail", ""), soft=False)
    if kind == "person":
        return replace(node, words=words.replace(" fail", ""), soft=False)
    if kind == "dice":
        return replace(node, words="", reads=(), soft=False, cache=rng.random() < 0.5)
    if kind == "mapped":
        node = replace(node, over=rng.choice(lists), agent=rng.random() < 0.3, quiet=rng.random() < 0.5)
    elif kind == "talk":
        before = rng.choice(talks)
        node = replace(node, id=f"t{number}", over=before.id, agent=before.agent)
    else:
        node = replace(node, agent=rng.random() < 0.15, once=rng.random() < 0.1)
    return _with_settings(rng, _gated(rng, node, plan))


def _gated(rng: random.Random, node: Node, plan: Sequence[Node]) -> Node:
    """Return the node with a condition, or as it is."""
    texts = [one.id for one in plan if one.id in node.reads and one.kind in {"text", "talk", "person"}]
    if node.kind == "mapped" and rng.random() < 0.25:
        return replace(node, gate=("item", rng.choice(ELEMENTS)))
    if node.kind in {"text", "talk"} and texts and rng.random() < 0.5:
        return replace(node, gate=(rng.choice(texts), rng.choice("0123456789abcdef")))
    return node


def _with_settings(rng: random.Random, node: Node) -> Node:
    node = replace(node, file=rng.randrange(3) if rng.random() < 0.2 else None, cache=rng.random() < 0.25)
    if node.agent or rng.random() < 0.7:
        return node
    return replace(node, model=rng.choice("xy"), system=rng.choice(("Brief.", "Long.")), temperature=0.5)


def edited(rng: random.Random, plan: Plan) -> Plan:
    """Return the plan after one to three random edits."""
    edits = (_reworded, _renumbered, _toggled, _read_more, _longer, _shorter, _reset, _gated_anew, _filed, _rolled)
    for _ in range(rng.randint(1, 3)):
        plan = rng.choice(edits)(rng, plan)
    return plan


def _changed(plan: Plan, place: int, **changes: Any) -> Plan:
    return (*plan[:place], replace(plan[place], **changes), *plan[place + 1 :])


def _reworded(rng: random.Random, plan: Plan) -> Plan:
    lists = [place for place, node in enumerate(plan) if node.kind == "list"]
    place = rng.choice(lists) if lists and rng.random() < 0.5 else rng.randrange(len(plan))
    words = re.sub(r"word\d+", f"word{rng.randint(1, 9)}", plan[place].words)
    return _changed(plan, place, words=words)


def _renumbered(rng: random.Random, plan: Plan) -> Plan:
    place = rng.randrange(len(plan))
    return _changed(plan, place, words=re.sub(r"#\d+", f"#{rng.randint(1, 99)}", plan[place].words))


def _toggled(rng: random.Random, plan: Plan) -> Plan:
    soft = [place for place, node in enumerate(plan) if node.soft]
    if not soft:
        return plan
    place = rng.choice(soft)
    words = plan[place].words
    return _changed(plan, place, words=words.removesuffix(" fail") if words.endswith(" fail") else f"{words} fail")


def _read_more(rng: random.Random, plan: Plan) -> Plan:
    place = rng.randrange(len(plan))
    others = [node.id for node in plan[:place] if node.id not in plan[place].reads and plan[place].kind != "dice"]
    return _changed(plan, place, reads=(*plan[place].reads, rng.choice(others))) if others else plan


def _longer(rng: random.Random, plan: Plan) -> Plan:
    return (*plan, _random_node(rng, plan))


def _rolled(rng: random.Random, plan: Plan) -> Plan:
    """Append one more node with the prompt `dice`."""
    number = max(int(node.id[1:]) for node in plan) + 1
    return (*plan, Node(f"d{number}", "dice", "", cache=rng.random() < 0.5))


def _shorter(_rng: random.Random, plan: Plan) -> Plan:
    used = {name for node in plan for name in (*node.reads, node.over)}
    left = [node for node in plan[:-1] if node.id in used or node is plan[0]]
    return (*left, plan[-1]) if len(left) >= 2 else plan


def _reset(rng: random.Random, plan: Plan) -> Plan:
    """Change the model or the temperature, or the cache, of a node."""
    places = [place for place, node in enumerate(plan) if node.kind in _MODELLED and not node.agent]
    if not places:
        return plan
    place = rng.choice(places)
    changes = {"model": rng.choice("xyz"), "system": "Long.", "temperature": rng.choice((0.1, 0.9)), "cache": True}
    name = rng.choice(sorted(changes))
    return _changed(plan, place, **{name: changes[name]})


def _gated_anew(rng: random.Random, plan: Plan) -> Plan:
    """Give a node another condition, or none."""
    places = [place for place, node in enumerate(plan) if node.gate is not None]
    if not places:
        return plan
    place = rng.choice(places)
    name, _ = plan[place].gate or ("", "")
    values = ELEMENTS if name == "item" else "0123456789abcdef"
    return _changed(plan, place, gate=rng.choice((None, (name, rng.choice(values)), (name, rng.choice(values)))))


def _filed(rng: random.Random, plan: Plan) -> Plan:
    """Give a node another file, or none."""
    places = [place for place, node in enumerate(plan) if node.kind in _MODELLED]
    if not places:
        return plan
    return _changed(plan, rng.choice(places), file=rng.choice((None, 0, 1, 2)))
