"""The growth of a run: adding the tasks of a reply, a policy, a `for_each` or a called plan, within the limits of the
run.

The parts of a task `t` with `for_each` are `t.1`, `t.2`, ... in the order of the list. Tasks with the same `for_each`
are partners: a part refers to its partner's part for the same element. A task over another one with `for_each` is a
partner of that, and each of its parts goes over the list of the partner's part: `t.1.1`, `t.1.2`, ...

The tasks of a plan that `t` calls are `t.draft`, `t.review`, ...; those of a loop `t.1.draft`, `t.2.draft`. The names
in their prompts are aliases of these ids, and the inputs of the plan stand in the tasks that use them. What has to be
known when the tasks end is in their ids, so that a later process goes on from what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from plait import events
from plait.backends.backend_protocol import Abilities, Reply
from plait.errors import DAGError, Problem, nearest
from plait.json_form import JsonInput, JsonValue
from plait.runner.domain.dag import group_of
from plait.runner.domain.prompt_values import TaskTexts, named, round_values
from plait.runner.domain.run_result import TaskResult
from plait.runner.domain.task_checks import for_each_targets, part_id_clashes, unpaired_continues
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.run_options import argument_filler, unfit_settings
from plait.runner.prompts.prompt_names import RESERVED_NAMES
from plait.runner.prompts.prompt_template import (
    check_texts,
    condition_names,
    evaluated,
    is_true,
    joined,
    parse_names,
)
from plait.runner.state.budget import new_budget
from plait.safe_text import parse_json
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import PREVIOUS, FailureMode, Task, command_not_allowed, is_allowed

CONDITION = "condition"
"""The kind of error of a task with a condition that is false."""


def from_reply(run: LiveRun, task: Task, reply: Reply) -> list[events.Event]:
    """Add the tasks in the reply of `task`, which is about to complete. Return the events.

    Adds nothing if `task` has added tasks before: an earlier attempt added the tasks, but the result was lost.
    Raises DAGError if the tasks are invalid.
    """
    if run.state.has_added(run.state.dag.position(task.id)):
        return []
    specs: list[object] = list(reply.tasks)
    if task.adds_tasks:
        specs += _specs(reply)
    if not specs:
        return []
    from plait.runner.plan.plan_tasks import AddedTasks  # noqa: PLC0415 - pydantic, for growing runs only

    added = AddedTasks(specs)
    try:
        return [add(run, added.tasks, task.id, [*added.mistakes, *_forbidden_commands(run, added.tasks)])]
    except DAGError as error:
        raise DAGError(added.all_problems(error.problems)) from None


def add(
    run: LiveRun,
    tasks: Sequence[Task],
    added_by: str | None,
    mistakes: Sequence[Problem] = (),
    gathered_by: int | None = None,
) -> events.TasksAdded:
    """Add all `tasks` and return the event. With `gathered_by`, `tasks` are the parts of the task at that position.

    Raises DAGError and adds nothing if any task is invalid. The error lists every problem, beginning with
    `mistakes`, the problems already found.
    """
    if run.state.dag.rows_file is not None:
        raise DAGError([*mistakes, Problem("a run that reads its rows as it goes adds no other tasks", None, "tasks")])
    too_many = _limit_problems(run, tasks, added_by)
    problems = [*mistakes, *too_many, *_cancelled_problems(run, tasks), *_unknown_backends(run, tasks)]
    problems += _parts_problems(run, tasks, added_by)
    problems += _new_files(tasks)
    start, names, added = len(run.state.dag), list[str](), None
    if not too_many:
        if gathered_by is None or run.state.dag.tasks[gathered_by].calls:
            fill = argument_filler(run.options, run.state.dag.inputs, [*run.state.dag, *tasks])
            tasks = [fill(task, task.backend) for task in tasks]
        try:
            added = run.state.add_tasks(tasks, added_by, run.stamp())
            names = _backends_of(run, tasks)
        except DAGError as error:
            problems += error.problems
    if added is None or problems:
        run.state.withdraw_tasks(start)
        raise DAGError(problems)
    if run.budget is None:
        run.budget = new_budget(None, tasks)
    run.task_backends += names
    if gathered_by is not None:
        run.state.expand(gathered_by)
    run.scheduler.extend(run.task_backends[start:], run.state.statuses)
    return added


def add_rows(run: LiveRun, tasks: Sequence[Task]) -> events.TasksAdded:
    """Add the `tasks` of further rows, which are like those of the first row, and return the event."""
    start = len(run.state.dag)
    added = run.state.add_tasks(tasks, None, run.stamp())
    run.task_backends += _backends_of(run, tasks)
    run.scheduler.extend(run.task_backends[start:], run.state.statuses)
    return added


def _limit_problems(run: LiveRun, tasks: Sequence[Task], added_by: str | None) -> list[Problem]:
    if added_by is not None and run.state.dag[added_by].calls:
        return []  # part of the plan
    problems: list[Problem] = []
    limits = run.options.growth.within(run.state.dag.growth)
    total = len(run.state.dag) + len(tasks)
    if total > limits.max_tasks:
        message = f"{len(tasks)} more tasks would make {total}, and max_tasks is {limits.max_tasks}"
        problems.append(Problem(f"{message}; raise max_tasks, or add fewer tasks", None, "tasks"))
    depth = 0 if added_by is None else run.state.depths.get(run.state.dag.position(added_by), 0) + 1
    if depth > limits.max_depth:
        message = f"these tasks would be at depth {depth}, and max_depth is {limits.max_depth}"
        problems.append(Problem(f"{message}; raise max_depth, or add no tasks here", None, "tasks"))
    return problems


def _cancelled_problems(run: LiveRun, tasks: Sequence[Task]) -> Iterator[Problem]:
    """Report dependencies on cancelled tasks: a task that waits for a cancelled task would silently never run."""
    dag, statuses = run.state.dag, run.state.statuses
    for place, task in enumerate(tasks):
        for name in task.upstream:
            if name in dag and statuses[dag.position(name)] is TaskStatus.CANCELLED:
                message = f"depends on {name!r}, which was cancelled; leave it out"
                yield Problem(message, task.id, "depends_on", None, place)


def _parts_problems(run: LiveRun, tasks: Sequence[Task], added_by: str | None) -> Iterator[Problem]:
    """Report ids that collide with generated part ids (`<id>.<n>`), in either direction, and tasks that continue a
    `for_each` task without being paired with the task.
    """
    dag = run.state.dag
    new = for_each_targets(tasks)
    there = {str(task.id).rpartition(".")[0] for task in tasks} - {added_by}
    yield from part_id_clashes(tasks, new | for_each_targets(dag[name] for name in there if name in dag))
    before = {task.continues for task in tasks if task.continues is not None and task.continues in dag}
    lists = new | for_each_targets(dag[name] for name in before)
    yield from unpaired_continues(tasks, lists)
    for taken in part_id_clashes(dag.tasks, new):
        name = str(taken.task_id).rpartition(".")[0]
        yield Problem(f"for_each needs ids for its parts, and the run has a task {taken.task_id!r}", name, "for_each")


def _unknown_backends(run: LiveRun, tasks: Sequence[Task]) -> Iterator[Problem]:
    for place, task in enumerate(tasks):
        if task.backend is not None and task.backend not in run.options.backends:
            yield _unknown_backend(run, task.backend, task, place)


def _unknown_backend(run: LiveRun, name: str, task: Task, place: int) -> Problem:
    names = ", ".join(sorted(run.options.backends))
    message = f"no backend named {name!r}; there are: {names}{nearest(name, run.options.backends)}"
    return Problem(message, task.id, "backend", None, place)


def _forbidden_commands(run: LiveRun, tasks: Sequence[Task]) -> Iterator[Problem]:
    for place, task in enumerate(tasks):
        if task.run and not is_allowed(
            task.run, Abilities.of(run.options.backends.get(task.backend or "")).allows or ()
        ):
            yield Problem(command_not_allowed(task.run, task.backend), task.id, "run", None, place)


def _backends_of(run: LiveRun, tasks: Sequence[Task]) -> list[str]:
    """Return the backend of each of the `tasks`, which stand in the DAG already. Raises DAGError."""
    problems: list[Problem] = []
    dag, start, backends = run.state.dag, len(run.task_backends), run.options.backends
    names = [dag.backend_of(task) or run.options.default for task in tasks]
    for place, (task, name) in enumerate(zip(tasks, names, strict=True)):
        if name in backends:
            for one in (name, *run.options.spares.get(name, ())):
                problems += unfit_settings(task, one, backends[one], place)
        elif task.backend is None:
            problems.append(_unknown_backend(run, name, task, place))
        if task.continues is not None:
            before = dag.position(task.continues)
            theirs = run.task_backends[before] if before < start else names[before - start]
            if name != theirs:
                message = f"continues {task.continues!r}, which runs on backend {theirs!r}; leave its backend out"
                problems.append(Problem(message, task.id, "backend", None, place))
    if problems:
        raise DAGError(problems)
    return names


def expand(run: LiveRun, position: int) -> list[events.Event]:
    """Add the parts of the task with `for_each` at `position`, and return the events. Raises DAGError."""
    dag = run.state.dag
    task = dag.tasks[position]
    over = dag.position(task.for_each or "")
    if dag.tasks[over].for_each is None:
        elements = _elements(run, position)[: run.options.growth.within(dag.growth).pilot]
        lists: Sequence[str | None] = [None] * len(elements)
    else:
        outer = [dag.tasks[part] for part in run.state.parts.get(over, ())]
        elements, lists = [cast("JsonValue", part.item) for part in outer], [part.id for part in outer]
    partners = _partners(run, task, elements)
    numbered = enumerate(zip(elements, lists, strict=True), 1)
    parts = [_part(task, partners, number, item, inner) for number, (item, inner) in numbered]
    new_events: list[events.Event] = []
    if parts:
        new_events.append(add(run, parts, task.id, gathered_by=position))
    else:
        run.state.expand(position)
    run.scheduler.join(position, len(parts))
    return new_events


def _elements(run: LiveRun, position: int) -> Sequence[JsonValue]:
    """Return the list over which the task at `position` is expanded. For a part over a part, whatever is no list counts
    as its one element. Raises DAGError.
    """
    task = run.state.dag.tasks[position]
    result = run.state.results.get(run.state.dag.position(task.for_each or ""))
    return [result.value] if result is not None and _is_one(task, result) else elements_of(task, result)


def _is_one(task: Task, result: TaskResult) -> bool:
    """Return whether the part, if it is one, goes over a result that is no list."""
    if group_of(task.id, task.item) is None or result.status is not TaskStatus.COMPLETED:
        return False
    data = result.data
    return not isinstance(data, list | dict) or (isinstance(data, dict) and list not in map(type, data.values()))


def _partners(run: LiveRun, task: Task, elements: Sequence[JsonValue]) -> dict[str, bool]:
    """Return the tasks with the same `for_each` that `task` depends on or names, each with True if the task has
    parts to pair up with. Raises DAGError if such a task was expanded over another list.
    """
    dag = run.state.dag
    names = sorted(named(task).union(task.upstream))
    mine = [
        name
        for name in names
        if name in dag and dag[name].for_each is not None and task.for_each in {dag[name].for_each, name}
    ]
    return {name: _has_parts_for(run, name, task, elements) for name in mine}


def _has_parts_for(run: LiveRun, name: str, task: Task, elements: Sequence[JsonValue]) -> bool:
    position = run.state.dag.position(name)
    parts = run.state.parts.get(position)
    if parts is None and run.state.statuses[position] is not TaskStatus.COMPLETED:
        return False  # failed or skipped as a whole
    if [run.state.dag.tasks[part].item for part in parts or ()] != list(elements):
        message = (
            f"continues the parts of {name!r}, which were made from another list: the result of {task.for_each!r} "
            f"has changed. Run these tasks in a new run"
        )
        raise DAGError([Problem(message, task.id)])
    return True


def add_round(run: LiveRun, position: int) -> list[events.Event]:
    """Add the tasks of the plan that the task at `position` calls, or those of the next round of a loop. Return the
    event. Raises DAGError, PromptError.
    """
    from plait.runner.plan.plan_tasks import called_tasks  # noqa: PLC0415 - pydantic, for such runs only

    task, number = run.state.dag.tasks[position], rounds(run, position) + 1
    assert task.call is not None
    inputs = _inputs(run, position, number)
    pilot = run.options.growth.within(run.state.dag.growth).pilot
    prefix = _prefix(task, number)
    before = () if number == 1 else _last_of(run, position, number - 1)
    # A function may receive any input as a parameter; another task has those that it names.
    takes = {name for name, backend in run.options.backends.items() if Abilities.of(backend).parameters}
    parts = [
        _called(one, prefix, inputs, before, takes_all=(one.backend or run.options.default) in takes)
        for one in called_tasks(task.call, inputs, pilot)
    ]
    added = add(run, parts, task.id, gathered_by=position)
    run.scheduler.join(position, len(parts))
    return [added]


def rounds(run: LiveRun, position: int) -> int:
    """Return the number of rounds that the task at `position`, which calls a plan, has added."""
    parts = run.state.parts.get(position)
    if not parts:
        return 0
    task = run.state.dag.tasks[position]
    return _round_of(task, run.state.dag.tasks[parts[-1]])


def is_reached(run: LiveRun, position: int) -> bool:
    """Return whether the last round of the task at `position` has reached the loop's condition; True for a call
    that is no loop. A round has not if one of its tasks failed, softly too, or one that the condition names was
    skipped. Raises PromptError.
    """
    task, number = run.state.dag.tasks[position], rounds(run, position)
    assert task.call is not None
    if (until := task.call.until) is None:
        return True
    results, names = run.state.results, _names(run, position, number)
    if any(results[part].error_kind not in {None, CONDITION} for part in _round(run, position, number)):
        return False
    used = condition_names(until)[0]
    for name in used.names | used.results:
        ids = names.get(name, ())
        for one in (ids,) if isinstance(ids, str) else ids:
            if results[run.state.dag.position(one)].status is not TaskStatus.COMPLETED:
                return False
    return is_true(until, _round_values(run, position, number))


def returned(run: LiveRun, position: int) -> JsonValue:
    """Return the result of the plan that the task at `position` calls: of the last round for a loop. Raises
    PromptError.
    """
    task, number = run.state.dag.tasks[position], rounds(run, position)
    assert task.call is not None
    returns = task.call.returns
    if returns is None:
        returns = {name: f'{{{{ results["{name}"] }}}}' for name in _names(run, position, number)}
    return evaluated(returns, _round_values(run, position, number))


def unfinished(run: LiveRun, position: int) -> list[str]:
    """Return the ids of the tasks of the last round that failed hard, and of those that could not start."""
    statuses, tasks = run.state.statuses, run.state.dag.tasks
    parts = _round(run, position, rounds(run, position))
    failed = [
        tasks[part].id
        for part in parts
        if statuses[part] is TaskStatus.FAILED and tasks[part].failure_mode is FailureMode.HARD
    ]
    return failed + [tasks[part].id for part in parts if statuses[part] not in TASK_DONE]


def _round(run: LiveRun, position: int, number: int) -> list[int]:
    task, tasks = run.state.dag.tasks[position], run.state.dag.tasks
    return [part for part in run.state.parts[position] if _round_of(task, tasks[part]) == number]


def _last_of(run: LiveRun, position: int, number: int) -> list[str]:
    """Return the ids of the tasks of a round on which no other task of the round depends."""
    dag, parts = run.state.dag, _round(run, position, number)
    return [dag.tasks[part].id for part in parts if set(dag.dependents[part]).isdisjoint(parts)]


def _names(run: LiveRun, position: int, number: int) -> dict[str, str | list[str]]:
    """Return the results of a round by name: the id of a task, or the ids of the tasks of a `for_each`."""
    task, names = run.state.dag.tasks[position], dict[str, str | list[str]]()
    begin = len(_prefix(task, number))
    for part in _round(run, position, number):
        one = run.state.dag.tasks[part]
        family = group_of(one.id[begin:], one.item)
        if family is None:
            names[one.id[begin:]] = one.id
        else:
            names[family] = [*names.get(family, ()), one.id]
    return names


def _inputs(run: LiveRun, position: int, number: int) -> dict[str, JsonInput]:
    task, dag = run.state.dag.tasks[position], run.state.dag
    previous = {} if number == 1 else _names(run, position, number - 1)
    return TaskTexts(task, dag, run.state.results).call_inputs(previous)


def _round_values(run: LiveRun, position: int, number: int) -> dict[str, JsonInput]:
    inputs, names = _inputs(run, position, number), _names(run, position, number)
    return round_values(inputs, names, run.state.dag, run.state.results)


def collect(run: LiveRun, position: int) -> JsonValue:
    """Return the results of the parts of the task at `position`, in order; "" for a part without a result."""
    results, task = [run.state.results[part] for part in run.state.parts[position]], run.state.dag.tasks[position]
    values: list[JsonValue] = [result.value if result.status is TaskStatus.COMPLETED else "" for result in results]
    over = run.state.results.get(run.state.dag.position(task.for_each or ""))
    return values[0] if over is not None and _is_one(task, over) else values


def _prefix(task: Task, number: int) -> str:
    """Return the beginning of the ids of the tasks of a round, or of the plan, that `task` calls."""
    return f"{task.id}.{number}." if task.call is not None and task.call.is_loop else f"{task.id}."


def _round_of(task: Task, part: Task) -> int:
    """Return the number of the round of a task that `task` has added; 1 if `task` is no loop."""
    is_loop = task.call is not None and task.call.is_loop
    return int(part.id[len(task.id) + 1 :].partition(".")[0]) if is_loop else 1


def _called(
    task: Task, prefix: str, inputs: Mapping[str, JsonInput], before: Sequence[str], *, takes_all: bool
) -> Task:
    """Return `task` of a called plan as a task of the run. Without dependencies it waits for the tasks in `before`."""
    used = [parse_names(text)[0] for text in task.texts]
    used += [] if task.when is None else [condition_names(task.when)[0]]
    names = joined([*used, *(one for _, one, _ in (() if task.check is None else check_texts(task.check)))])
    siblings = (names.names | names.results | {*task.upstream}) - inputs.keys() - RESERVED_NAMES - task.aliases.keys()
    aliases = {
        alias: f"{prefix}{ids}" if isinstance(ids, str) else [f"{prefix}{one}" for one in ids]
        for alias, ids in {**{name: name for name in sorted(siblings)}, **task.aliases}.items()
        if alias != PREVIOUS or task.call is None or alias in task.upstream
    }
    takes_all = takes_all or "inputs" in names.names
    return replace(
        task,
        id=f"{prefix}{task.id}",
        depends_on=tuple(f"{prefix}{name}" for name in task.depends_on) or (() if task.upstream else tuple(before)),
        continues=None if task.continues is None else f"{prefix}{task.continues}",
        for_each=None if task.for_each is None else f"{prefix}{task.for_each}",
        aliases=aliases,
        inputs={name: value for name, value in inputs.items() if takes_all or name in names.names},
    )


def _new_files(tasks: Sequence[Task]) -> Iterator[Problem]:
    """Report files of added tasks: a run has the files that were there when the run was made."""
    for place, task in enumerate(tasks):
        if any(isinstance(file, str) for file in task.files):
            yield Problem("a task added during the run has no files; leave `files` out", task.id, "files", None, place)


def _specs(reply: Reply) -> Sequence[object]:
    """Return the tasks in the answer of a task with `adds_tasks`: a list, or a mapping with the key `tasks`. Raises
    DAGError if the answer is neither.
    """
    data = reply.data
    if data is None:
        try:
            data = parse_json(reply.text)
        except ValueError as error:
            raise DAGError([Problem(f"the answer is not JSON: {error}")]) from None
    if isinstance(data, dict) and isinstance(data.get("tasks"), list):
        data = data["tasks"]
    if not isinstance(data, list):
        raise DAGError([Problem("the answer has to be a list of tasks, or a mapping with the key 'tasks'")])
    return data


def elements_of(task: Task, result: TaskResult | None) -> Sequence[JsonValue]:
    """Return the list over which the task is expanded. Raises DAGError if the result holds no such list."""
    if result is None or result.status is not TaskStatus.COMPLETED:
        return []  # skipped, or failed softly: no elements
    elements = result.data
    if isinstance(elements, dict):
        lists = [value for value in elements.values() if isinstance(value, list)]
        elements = lists[0] if len(lists) == 1 else None
    if not isinstance(elements, list):
        message = (
            f"for_each needs a list, or a mapping with one list in it, as the result of task {task.for_each!r}; "
            f"give {task.for_each!r} an output_schema for a list"
        )
        raise DAGError([Problem(message, task.id)])
    for number, element in enumerate(elements, 1):
        if element is None:
            raise DAGError([Problem(f"element {number} of {task.for_each!r} is null", task.id)])
    return elements


def _part(task: Task, partners: Mapping[str, bool], number: int, item: JsonValue, inner: str | None) -> Task:
    """Return the part for one element, which goes over the list of the task `inner` if that is not None. A reference
    to a partner with parts becomes a reference to the partner's part for the same element. A partner without parts has
    no conversation to continue.
    """
    own = {name: f"{name}.{number}" for name, has_parts in partners.items() if has_parts}
    aliases = {
        alias: own.get(names, names) if isinstance(names, str) else [own.get(name, name) for name in names]
        for alias, names in task.aliases.items()
    }
    continues = None if partners.get(task.continues or "") is False else task.continues
    return replace(
        task,
        id=f"{task.id}.{number}",
        depends_on=tuple(own.get(name, name) for name in task.upstream if name != task.continues),
        continues=None if continues is None else own.get(continues, continues),
        item=item,
        aliases={**own, **aliases},
        for_each=inner,
    )
