"""Random plans, random edits of them, and an oracle that tells which calls a run of the edited plan has to make.

The oracle reads the plan in its own form (`Node`), renders prompts by itself, and shares no code with plait: a task is
called again unless an earlier run completed the task of the same id, or the part for the same element, by the same
prompt in the same conversation. `#1` in a prompt is not seen by the model, so an edit of the number gives the same
answer.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from plait.backends import BackendError, ErrorKind, Reply
from plait.backends.protocol import ConversationRequest
from plait.runner import DAG, Task

LIST = {"type": "array"}
ELEMENTS = ("ant", "bee", "cat", "dog", "eel")


@dataclass(frozen=True)
class Node:
    """A task of a plan."""

    id: str
    kind: str
    """text, list, mapped, talk or planner."""
    words: str
    reads: tuple[str, ...] = ()
    over: str | None = None
    """The list of a mapped node, or the conversation of a talk."""
    agent: bool = False
    once: bool = False
    soft: bool = False

    def task(self) -> Task:
        """Return the task of plait."""
        names = "".join(f" {{{{ {name} }}}}" for name in self.reads)
        item = " {{ item }}" if self.kind == "mapped" else ""
        upstream = [*self.reads, *([self.over] if self.kind == "mapped" and self.over not in self.reads else [])]
        return Task(
            self.id,
            f"{self.id} {self.words}{item}{names}",
            [name for name in upstream if name is not None and not (self.kind == "talk" and name == self.over)],
            "agent" if self.agent else None,
            continues=self.over if self.kind == "talk" else None,
            for_each=self.over if self.kind == "mapped" else None,
            adds_tasks=self.kind == "planner",
            output_schema=LIST if self.kind == "list" else None,
            at_most_once=self.once,
            failure_mode="soft" if self.soft else "hard",
        )


Plan = tuple[Node, ...]
Identity = tuple[str, str | None]
"""The id of a task, or the id of the whole and the element."""


def dag_of(plan: Plan) -> DAG:
    """Return the plan for plait."""
    return DAG([node.task() for node in plan])


@dataclass(frozen=True)
class Call:
    """A call that a run makes if no answer is taken over."""

    prompt: str
    conversation: tuple[Call, ...]
    """The calls that the conversation holds already, the oldest first."""
    answer: Any
    """The text, or the list; None for a failure."""
    reusable: bool


Trace = dict[Identity, Call]


def model(history: Sequence[str], prompt: str) -> str:
    """Return the text with which every backend answers: the same for the same visible words."""
    seen = re.sub(r"#\d+", "", "\n".join([*history, prompt]))
    return "a" + hashlib.sha256(seen.encode()).hexdigest()[:8]


def elements(answer: str) -> list[str]:
    """Return the list that a model gives for this text: one to three elements, never one twice."""
    return random.Random(answer).sample(ELEMENTS, 1 + int(answer[1], 16) % 3)


def added(node_id: str, answer: str) -> list[dict[str, str]]:
    """Return the tasks that a planner adds."""
    count = 1 + int(answer[1], 16) % 2
    return [{"id": f"{node_id}x{n}", "prompt": f"added {answer if n == 1 else 'always'}"} for n in range(1, count + 1)]


class Model:
    """A backend that answers by `model`, and records the prompts."""

    session_id = None

    def __init__(self) -> None:
        self.made: list[str] = []
        self._history: list[str] = []

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[_Talk]:
        yield _Talk(self, [message.content for message in request.history], request.output_schema is not None)


class ReusableModel(Model):
    """The same, with answers that a later run may take over."""

    def answer_key(self) -> str:
        return "model"


@dataclass
class _Talk:
    model: Model
    history: list[str]
    wants_list: bool
    session_id: str | None = field(default=None)

    async def send(self, prompt: str) -> Reply:
        self.model.made.append(prompt)
        if "fail" in prompt:
            raise BackendError(ErrorKind.REFUSED, "no")
        answer = model(self.history, prompt)
        if self.wants_list:
            return Reply(json.dumps(elements(answer)), elements(answer))
        planner = re.match(r"(p\d+) ", prompt)
        if planner is not None:
            return Reply(json.dumps(added(planner[1], answer)))
        return Reply(answer)


class Oracle:
    """Goes through a plan without plait."""

    def __init__(self, plan: Plan) -> None:
        self.trace: Trace = {}
        """The call of each task, part and added task."""
        self.whole: dict[Identity, str] = {}
        """For each part and added task, the list or the planner that it comes from."""
        self._values: dict[str, Any] = {}
        self._parts: dict[str, dict[str, Any]] = {}
        self._nodes = {node.id: node for node in plan}
        for node in plan:
            self._go_through(node)

    def _go_through(self, node: Node) -> None:
        if node.kind == "mapped":
            self._map(node)
            return
        prompt = f"{node.id} {node.words}{self._read(node, None)}"
        before = self.trace.get((node.over or "", None)) if node.kind == "talk" else None
        conversation = () if before is None or before.answer is None else (*before.conversation, before)
        call = self._call((node.id, None), node, prompt, conversation, as_list=node.kind == "list")
        self._values[node.id] = "" if call.answer is None else call.answer
        if node.kind == "planner" and call.answer is not None:
            for task in added(node.id, call.answer):
                identity = (task["id"], None)
                self.whole[identity] = node.id
                self.trace[identity] = Call(task["prompt"], (), model((), task["prompt"]), reusable=True)
            self._values[node.id] = json.dumps(added(node.id, call.answer))

    def _map(self, node: Node) -> None:
        assert node.over is not None
        values: dict[str, Any] = {}
        found = self._values[node.over]
        for element in found if isinstance(found, list) else []:
            identity = (node.id, element)
            self.whole[identity] = node.over
            call = self._call(identity, node, f"{node.id} {node.words} {element}{self._read(node, element)}", ())
            values[element] = "" if call.answer is None else call.answer
        self._parts[node.id] = values
        self._values[node.id] = list(values.values())

    def _call(
        self, identity: Identity, node: Node, prompt: str, conversation: tuple[Call, ...], *, as_list: bool = False
    ) -> Call:
        answer: Any = None
        if "fail" not in prompt:
            history = [text for one in conversation for text in (one.prompt, _text(one.answer))]
            answer = model(history, prompt)
            answer = elements(answer) if as_list else answer
        is_kept = all(one.reusable for one in conversation)
        reusable = not (node.agent or node.once or node.kind == "planner") and is_kept
        self.trace[identity] = call = Call(prompt, conversation, answer, reusable)
        return call

    def _read(self, node: Node, element: str | None) -> str:
        said = ""
        for name in node.reads:
            partner = self._nodes[name]
            value = self._values[name]
            if element is not None and partner.kind == "mapped" and partner.over == node.over:
                value = self._parts[name][element]
            said += f" {value if isinstance(value, str) else json.dumps(value)}"
        return said


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer)


def must_call(before: Trace, after: Trace, fresh: Sequence[str] = ()) -> set[Identity]:
    """Return the tasks of the run `after` that have to be called, if it takes answers over from the run `before`."""
    return {identity for identity, call in after.items() if not _may_take(before.get(identity), call, identity, fresh)}


def _may_take(before: Call | None, call: Call, identity: Identity, fresh: Sequence[str]) -> bool:
    if before is None or before.answer is None or identity[0] in fresh:
        return False
    same = (before.prompt, before.conversation) == (call.prompt, call.conversation)
    return same and before.reusable and call.reusable


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
    kinds = ["text", "text", "list", "planner", *(["mapped"] * 3 if lists else []), *(["talk"] if talks else [])]
    kind = rng.choice(kinds)
    node = Node(f"{kind[0]}{number}", kind, words, reads, soft=soft)
    if kind == "mapped":
        return replace(node, over=rng.choice(lists), agent=rng.random() < 0.3)
    if kind == "talk":
        before = rng.choice(talks)
        return replace(node, id=f"t{number}", over=before.id, agent=before.agent)
    if kind == "planner":
        return replace(node, words=words.replace(" fail", ""), soft=False)
    return replace(node, agent=rng.random() < 0.15, once=rng.random() < 0.1)


def edited(rng: random.Random, plan: Plan) -> Plan:
    """Return the plan after one to three random edits."""
    for _ in range(rng.randint(1, 3)):
        plan = rng.choice((_reworded, _renumbered, _toggled, _read_more, _longer, _shorter))(rng, plan)
    return plan


def _changed(plan: Plan, place: int, **changes: Any) -> Plan:
    return (*plan[:place], replace(plan[place], **changes), *plan[place + 1 :])


def _reworded(rng: random.Random, plan: Plan) -> Plan:
    place = rng.randrange(len(plan))
    words = re.sub(r"word\d+", f"word{rng.randint(4, 99)}", plan[place].words)
    return _changed(plan, place, words=words)


def _renumbered(rng: random.Random, plan: Plan) -> Plan:
    place = rng.randrange(len(plan))
    return _changed(plan, place, words=re.sub(r"#\d+", f"#{rng.randint(2, 99)}", plan[place].words))


def _toggled(rng: random.Random, plan: Plan) -> Plan:
    soft = [place for place, node in enumerate(plan) if node.soft]
    if not soft:
        return plan
    place = rng.choice(soft)
    words = plan[place].words
    return _changed(plan, place, words=words.removesuffix(" fail") if words.endswith(" fail") else f"{words} fail")


def _read_more(rng: random.Random, plan: Plan) -> Plan:
    place = rng.randrange(len(plan))
    others = [node.id for node in plan[:place] if node.id not in plan[place].reads]
    return _changed(plan, place, reads=(*plan[place].reads, rng.choice(others))) if others else plan


def _longer(rng: random.Random, plan: Plan) -> Plan:
    return (*plan, _random_node(rng, plan))


def _shorter(_rng: random.Random, plan: Plan) -> Plan:
    used = {name for node in plan for name in (*node.reads, node.over)}
    left = [node for node in plan[:-1] if node.id in used or node is plan[0]]
    return (*left, plan[-1]) if len(left) >= 2 else plan


def downstream(plan: Plan, oracle: Oracle, roots: set[Identity]) -> set[Identity]:
    """Return `roots` and every task that reads, continues, or comes from one of them, directly or not."""
    nodes = {node.id: node for node in plan}
    cone = set(roots)
    grown = True
    while grown:
        more = {one for one in oracle.trace if one not in cone and not cone.isdisjoint(_needs(nodes, oracle, one))}
        grown = bool(more)
        cone |= more
    return cone


def _needs(nodes: Mapping[str, Node], oracle: Oracle, identity: Identity) -> set[Identity]:
    node, element = nodes.get(identity[0]), identity[1]
    if node is None:  # added by a planner
        return {(oracle.whole[identity], None)}
    needs = set() if node.over is None else {(node.over, None)}
    for name in node.reads:
        if element is not None and nodes[name].kind == "mapped" and nodes[name].over == node.over:
            needs.add((name, element))
        else:
            needs |= {one for one in oracle.trace if one[0] == name}
            needs |= {(nodes[name].over or "", None)} if nodes[name].kind == "mapped" else set()
    return needs


def foreseen(plan: Plan, before: Trace) -> dict[str, Identity]:
    """Return the identity of each task of a run of `plan` by the id, if each list gives the elements that it gave in
    the run `before`.
    """
    found: dict[str, Identity] = {}
    for node in plan:
        found[node.id] = (node.id, None)
        if node.kind == "mapped":
            there = before.get((node.over or "", None))
            for number, element in enumerate((there and there.answer) or (), 1):
                found[f"{node.id}.{number}"] = (node.id, element)
        found |= {f"{node.id}x{number}": (f"{node.id}x{number}", None) for number in (1, 2)}
    return found
