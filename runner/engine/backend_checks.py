"""Which backends a DAG and a policy need, and whether a runner has them, with the settings of the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plait.backends.backend_protocol import AdjustableBackend, Backend, FileBackend, OptionalPromptBackend
from plait.errors import BackendMissing, DAGError, Problem
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Policy
<<<<<<< HEAD
from plait.task import NO_PROMPT, Task, no_such_setting
from plait.task import TEXT, TaskFile, takes_no_such_file
from plait.runner.engine.run_options import Config
=======
from plait.runner.engine.config import Config
>>>>>>> f238fc64 (names: call the modules of plans and tasks by what they hold)
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import MODEL_SETTINGS, NO_PROMPT, OWN_OPTIONS, TEXT, Task, TaskFile, no_such_setting, takes_no_such_file


def task_backends(dag: DAG, default: str) -> list[str]:
    """Return each task's backend name, by position."""
    return [dag.backend_of(task) or default for task in dag]


def needed_backends(names: Sequence[str], statuses: Sequence[TaskStatus] = ()) -> dict[str, int]:
    """Return the backend names that unfinished tasks need, each with the position of the last such task. Without
    `statuses` every task counts as unfinished.
    """
    return {name: i for i, name in enumerate(names) if not statuses or statuses[i] not in TASK_DONE}


def policy_backends(policy: Policy, default: str) -> set[str]:
    """Return the names of the backends that tasks of `policy` may run on."""
    return {default if name is None else name for name in policy.backends()}


def backend_names(dag: DAG, config: Config, statuses: Sequence[TaskStatus] = ()) -> list[str]:
    """Return each task's backend name, by position. Raises BackendMissing if an unfinished task has no backend, or if a
    task continues a conversation of another backend, and DAGError if an unfinished task has a setting that its backend
    does not have, or lacks a prompt that its backend needs.
    """
    names = task_backends(dag, config.default)
    needed = needed_backends(names, statuses)
    for name, position in needed.items():
        if name not in config.backends and dag.backend_of(dag.tasks[position]) is None:
            have = ", ".join(sorted(config.backends)) or "none"
            raise BackendMissing(
                f"task {dag.tasks[position].id!r} names no backend; set `default=` to a backend of this runner: "
                f"{have}; or add a backend with backend=..."
            )
        if name not in config.backends:
            require_backends(config, set(needed), f"task {dag.tasks[position].id!r}")
    for task, name in zip(dag, names, strict=True):
        if task.continues is not None and names[dag.position(task.continues)] != name:
            raise BackendMissing(
                f"task {task.id!r} continues {task.continues!r} on backend {name!r}, but that conversation is on "
                f"{names[dag.position(task.continues)]!r}, and cannot move; leave the task's backend out"
            )
    _require_settings(dag, config.backends, names, statuses)
    return names


def _require_settings(
    dag: DAG, backends: Mapping[str, Backend], names: Sequence[str], statuses: Sequence[TaskStatus]
) -> None:
    problems = [
        problem
        for position, (task, name) in enumerate(zip(dag, names, strict=True))
        if not (statuses and statuses[position] in TASK_DONE)
        for problem in unfit_settings(task, name, backends[name], position)
    ]
    problems += [
        Problem(takes_no_such_file(name, file.name, file.media_type), task.id, "files", None, position)
        for position, (task, name) in enumerate(zip(dag, names, strict=True))
        if task.files and not (statuses and statuses[position] in TASK_DONE)
        for file in task.files
        if isinstance(file, TaskFile) and file.media_type != TEXT and not isinstance(backends[name], FileBackend)
    ]
    if problems:
        raise DAGError(problems)


def unfit_settings(task: Task, name: str, backend: Backend, position: int) -> Iterator[Problem]:
    """Yield a problem for each setting of `task` that `backend`, called `name`, does not take, and for a blank prompt
    that it needs.
    """
    if task.options is not OWN_OPTIONS:
        known = backend.adjustable if isinstance(backend, AdjustableBackend) else ()
        for setting in MODEL_SETTINGS:
            if getattr(task, setting) is not None and setting not in known:
                yield Problem(no_such_setting(name, setting, known), task.id, setting, None, position)
    if not (task.files or task.prompt.strip() or _takes_no_prompt(backend)):
        yield Problem(NO_PROMPT, task.id, "prompt", None, position)


def _takes_no_prompt(backend: Backend) -> bool:
    return isinstance(backend, OptionalPromptBackend) and not backend.needs_prompt


def require_policy_backends(config: Config, policy: Policy) -> None:
    """Raise BackendMissing unless the runner has every backend that tasks of `policy` may run on."""
    require_backends(config, policy_backends(policy, config.default), f"policy {policy.kind!r}")


def require_backends(config: Config, names: set[str], needed_by: str) -> None:
    """Raise BackendMissing, naming every missing backend, unless all `names` are configured."""
    missing = sorted(names - config.backends.keys())
    if missing:
        have = ", ".join(sorted(config.backends)) or "none"
        raise BackendMissing(
            f"no backend named {', '.join(map(repr, missing))} (needed by {needed_by}); this runner has: {have}. "
            f"Give it with backend=... or backends={{name: ...}}"
        )
