"""`DAG`: a validated graph of tasks. Pure; the only module that imports networkx.

Validation counts dependencies instead of building a graph object and is linear in tasks and edges: 100,000 tasks take
well under a second. Only analysis methods build a networkx graph. Internally, a task is identified by its position in
the list of tasks.

A DAG never changes for its holder. A run works on a copy and grows the copy with `extend`. New tasks follow the old
tasks and may depend on old tasks, never vice versa; the exception is a `for_each` task waiting for its own parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeVar, cast

from plait.errors import DAGError, Problem
from plait.events import NewTask
from plait.json_form import JsonInput, JsonValue, to_json, value
from plait.runner.domain.run_result import html_table
from plait.runner.domain.task_checks import (
    Checks,
    called_id_clashes,
    for_each_targets,
    part_id_clashes,
    unpaired_continues,
)
from plait.runner.domain.votes import with_samples
from plait.task import MAX_TASKS, GrowthLimits, Join, Task, write_specs

if TYPE_CHECKING:
    import networkx as nx

ROWS_AT_ONCE = 1_000
"""The rows that are stored as tasks in one transaction."""


@value
class RowsFile:
    """A file of rows that a run reads as it goes, as it was when the run was made. Each row becomes a few tasks, which
    leave memory once they are done.
    """

    path: str
    """The absolute path."""
    sha256: str
    """The digest of the contents, in hexadecimal."""
    size: int
    """In bytes."""
    mtime_ns: int
    """The time of the last change, in nanoseconds since 1970."""
    width: int = 1
    """The number of tasks of each row."""
    first: int = 0
    """The position of the first row: the plan's tasks that are of no row stand before it."""
    behind: Sequence[str] = ()
    """The tasks before the first row that wait until all rows are done."""


