"""`DAG`: a checked graph of tasks. Pure, and the only importer of networkx.

The check counts instead of building a graph object: it is linear in tasks and edges, so 100,000 tasks take well under a
second. A networkx graph is made only when somebody asks for analysis. Inside, a task is its position in the list.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from runner.errors import DAGError, Problem, PromptError
from runner.prompt import RESERVED_NAMES, names_used
from runner.task import JsonValue, Task

if TYPE_CHECKING:
    import networkx as nx

_MOST_HINTS = 20
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class DAG:
    """Tasks whose dependencies all exist and form no cycle, in the order in which they were given.

    `inputs` are values that every prompt may use by name. `name` is shown, nothing more. Raises DAGError listing every
    mistake. Immutable once made.
    """

    def __init__(self, tasks: Iterable[Task], *, name: str = "", inputs: Mapping[str, JsonValue] | None = None) -> None:
        self.name = name
        self.inputs: Mapping[str, JsonValue] = dict(inputs or {})
        self.tasks: tuple[Task, ...] = tuple(tasks)
        self._position: dict[str, int] = {}
        self._downstream: dict[int, set[int]] = {}
        self._hints = _MOST_HINTS
        problems = _id_problems(self.tasks, self._position)
        self.dependencies: list[tuple[int, ...]] = []
        """For each task, the positions of the tasks that it waits for."""
        problems += self._link()
        self.dependents: list[list[int]] = _reverse(self.dependencies)
        """For each task, the positions of the tasks that wait for it, in order of declaration."""
        self.order = _topological(self.dependencies, self.dependents)
        """All positions, each behind those that it waits for."""
        if len(self.order) < len(self.tasks):
            problems.append(self._cycle_problem())
        else:
            problems += self._prompt_problems()
        if problems:
            raise DAGError(problems)

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._position

    def __getitem__(self, task_id: str) -> Task:
        return self.tasks[self._position[task_id]]

    def position(self, task_id: str) -> int:
        """Where `task_id` stands in `tasks`. Raises KeyError."""
        return self._position[task_id]

    def backend_of(self, task: Task) -> str | None:
        """The backend's name that the task runs on: its own, or that of the conversation it continues."""
        while task.backend is None and task.continues is not None:
            task = self[task.continues]
        return task.backend

    def priorities(self) -> list[float]:
        """For each task, the weight of the longest path from its start to the end of the graph."""
        longest = [0.0] * len(self.tasks)
        for position in reversed(self.order):
            after = max((longest[dependent] for dependent in self.dependents[position]), default=0.0)
            longest[position] = self.tasks[position].weight + after
        return longest

    def is_upstream(self, task_id: str, of: str) -> bool:
        """Whether `of` waits, directly or through others, for `task_id`."""
        target, position = self._position[task_id], self._position[of]
        if target in self.dependencies[position]:
            return True
        if target not in self._downstream:
            self._downstream[target] = self._reachable(target)
        return position in self._downstream[target]

    def _reachable(self, start: int) -> set[int]:
        seen: set[int] = set()
        waiting = [start]
        while waiting:
            for dependent in self.dependents[waiting.pop()]:
                if dependent not in seen:
                    seen.add(dependent)
                    waiting.append(dependent)
        return seen

    def graph(self) -> nx.DiGraph[str]:
        """A networkx graph for analysis: task ids with their `Task` as `task`, edges from a task to its dependents.

        Costs about 16 microseconds and 1 KiB a task; the runner never calls it.
        """
        import networkx as nx  # noqa: PLC0415 - 0.2 s that only analysis should pay

        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from((task.id, {"task": task}) for task in self.tasks)
        graph.add_edges_from((name, task.id) for task in self.tasks for name in task.upstream)
        return graph

    def critical_path(self) -> list[str]:
        """The ids along the path of the greatest weight, first to last; empty for an empty graph."""
        longest = self.priorities()
        path: list[str] = []
        candidates: Sequence[int] = range(len(self.tasks))
        while candidates:
            best = max(candidates, key=lambda position: (longest[position], -position))
            path.append(self.tasks[best].id)
            candidates = self.dependents[best]
        return path

    def _link(self) -> list[Problem]:
        """Resolve names to positions; collect what is wrong with `depends_on`, `continues` and numbers."""
        problems: list[Problem] = []
        for place, task in enumerate(self.tasks):
            found: dict[int, None] = {}
            if isinstance(task.depends_on, str):
                problems.append(Problem("depends_on must be a list of ids, not one text", task.id, "depends_on"))
                task = Task(task.id)  # noqa: PLW2901 - its letters are no dependencies
            for index, name in enumerate(task.upstream):
                position = self._position.get(name)
                if position is None:
                    problems.append(self._unknown(task, place, index, name))
                else:
                    found[position] = None
            problems += self._field_problems(task, place)
            self.dependencies.append(tuple(found))
        return problems

    def _hint(self, name: str, known: Iterable[str]) -> str:
        """The nearest right name, for the first mistakes: finding it takes longer than all the rest of the check."""
        self._hints -= 1
        return nearest(name, known) if self._hints >= 0 else ""

    def _unknown(self, task: Task, place: int, index: int, name: str) -> Problem:
        message = f"unknown task {name!r}{self._hint(name, self._position)}"
        if index < len(task.depends_on):
            return Problem(message, task.id, "depends_on", index, place)
        return Problem(message, task.id, "continues", None, place)

    def _field_problems(self, task: Task, place: int) -> Iterator[Problem]:
        if task.timeout is not None and not 0 < task.timeout < float("inf"):
            yield Problem(f"timeout must be more than 0 seconds, not {task.timeout}", task.id, "timeout", None, place)
        for name in ("item", "metadata", "output_schema"):
            if (kept := getattr(task, name)) and (why := _why_no_json(kept)):
                yield Problem(f"{name} has to be JSON, to be stored with the task: {why}", task.id, name, None, place)
        if not _is_text(task.prompt):
            yield Problem("the prompt has to be text, without lone surrogates", task.id, "prompt", None, place)
        if not 0 <= task.weight < float("inf"):
            yield Problem(f"weight must be a number from 0 up, not {task.weight}", task.id, "weight", None, place)
        before = self._position.get(task.continues) if task.continues is not None else None
        if before is None or task.backend is None:
            return
        theirs = self.tasks[before].backend
        # Where the earlier one names none, only the runner knows: see `backend_names`.
        if theirs is not None and theirs != task.backend:
            yield Problem(
                f"continues {task.continues!r}, which runs on backend {theirs!r}, "
                f"but names backend {task.backend!r}; a conversation stays on its backend, so leave `backend` out",
                task.id,
                "backend",
                None,
                place,
            )

    def _cycle_problem(self) -> Problem:
        import networkx as nx  # noqa: PLC0415 - only on the way to an error

        left = set(range(len(self.tasks))) - set(self.order)
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_edges_from((first, second) for first in left for second in self.dependents[first] if second in left)
        edges = cast("list[tuple[int, int]]", nx.find_cycle(graph))  # pyright: ignore[reportUnknownMemberType]
        cycle = [self.tasks[first].id for first, _ in edges]
        # Start at the one declared first, so that the same mistake always reads the same.
        start = min(range(len(cycle)), key=lambda i: self._position[cycle[i]])
        cycle = cycle[start:] + cycle[:start]
        spelt = " -> ".join([*cycle, cycle[0]])
        message = f"these tasks wait for each other: {spelt}; remove one of these dependencies"
        return Problem(message, cycle[0], "depends_on", None, self._position[cycle[0]])

    def _prompt_problems(self) -> Iterator[Problem]:
        if why := _why_no_json(dict(self.inputs)):
            yield Problem(f"inputs have to be JSON, to be stored with the run: {why}", None, "inputs")
        for name in self.inputs:
            if name in RESERVED_NAMES or name in self._position:
                owner = "a reserved template name" if name in RESERVED_NAMES else "the id of a task"
                yield Problem(f"input {name!r} is also {owner}; call it something else", None, "inputs")
        for place, task in enumerate(self.tasks):
            if not _is_text(task.prompt) or "{" not in task.prompt:
                continue
            try:
                used = names_used(task.prompt)
            except PromptError as error:
                yield Problem(str(error), task.id, "prompt", None, place, error.line)
                continue
            for name in sorted(used.names):
                yield from self._name_problem(task, place, name)
            for name in sorted(used.results):
                if name not in task.aliases:
                    yield from self._task_name_problem(task, place, name)
            for name in sorted(used.inputs - self.inputs.keys()):
                message = f"unknown input {name!r}{self._hint(name, self.inputs)}"
                yield Problem(message, task.id, "prompt", None, place)

    def _name_problem(self, task: Task, place: int, name: str) -> Iterator[Problem]:
        if name in task.aliases or name in self.inputs or name in {"inputs", "results"}:
            return
        if name == "item":
            if task.item is None:
                yield Problem("{{ item }} has a value only in a task with for_each", task.id, "prompt", None, place)
            return
        yield from self._task_name_problem(task, place, name)

    def _task_name_problem(self, task: Task, place: int, name: str) -> Iterator[Problem]:
        if name not in self._position:
            known = [*task.upstream, *task.aliases, *self.inputs]
            message = f"the prompt uses {{{{ {name} }}}}, which is neither a task nor an input{self._hint(name, known)}"
            yield Problem(message, task.id, "prompt", None, place)
        elif not self.is_upstream(name, task.id):
            message = f"the prompt uses {{{{ {name} }}}}, but {name!r} is not upstream; add it to depends_on"
            yield Problem(message, task.id, "prompt", None, place)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest right one, or nothing."""
    close = difflib.get_close_matches(name, list(known)[:10_000], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _is_text(text: object) -> bool:
    try:
        return isinstance(text, str) and (text.isascii() or bool(text.encode()))
    except UnicodeEncodeError:
        return False


def _why_no_json(value: object) -> str | None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None


def _id_problems(tasks: Sequence[Task], positions: dict[str, int]) -> list[Problem]:
    problems: list[Problem] = []
    if not tasks:
        problems.append(Problem("there are no tasks; add at least one", None, "tasks"))
    for place, task in enumerate(tasks):
        if not isinstance(task.id, str) or not _ID.fullmatch(task.id):  # pyright: ignore[reportUnnecessaryIsInstance]
            message = (
                f"id {str(task.id)[:80]!r} must be 1 to 64 of letters, digits, '.', '_', '-', not starting with '.'"
            )
            problems.append(Problem(message, task.id, "id", None, place))
        elif task.id in RESERVED_NAMES:
            problems.append(Problem(f"id {task.id!r} is reserved for templates", task.id, "id", None, place))
        if task.id in positions:
            message = f"id {task.id!r} is used twice; task {positions[task.id] + 1} of the list has it too"
            problems.append(Problem(message, task.id, "id", None, place))
        else:
            positions[task.id] = place
    return problems


def _reverse(dependencies: Sequence[tuple[int, ...]]) -> list[list[int]]:
    dependents: list[list[int]] = [[] for _ in dependencies]
    for position, needed in enumerate(dependencies):
        for earlier in needed:
            dependents[earlier].append(position)
    return dependents


def _topological(dependencies: Sequence[tuple[int, ...]], dependents: Sequence[list[int]]) -> list[int]:
    """Positions in an order that respects the dependencies; shorter than the list exactly when there is a cycle."""
    missing = [len(needed) for needed in dependencies]
    order = [position for position, count in enumerate(missing) if not count]
    for position in order:
        for dependent in dependents[position]:
            missing[dependent] -= 1
            if not missing[dependent]:
                order.append(dependent)
    return order
