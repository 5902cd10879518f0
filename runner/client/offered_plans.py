"""Plans that others may start: posted over HTTP, or offered to an agent as tools.

A client may spend the money that the server's backends cost, and no more: a posted plan names no server, no key, no
function and no file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio.to_thread

from plait.backends.backend_specs import BackendSpec, CommandSpec
from plait.backends.process.process_table import PREFIX
from plait.errors import InvalidRequest, PlaitError, nearest
from plait.json_form import JsonValue
from plait.persistence.store_protocol import Store
from plait.runner.client.run_backends import (
    BackendOptions,
    backend_set_of_plan,
    queue_run,
    read_plan_data,
    result_task,
)
from plait.runner.client.runs import Runs
from plait.runner.plan import Plan, PlanError, PlanProblem, parse_plan
from plait.runner.plan.plan_file import NAME_IT
from plait.runner.plan.plan_inputs import no_input
from plait.runner.plan.plan_models import input_kind
from plait.runner.plan.plan_positions import MAX_BYTES
from plait.runner.state.stored_run import read_settings, stored_record
from plait.task import COMMAND_BACKEND, command_not_allowed, commands_of, is_allowed, tasks_within

_SERVER_KEYS = {
    "backends": "the backends of the server are set at its start; name one of them, or leave `backend` out",
    "hosts": "the hosts of the server are set at its start, in its file of backends",
    "notify": "where the notices of the server's runs go is set at its start, in its file of backends",
    "prices": "the prices of models are set at the start of the server, in its file of backends",
    "concurrency": "the server sets how many tasks run at once (plait serve -j)",
}
_TASK_KEYS = {
    "model": "the models of the server are set at its start; leave `model` out, or name another backend",
    "files": "a posted plan reads no files; put the texts into the prompt",
    "cwd": "the folders of the server are set at its start; leave `cwd` out, or name another backend",
    "env": "the environment of the server's programs is set at its start; leave `env` out",
    "shared": "a posted task works alone in its folder; leave `shared` out",
    "plan": "a posted plan reads no files; write the tasks into the plan itself",
}
_SPECIAL = {
    "files": "a posted plan reads no files; give the texts themselves, as values of the input",
    "rows": "a posted plan reads no files; give the rows themselves, as a list",
    "required": "this input has no default; give it a value in `inputs`",
}


def posted_plan(plan: Mapping[str, Any], inputs: Mapping[str, Any], backends: Mapping[str, BackendSpec]) -> Plan:
    """Return the plan, with `inputs` in place of its defaults, for the server's `backends`, which are not part of the
    plan. A task may run the commands that one of them allows. Raises PlanError with every mistake.
    """
    if (size := len(_dump(plan).encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        why = f"a plan may have 1 MiB, this one has {size:,} bytes; give large values in `inputs`"
        raise PlanError([PlanProblem(why, file="")])
    problems = [PlanProblem(why, key, file="") for key, why in _SERVER_KEYS.items() if key in plan]
    if isinstance(plan.get("inputs") or {}, dict):  # otherwise the reader reports the wrong type
        declared = cast("dict[str, Any]", plan.get("inputs") or {})
        problems += _check_inputs(declared, inputs)
        plan = {**plan, "inputs": {**declared, **inputs}}
    problems += _check_tasks(plan.get("tasks"), backends.get(COMMAND_BACKEND))
    if problems:
        raise PlanError(problems)
    # The plan needs only the names of the backends.
    named = {name: {"kind": "function", "call": "server:backend"} for name in backends}
    text = _dump({**plan, "backends": named})
    try:
        return replace(parse_plan(text, format="json", max_bytes=None, names_default=True), backends={})
    except PlanError as error:
        there_are = f"; the server has {', '.join(map(repr, sorted(backends)))}, or leave 'backend' out"
        # In words for a client without a file and backends: line and column belong to a text that exists only here.
        raise PlanError(
            replace(one, message=one.message.replace(NAME_IT, there_are), line=None, column=None, file="")
            for one in error.problems
        ) from None


def _check_tasks(tasks: object, spec: BackendSpec | None) -> Iterator[PlanProblem]:
    """Yield a problem for each key that names a file or a model of the server, and for each command that the `spec` of
    the server does not allow.
    """
    for n, task in enumerate(cast("list[object]", tasks) if isinstance(tasks, list) else []):
        for key, words in commands_of(task).items():
            if not isinstance(spec, CommandSpec) or not is_allowed(words, spec.allows):
                yield PlanProblem(command_not_allowed(words, COMMAND_BACKEND), f"tasks[{n}].{key}", file="")
        yield from _server_keys(task, f"tasks[{n}]")


def _server_keys(task: object, where: str) -> Iterator[PlanProblem]:
    if not isinstance(task, dict):
        return
    part = cast("dict[str, object]", task)
    loop = part.get("loop")
    for key, why in _TASK_KEYS.items():
        if part.get(key) is not None:
            yield PlanProblem(why, f"{where}.{key}", file="")
    if isinstance(loop, dict) and cast("dict[str, object]", loop).get("plan") is not None:
        yield PlanProblem(_TASK_KEYS["plan"], f"{where}.loop.plan", file="")
    for key, inner in tasks_within(part):
        yield from _server_keys(inner, f"{where}.{key}")


def _dump(plan: Mapping[str, Any]) -> str:
    try:
        return json.dumps(plan, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise PlanError([PlanProblem(f"the plan holds a value that JSON does not have: {error}", file="")]) from None
    except RecursionError:
        raise PlanError([PlanProblem("the plan is nested too deeply", file="")]) from None


def _check_inputs(declared: Mapping[str, Any], values: Mapping[str, Any]) -> list[PlanProblem]:
    unknown = values.keys() - declared.keys()
    problems = [PlanProblem(no_input(name, declared), f"inputs.{name}", file="") for name in unknown]
    for name, value in {**declared, **values}.items():
        # A plan file would read a file for such a value.
        if special := _SPECIAL.get(input_kind(value)):
            problems.append(PlanProblem(special, f"inputs.{name}", file=""))
    return problems


class LocalPlans:
    """Plan files by the names of the files without suffix. Runs are stored in `store` and executed by `runs`.

    Raises InvalidRequest if a file cannot be read, or if two files have one name; PlanError if a file has mistakes.
    """

    def __init__(self, files: Sequence[Path], backend: BackendOptions, store: Store, runs: Runs) -> None:
        self._files = named_plans(files)
        self._backend = backend
        self._store = store
        self._runs = runs
        self._nested = any(name.startswith(PREFIX) for name in os.environ)

    def describe(self) -> list[dict[str, Any]]:
        """Return each plan with its inputs and their defaults."""
        return [{"plan": name, "inputs": _declared(read_plan_data(path))} for name, path in self._files.items()]

    async def create(self, plan: str, inputs: Mapping[str, JsonValue], key: str | None) -> str:
        """Store a queued run of the plan. `inputs` replace the defaults; no value names a file."""
        self._require_outside()
        path = self._files.get(plan)
        if path is None:
            hint = nearest(plan, self._files) or f"; there are {', '.join(map(repr, self._files))}"
            raise PlaitError(f"there is no plan {plan!r}{hint}")
        declared = _declared(read_plan_data(path))
        for name in inputs:
            if name not in declared:
                raise PlaitError(no_input(name, declared))
        for name, default in declared.items():
            if name not in inputs and input_kind(default) == "required":
                raise PlaitError(f"the input {name!r} of plan {plan!r} has no default; give it a value in `inputs`")
        loaded = await anyio.to_thread.run_sync(partial(Plan.load, path, inputs=inputs))
        backend_set = backend_set_of_plan(loaded, self._backend)
        concurrency = loaded.concurrency or backend_set.concurrency()
        return await queue_run(loaded, backend_set, self._store, concurrency, key)

    async def has_made(self, run_id: str) -> bool:
        """Return whether the run was made from one of the plans. Raises RunNotFound."""
        _, record = await stored_record(self._store, run_id)
        return read_settings(record).get("plan") in {str(path) for path in self._files.values()}

    async def result_task(self, run_id: str) -> str | None:
        """Return the id of the task whose result is the result of the run, for a goal; None for another run."""
        return result_task((await stored_record(self._store, run_id))[1])

    async def start(self, run_id: str) -> None:
        """Execute the run. Raises PlaitError unless the run was made from one of the plans, and as
        `Runs.start`.
        """
        self._require_outside()
        if not await self.has_made(run_id):
            raise PlaitError(
                f"run {run_id} was not made from a plan of this server ({', '.join(self._files)}); "
                f"a person continues the run with `plait resume {run_id}`"
            )
        await self._runs.start(run_id)

    async def wake(self, report: Callable[[str, PlaitError | None], None]) -> None:
        """Continue the runs that were made from one of the plans, park and are due: see `Runs.wake`."""
        self._require_outside()
        await self._runs.wake(report, fits=self.has_made)

    def _require_outside(self) -> None:
        """Raise PlaitError if the agent is itself a task of a run: agents that start agents could go on without end."""
        if self._nested:
            raise PlaitError(
                "this agent works for a task of a run itself, and runs started by it would belong to nobody: return "
                "the work as the result of the task, or let the plan add tasks (adds_tasks)"
            )


def named_plans(files: Sequence[Path]) -> dict[str, Path]:
    """Return the files, absolute, by name. Raises InvalidRequest, PlanError."""
    named: dict[str, Path] = {}
    for file in files:
        if file.stem in named:
            raise InvalidRequest(f"{named[file.stem]} and {file} have the same name, {file.stem!r}; rename one")
        read_plan_data(file)
        named[file.stem] = file.resolve()
    return named


def _declared(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    inputs = plan.get("inputs")
    return cast("Mapping[str, Any]", inputs) if isinstance(inputs, dict) else {}
