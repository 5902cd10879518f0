"""A model that answers by rule, and an oracle of the calls that a run of an edited plan has to make.

The oracle reads a plan in its own form (`Node`), renders prompts and decides conditions by itself, and shares no code
with plait. A task is called unless an earlier run completed the task of the same id, or the part for the same element,
by the same prompt, with the same settings, in the same conversation; or unless the task has `cache` and any run
completed a task by the same.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from plait import OpenQuestion
from plait.backends import Reply
from plait.backends.backend_protocol import ConversationRequest
from plait.errors import BackendError, ErrorKind
from tests.support.edited_plans import ELEMENTS, Node, Plan

Identity = tuple[str, str | None]
"""The id of a task, or the id of the whole and the element."""


def model(history: Sequence[str], prompt: str, options: str = "", epoch: int = 0) -> str:
    """Return the text with which every backend answers: the same for the same visible words."""
    seen = re.sub(r"#\d+", "", "\n".join([*history, prompt, options]))
    rolled = f" {epoch}" if "dice" in prompt else ""
    return "a" + hashlib.sha256(f"{seen}{rolled}".encode()).hexdigest()[:8]


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
        self.epoch = 0

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[_Talk]:
        options = f"{request.options.model} {request.options.system}"
        wants_list = request.output_schema is not None
        yield _Talk(self, [message.content for message in request.history], wants_list, options)


class ReusableModel(Model):
    """The same, with settings of a task, and answers that a later run may take over."""

    adjustable = ("model", "system", "temperature")

    def answer_key(self) -> str:
        return "model"


@dataclass
class _Talk:
    model: Model
    history: list[str]
    wants_list: bool
    options: str
    session_id: str | None = field(default=None)

    async def send(self, prompt: str) -> Reply:
        self.model.made.append(prompt)
        if "fail" in prompt:
            raise BackendError(ErrorKind.REFUSED, "no")
        answer = model(self.history, prompt, self.options, self.model.epoch)
        if self.wants_list:
            return Reply(json.dumps(elements(answer)), [*elements(answer)])
        planner = re.match(r"(q\d+) ", prompt)
        if planner is not None:
            return Reply(json.dumps(added(planner[1], answer)))
        return Reply(answer)


class Person:
    """Answers each question by `model`, and records the questions."""

    def __init__(self) -> None:
        self.made: list[str] = []

    async def __call__(self, question: OpenQuestion) -> str:
        self.made.append(question.text)
        return model((), question.text)


@dataclass(frozen=True)
class Call:
    """A call, or an answer taken over in its place."""

    place: tuple[Any, ...]
    """The part of the plan in the key of the answer: the identity, the condition and the backend."""
    settings: tuple[Any, ...]
    prompt: str
    conversation: tuple[Call, ...]
    """The calls that the conversation holds already, the oldest first."""
    answer: Any
    """The text, or the list; None for a failure."""
    reusable: bool

    @property
    def content(self) -> tuple[Any, ...]:
        """Everything that determines the answer, without the plan."""
        return (self.settings, self.prompt, tuple((one.content, json.dumps(one.answer)) for one in self.conversation))


Trace = dict[Identity, Call]


@dataclass(frozen=True)
class Earlier:
    """The answers that a run may take over."""

    trace: Trace = field(default_factory=dict[Identity, Call])
    """The calls of the earlier run."""
    cache: Mapping[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any])
    """The newest answer for each content."""
    fresh: Collection[str | Identity] = ()
    """Tasks, wholes and single parts that run in any case."""
    keeps: bool = False
    """Whether answers of persons are taken over."""
    kept: Collection[Identity] = ()
    """Tasks that a fork keeps in any case."""


class Oracle:
    """Goes through a plan without plait."""

    def __init__(self, plan: Plan, earlier: Earlier, epoch: int) -> None:
        self.trace: Trace = {}
        """The call of each task, part and added task."""
        self.called: set[Identity] = set()
        """The calls that are made."""
        self.skipped: set[Identity] = set()
        """The tasks and parts with a false condition."""
        self.whole: dict[Identity, str] = {}
        """For each part and added task, the list or the planner that it comes from."""
        self.values: dict[str, Any] = {}
        """The value of each task of the plan for prompts."""
        self.nodes = {node.id: node for node in plan}
        self._parts: dict[str, dict[str, Any]] = {}
        self._earlier = earlier
        self._epoch = epoch
        for node in plan:
            self._go_through(node)

    def answers(self) -> dict[tuple[Any, ...], Any]:
        """Return the answers that the cache may find in this run, by content."""
        calls = [self.trace[one] for one in self.called]
        return {call.content: call.answer for call in calls if call.reusable and call.answer and not _asks(call)}

    def _go_through(self, node: Node) -> None:
        if node.kind == "mapped":
            self._map(node)
            return
        prompt = "dice" if node.kind == "dice" else f"{node.id} {node.words}{self._read(node, None)}"
        before = self.trace.get((node.over or "", None)) if node.kind == "talk" else None
        conversation = () if before is None or before.answer is None else (*before.conversation, before)
        self.values[node.id] = ""
        if node.gate is not None and node.gate[1] not in self.values[node.gate[0]]:
            self.skipped.add((node.id, None))
            return
        call = self._call((node.id, None), node, prompt, conversation)
        self.values[node.id] = "" if call.answer is None else call.answer
        if node.kind == "planner" and call.answer is not None:
            for task in added(node.id, call.answer):
                identity = (task["id"], None)
                self.whole[identity] = node.id
                self._call(identity, Node(task["id"], "text", ""), task["prompt"], ())
            self.values[node.id] = json.dumps(added(node.id, call.answer))

    def _map(self, node: Node) -> None:
        assert node.over is not None
        values: dict[str, Any] = {}
        listed: list[str] = self.values[node.over] or []
        for element in listed:
            identity = (node.id, element)
            self.whole[identity] = node.over
            if node.gate is not None and node.gate[1] == element:
                self.skipped.add(identity)
                values[element] = ""
                continue
            item = "" if node.quiet else f" {element}"
            call = self._call(identity, node, f"{node.id} {node.words}{item}{self._read(node, element)}", ())
            values[element] = "" if call.answer is None else call.answer
        self._parts[node.id] = values
        self.values[node.id] = list(values.values())

    def _call(self, identity: Identity, node: Node, words: str, conversation: tuple[Call, ...]) -> Call:
        file = "" if node.file is None else f'<file name="notes.txt">\ntext {node.file}\n</file>\n\n'
        settings = (node.kind == "list", node.model, node.system, node.temperature, node.file)
        place = (identity, node.when, "person" if node.kind == "person" else node.agent)
        possible = not (node.agent or node.once or node.kind == "planner") and all(one.reusable for one in conversation)
        call = Call(place, settings, f"{file}{words}", conversation, None, possible)
        answer = self._taken(identity, node, call)
        if answer is None:
            self.called.add(identity)
            answer = self._answer(node, call)
        self.trace[identity] = call = Call(place, settings, call.prompt, conversation, answer, possible)
        return call

    def _taken(self, identity: Identity, node: Node, call: Call) -> Any:
        earlier, before = self._earlier, self._earlier.trace.get(identity)
        if identity in earlier.kept:
            return None if before is None else before.answer
        if identity in earlier.fresh or identity[0] in earlier.fresh or not call.reusable:
            return None
        may_be_taken = before is not None and before.reusable and (earlier.keeps or not _asks(call))
        if before is not None and may_be_taken and before.answer is not None and _is_same(before, call):
            return before.answer
        return earlier.cache.get(call.content) if node.cache else None

    def _answer(self, node: Node, call: Call) -> Any:
        if "fail" in call.prompt:
            return None
        if node.kind == "person":
            return model((), call.prompt)
        history = [text for one in call.conversation for text in (one.prompt, _text(one.answer))]
        answer = model(history, call.prompt, f"{node.model} {node.system}", self._epoch)
        return elements(answer) if node.kind == "list" else answer

    def _read(self, node: Node, element: str | None) -> str:
        said = ""
        for name in node.reads:
            partner = self.nodes[name]
            value = self.values[name]
            if element is not None and partner.kind == "mapped" and partner.over == node.over:
                value = self._parts[name][element]
            said += f" {value if isinstance(value, str) else json.dumps(value)}"
        return said


def _is_same(before: Call, call: Call) -> bool:
    return (before.place, before.settings, before.prompt, before.conversation) == (
        call.place,
        call.settings,
        call.prompt,
        call.conversation,
    )


def _asks(call: Call) -> bool:
    return call.place[-1] == "person"


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer)


def downstream(oracle: Oracle, roots: Collection[Identity]) -> set[Identity]:
    """Return `roots` and every task that reads, continues, or comes from one of them, directly or not."""
    cone = set(roots)
    everything = {*oracle.trace, *oracle.skipped}
    grown = True
    while grown:
        more = {one for one in everything if one not in cone and not cone.isdisjoint(_needs(oracle, one, everything))}
        grown = bool(more)
        cone |= more
    return cone


def _needs(oracle: Oracle, identity: Identity, everything: Collection[Identity]) -> set[Identity]:
    node, element = oracle.nodes.get(identity[0]), identity[1]
    if node is None:  # added by a planner
        return {(oracle.whole[identity], None)}
    needs: set[Identity] = set() if node.over is None else {(node.over, None)}
    for name in node.reads:
        partner = oracle.nodes[name]
        if element is not None and partner.kind == "mapped" and partner.over == node.over:
            needs.add((name, element))
        else:
            needs |= {one for one in everything if one[0] == name}
            needs |= {(partner.over or "", None)} if partner.kind == "mapped" else set()
    return needs


def foreseen(after: Oracle, before: Trace) -> dict[str, Identity]:
    """Return the identity of each task of the run `after` by the id, if each list that is called gives the elements
    that it gave in the run `before`.
    """
    found: dict[str, Identity] = {}
    for node in after.nodes.values():
        found[node.id] = (node.id, None)
        if node.kind == "mapped":
            whole = (node.over or "", None)
            there = before.get(whole) if whole in after.called else after.trace.get(whole)
            for number, element in enumerate((there and there.answer) or (), 1):
                found[f"{node.id}.{number}"] = (node.id, element)
        found |= {f"{node.id}x{number}": (f"{node.id}x{number}", None) for number in (1, 2)}
    return found