class DAG:
    """Tasks that depend on each other, without cycles.

    - `inputs`: JSON values for every prompt, by name.
    - `growth`: limits on the tasks added during a run; the limits of the runner apply too.
    - `rows_file`: the file of which a run reads further tasks, like those of its first row.
    - `gathered`: only for stored graphs, whose tasks were checked one by one before they were stored: the ids of the
      parts of each expanded `for_each` task.

    Raises DAGError with all mistakes at once, and TypeError for anything that is no Task.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        name: str = "",
        inputs: Mapping[str, JsonInput] | None = None,
        growth: GrowthLimits | None = None,
        rows_file: RowsFile | None = None,
        gathered: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.name = name
        self.growth = growth
        self.rows_file = rows_file
        self.inputs: Mapping[str, JsonInput] = dict(inputs or {})
        self.tasks: list[Task] = []
        self._position: dict[str, int] = {}
        self.dependencies: list[tuple[int, ...]] = []
        """For each task, the positions of its dependencies."""
        self.dependents: list[tuple[int, ...]] = []
        """For each task, the positions of its dependents, in order of declaration."""
        self._order: list[int] = []
        self._inherited: dict[str, str | None] = {}
        """Cache of `backend_of` for tasks that inherit the backend of a continued conversation."""
        self._named: dict[int, dict[int, None]] = {}
        self._named_by: dict[int, dict[int, None]] = {}
        """Indirect upstream tasks named in prompts (`_named`), and the reverse mapping (`_named_by`)."""
        self.races = False
        """Whether the end of a task may cancel others: see `Task.race`."""
        self.joins_any = False
        """Whether a task starts with the first of its dependencies that completes."""
        self._expanded: set[int] = set()
        """Positions of the expanded tasks."""
        tasks = list(tasks)
        for position, task in enumerate(cast("list[object]", tasks)):
            if not isinstance(task, Task):
                raise TypeError(f"tasks[{position}] is {type(task).__name__} {task!r:.40}; give Task(ID, PROMPT)")
        if any(task.repeat != 1 for task in tasks):
            tasks = with_samples(tasks)
        self.behind_rows = () if rows_file is None else tuple(map([task.id for task in tasks].index, rows_file.behind))
        """Positions of the tasks that wait until all rows of `rows_file` are done."""
        problems = [] if tasks else [Problem("there are no tasks; add at least one", None, "tasks")]
        problems += self._append(tasks, gathered)
        if gathered is None:  # stored graphs contain generated parts
            lists = for_each_targets(tasks)
            problems += [
                *part_id_clashes(tasks, lists),
                *called_id_clashes(tasks),
                *unpaired_continues(tasks, lists),
            ]
            if growth is not None and growth.max_tasks < min(len(tasks), MAX_TASKS):  # the default does not apply
                message = f"there are {len(tasks)} tasks, and growth allows {growth.max_tasks} in all (max_tasks)"
                problems.append(Problem(message, None, "growth"))
        if problems:
            raise DAGError(problems)

    def _repr_html_(self) -> str:
        """Return the tasks as a table for a notebook."""
        rows = [
            (task.id, ", ".join(self.tasks[n].id for n in needed), self.backend_of(task) or "", task.prompt)
            for task, needed in zip(self.tasks, self.dependencies, strict=True)
        ]
        return html_table(self.name or "DAG", ("task", "depends on", "backend", "prompt"), rows)

    @property
    def caches(self) -> bool:
        """Whether a task may take the answer of any earlier run over."""
        return any(task.cache is not False for task in self.tasks)

    @cached_property
    def stored(self) -> tuple[str, tuple[NewTask, ...]]:
        """The inputs as JSON, and the tasks, as they are stored. Made once, and only for a graph that does not grow."""
        # The JSON of an item is that of an element of an input, and of the item of each task over this element.
        items = {id(task.item): to_json(task.item) for task in self.tasks if task.item is not None}

        def written(value: JsonInput) -> str:
            if not isinstance(value, list) or not items:
                return to_json(value)
            return f"[{','.join([items.get(id(one)) or to_json(one) for one in value])}]"

        inputs = [f"{to_json(name)}:{written(value)}" for name, value in self.inputs.items()]
        return f"{{{','.join(inputs)}}}", tuple(map(NewTask.of, self.tasks, write_specs(self.tasks, items)))

    def copy(self) -> DAG:
        """Return a copy of the graph, for `extend`."""
        same = DAG.__new__(DAG)
        same.name, same.inputs, same.growth = self.name, self.inputs, self.growth
        same.rows_file, same.behind_rows = self.rows_file, self.behind_rows
        same.tasks, same.dependencies = self.tasks.copy(), self.dependencies.copy()
        same.dependents = self.dependents.copy()
        same._position, same._order, same._inherited = self._position.copy(), self._order, {}
        same._expanded, same.races, same.joins_any = self._expanded.copy(), self.races, self.joins_any
        same._named = {position: further.copy() for position, further in self._named.items()}
        same._named_by = {position: names.copy() for position, names in self._named_by.items()}
        return same

    def with_items_of(self, tasks: Sequence[Task], inputs: Mapping[str, JsonInput]) -> DAG | None:
        """Return a copy with `tasks`, which need no further check, and `inputs`; None if they differ from those of this
        graph by more than their values. A copy takes a tenth of the time of a new graph.
        """
        if self.rows_file is not None or len(tasks) != len(self.tasks) or inputs.keys() != self.inputs.keys():
            return None
        for mine, other in zip(self.tasks, tasks, strict=True):
            if mine is not other and (
                mine.item is None or other.item is None or replace(mine, item=other.item) != other
            ):
                return None
        same = self.copy()
        same.tasks, same.inputs = [*tasks], inputs
        return same

    def extend(self, tasks: Sequence[Task]) -> None:
        """Append `tasks`. Raises DAGError with all mistakes and then leaves the graph unchanged; the positions in the
        error count from the first new task.
        """
        start = len(self.tasks)
        try:
            problems = self._append(tasks)
            if problems:
                raise DAGError(problems)
        except BaseException:
            self.cut(start)
            raise

    def join(self, position: int, parts: Sequence[int]) -> None:
        """Make the expanded task at `position` wait for its `parts`. No part may depend on the task."""
        self.dependencies[position] += tuple(parts)
        for part in parts:
            self.dependents[part] += (position,)
        self._expanded.add(position)
        self._order = []

    def is_expanded(self, position: int) -> bool:
        """Return whether the task waits for the parts that it has become, and gathers them."""
        return position in self._expanded

    def join_of(self, position: int) -> Join:
        """Return for what the task at `position` waits: a call that has added its tasks waits for the end of all."""
        task = self.tasks[position]
        return "done" if task.calls and position in self._expanded else task.join

    def note_named(self, earlier: int, position: int) -> None:
        """Record that the prompt at `position` names the indirect upstream task at `earlier`."""
        self._named.setdefault(position, {})[earlier] = None
        self._named_by.setdefault(earlier, {})[position] = None

    def needed(self, position: int) -> Sequence[int]:
        """Return the positions of the tasks required by the task at `position`: dependencies and prompt names further
        upstream.

        A named task further upstream is always done before, but may have to run again, after damage or a retried
        failure.
        """
        further = self._named.get(position)
        return self.dependencies[position] if further is None else (*self.dependencies[position], *further)

    def needed_by(self, position: int) -> Sequence[int]:
        """Return the positions of the tasks that require the task at `position`."""
        further = self._named_by.get(position)
        return self.dependents[position] if further is None else (*self.dependents[position], *further)

    def pairs_up(self, position: int, other: int) -> bool:
        """Return whether each part of the task at `position` waits for the corresponding part of the task at `other`.

        Both tasks must have the same `for_each`, or the one goes over the parts of the other. True only once `other` is
        expanded, because only then can its parts be named; the task at `position` then does not wait for `other`
        itself.
        """
        over, theirs = self.tasks[position].for_each, self.tasks[other].for_each
        return (
            other in self._expanded
            and over is not None
            and theirs is not None
            and over in {theirs, self.tasks[other].id}
        )

    def _append(self, tasks: Sequence[Task], gathered: Mapping[str, Sequence[str]] | None = None) -> list[Problem]:
        start = len(self.tasks)
        self.tasks += tasks
        self.joins_any = self.joins_any or any(task.join == "any" for task in tasks)
        self.races = self.joins_any and (self.races or any(task.race for task in tasks))
        self._order = []
        checks = Checks(
            start,
            tasks=self.tasks,
            inputs=self.inputs,
            positions=self._position,
            dependencies=self.dependencies,
            dependents=self.dependents,
        )
        problems = checks.ids() + checks.link(checked=gathered is not None)
        self.dependents += [()] * len(tasks)
        added: dict[int, list[int]] = {}
        for position in range(start, len(self.tasks)):
            for earlier in self.dependencies[position]:
                added.setdefault(earlier, []).append(position)
        for earlier, positions in added.items():
            self.dependents[earlier] += tuple(positions)
        for name, parts in (gathered or {}).items():
            self.join(self._position[name], [self._position[part] for part in parts])
        order = _topological(self.dependencies, self.dependents, start)
        has_cycles = len(order) < len(tasks)
        if has_cycles:
            problems += self._cycle_problems(start, order)
        problems += checks.prompts(has_cycles)
        for earlier, position in checks.named:
            self.note_named(earlier, position)
        if not start:
            self._order = order
            problems += checks.inputs() if gathered is None else ()
        return problems

    def cut(self, start: int) -> None:
        """Remove the tasks from position `start` on, with all derived data. No earlier `for_each` task may wait for a
        removed task.
        """
        for earlier in {earlier for needed in self.dependencies[start:] for earlier in needed}:
            self.dependents[earlier] = tuple(after for after in self.dependents[earlier] if after < start)
        for position in [named for named in self._named if named >= start]:
            for earlier in self._named.pop(position):
                del self._named_by[earlier][position]
        while len(self._position) > start:
            self._inherited.pop(self._position.popitem()[0], None)
        del self.tasks[start:], self.dependencies[start:], self.dependents[start:]

    def free(self, positions: Sequence[int]) -> None:
        """Forget the tasks at `positions`, which have ended and on which no other task depends. Their places remain."""
        gone = frozenset(positions)
        for earlier in {earlier for position in positions for earlier in self.dependencies[position]} - gone:
            self.dependents[earlier] = tuple(after for after in self.dependents[earlier] if after not in gone)
        for position in positions:
            del self._position[self.tasks[position].id]
            self._inherited.pop(self.tasks[position].id, None)
            self.tasks[position] = FREED
            self.dependencies[position] = self.dependents[position] = ()
            for earlier in self._named.pop(position, ()):
                del self._named_by[earlier][position]
                if not self._named_by[earlier]:
                    del self._named_by[earlier]

    @property
    def order(self) -> list[int]:
        """All positions in topological order."""
        if not self._order:
            self._order = _topological(self.dependencies, self.dependents, 0)
        return self._order

    @property
    def finals(self) -> list[Task]:
        """The tasks without dependents, except tasks that add tasks: the added tasks are the result. None of them is of
        a row that is read during the run.
        """
        pairs = islice(zip(self.tasks, self.dependents, strict=True), self.rows_file.first if self.rows_file else None)
        return [task for task, after in pairs if not after and not task.adds_tasks]

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._position

    def __getitem__(self, task_id: str) -> Task:
        return self.tasks[self._position[task_id]]

    def position(self, task_id: str) -> int:
        """Return the index of `task_id` in `tasks`. Raises KeyError."""
        return self._position[task_id]

    def backend_of(self, task: Task) -> str | None:
        """Return the name of the task's backend: its own, or the backend of the conversation it continues. None if
        unnamed.
        """
        if task.backend is not None or task.continues is None:
            return task.backend
        asking: list[str] = []
        while task.backend is None and task.continues is not None and task.id not in self._inherited:
            asking.append(task.id)
            task = self[task.continues]
        name = self._inherited.get(task.id, task.backend)
        self._inherited.update(dict.fromkeys(asking, name))
        return name

    def priorities(self, start: int = 0, earlier: Sequence[float] = ()) -> list[float]:
        """Return, for each task from position `start` on, the weight of the longest path from the task to the end of
        the graph.

        `earlier` holds the priorities of the tasks before `start`; only paths through an expanded `for_each` task need
        the values.
        """
        longest = [0.0] * (len(self.tasks) - start)
        order = self.order if not start else _topological(self.dependencies, self.dependents, start)
        for position in reversed(order):
            after = 0.0
            if dependents := self.dependents[position]:
                after = max(longest[each - start] if each >= start else earlier[each] for each in dependents)
            longest[position - start] = self.tasks[position].weight + after
        return longest

    def graph(self) -> nx.DiGraph[str]:
        """Return a networkx graph for analysis: nodes are task ids with the attribute `task`, edges point to
        dependents.

        Costs about 16 microseconds and 1 KiB per task. The runner never calls this method.
        """
        import networkx as nx  # noqa: PLC0415 - the import takes 0.2 s

        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from((task.id, {"task": task}) for task in self.tasks)
        graph.add_edges_from((name, task.id) for task in self.tasks for name in task.upstream)
        return graph

    def critical_path(self) -> list[str]:
        """Return the ids along the path of the greatest weight, first to last; empty for an empty graph."""
        longest = self.priorities()
        path: list[str] = []
        candidates: Sequence[int] = range(len(self.tasks))
        while candidates:
            best = max(candidates, key=lambda position: (longest[position], -position))
            path.append(self.tasks[best].id)
            candidates = self.dependents[best]
        return path

    def _cycle_problems(self, start: int, order: Sequence[int]) -> list[Problem]:
        """Return one problem for each strongly connected component with a cycle."""
        problems: list[Problem] = []
        for cycle in _cycles(self.dependents, start, order):
            names = [self.tasks[position].id for position in cycle]
            spelt = " -> ".join([*names, names[0]])
            message = f"these tasks wait for each other: {spelt}; remove one of these dependencies"
            problems.append(Problem(message, names[0], "depends_on", None, cycle[0] - start))
        return problems


def as_dag(tasks: DAG | Iterable[Task]) -> DAG:
    """Return the DAG, or the DAG of a list of tasks. Raises DAGError."""
    return tasks if isinstance(tasks, DAG) else DAG(tasks)


def sort_names(after: Mapping[str, Iterable[str]]) -> tuple[list[str], list[list[str]]]:
    """Return names in topological order, without those of and behind a cycle, and one cycle of each group of names in
    which every name follows every other. The first name of a cycle is also the last.

    `after` maps a name to the names that follow. Order and cycles are those of a DAG, for graphs that are not tasks.
    """
    names = list(dict.fromkeys([*after, *(name for names in after.values() for name in names)]))
    position = {name: index for index, name in enumerate(names)}
    dependents = [list(dict.fromkeys(position[other] for other in after.get(name, ()))) for name in names]
    dependencies: list[list[int]] = [[] for _ in names]
    for index, following in enumerate(dependents):
        for other in following:
            dependencies[other].append(index)
    order = _topological(dependencies, dependents, 0)
    cycles = [] if len(order) == len(names) else _cycles(dependents, 0, order)
    return [names[other] for other in order], [[names[other] for other in (*cycle, cycle[0])] for cycle in cycles]


def _cycles(dependents: Sequence[Sequence[int]], start: int, order: Sequence[int]) -> list[list[int]]:
    """Return one cycle of each strongly connected component among the positions from `start` on that are missing from
    the topological `order`. A cycle begins with its lowest position.
    """
    import networkx as nx  # noqa: PLC0415 - needed only for an error

    remaining = set(range(start, len(dependents))) - set(order)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_edges_from((start, end) for start in remaining for end in dependents[start] if end in remaining)
    cycles: list[list[int]] = []
    for part in sorted(map(sorted, nx.strongly_connected_components(graph))):
        if len(part) == 1 and not graph.has_edge(part[0], part[0]):
            continue  # downstream of a cycle, not part of a cycle
        edges = cast("list[tuple[int, int]]", nx.find_cycle(graph.subgraph(part)))  # pyright: ignore[reportUnknownMemberType]
        cycle = [start for start, _ in edges]
        first = cycle.index(min(cycle))  # for a deterministic message
        cycles.append(cycle[first:] + cycle[:first])
    return cycles


def _topological(dependencies: Sequence[Sequence[int]], dependents: Sequence[Sequence[int]], start: int) -> list[int]:
    """Return the positions from `start` on in topological order. The list is incomplete if and only if there is a
    cycle.
    """
    missing = (
        [sum(earlier >= start for earlier in needed) for needed in dependencies[start:]]
        if start
        else [len(needed) for needed in dependencies]
    )
    order = [position for position, count in enumerate(missing, start) if not count]
    for position in order:
        for dependent in dependents[position]:
            if dependent < start:
                continue
            missing[dependent - start] -= 1
            if not missing[dependent - start]:
                order.append(dependent)
    return order


FREED: Final = Task("", "freed")
"""In the place of a task that has left memory: see `DAG.free`."""
_T = TypeVar("_T")


def tasks_of_row(first: Sequence[Task], number: int, item: JsonValue) -> list[Task]:
    """Return the tasks for `item`, the row with the `number`, like those of the `first` row."""
    ids = {task.id: f"{task.id.rpartition('.')[0]}.{number}" for task in first}
    return [
        replace(
            task,
            id=ids[task.id],
            item=item,
            depends_on=tuple(ids.get(name, name) for name in task.depends_on),
            continues=None if task.continues is None else ids[task.continues],
            aliases={
                alias: ids.get(names, names) if isinstance(names, str) else [ids.get(name, name) for name in names]
                for alias, names in task.aliases.items()
            },
        )
        for task in first
    ]


def group_of(task_id: str, item: JsonInput) -> str | None:
    """Return the name of the group of the task with this id and item; None for a task that is no part."""
    name, _, number = task_id.rpartition(".")
    return name if name and item is not None and number.isdecimal() else None


def part_number(task_id: str) -> int:
    """Return the number of a part, so that part 10 comes after part 2; 0 for a task that is no part."""
    name, _, number = task_id.rpartition(".")
    return int(number) if name and number.isdecimal() else 0


def groups_of(tasks: Iterable[tuple[str, JsonInput, _T]], fewest: int) -> Mapping[str, list[_T]]:
    """Return the groups with at least `fewest` parts by name, from the id, the item and a value of each task. The
    values are in the order of the numbers of their parts.
    """
    groups: dict[str, list[tuple[int, _T]]] = {}
    for task_id, item, one in tasks:
        name = group_of(task_id, item)
        if name is not None:
            groups.setdefault(name, []).append((part_number(task_id), one))
    large = {name: parts for name, parts in groups.items() if len(parts) >= fewest}
    return {name: [one for _, one in sorted(parts, key=itemgetter(0))] for name, parts in large.items()}
