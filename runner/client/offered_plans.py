"""The plans that `plait mcp` offers to an agent, and the creation of their runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import anyio.to_thread

from plait.backends.process.process_table import PREFIX
from plait.errors import InvalidRequest, PlaitError
from plait.json_form import JsonValue
from plait.persistence.store_protocol import Store
from plait.runner.client.backend_set import BackendOptions, backend_set_of_plan, queue_run, read_plan_data
from plait.runner.client.runs import Runs
from plait.runner.domain.dag import nearest
from plait.runner.plan.plan_file import load_plan_of_run
from plait.runner.plan.plan_inputs import no_input
from plait.runner.plan.plan_models import input_kind
from plait.runner.policies.goal_messages import ANSWER_ID
from plait.runner.policies.goal_policy import OrchestratorPolicy
from plait.runner.state.stored_run import StoredPolicy, stored_record


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
        return [{"plan": name, "inputs": _declared(read_plan(path))} for name, path in self._files.items()]

    async def create(self, plan: str, inputs: Mapping[str, JsonValue], key: str | None) -> str:
        """Store a queued run of the plan. `inputs` replace the defaults; no value names a file."""
        self._require_outside()
        path = self._files.get(plan)
        if path is None:
            hint = nearest(plan, self._files) or f"; there are {', '.join(map(repr, self._files))}"
            raise PlaitError(f"there is no plan {plan!r}{hint}")
        declared = _declared(read_plan(path))
        for name in inputs:
            if name not in declared:
                raise PlaitError(no_input(name, declared))
        for name, default in declared.items():
            if name not in inputs and input_kind(default) == "required":
                raise PlaitError(f"the input {name!r} of plan {plan!r} has no default; give it a value in `inputs`")
        loaded = await anyio.to_thread.run_sync(load_plan_of_run, path, inputs)
        backend_set = backend_set_of_plan(loaded, self._backend)
        concurrency = loaded.concurrency or backend_set.concurrency()
        return await queue_run(loaded, backend_set, self._store, concurrency, key)

    async def has_made(self, run_id: str) -> bool:
        """Return whether the run was made from one of the plans. Raises RunNotFound."""
        _, record = await stored_record(self._store, run_id)
        return json.loads(record.settings).get("plan") in {str(path) for path in self._files.values()}

    async def result_task(self, run_id: str) -> str | None:
        """Return the id of the task whose result is the result of the run, for a goal; None for another run."""
        _, record = await stored_record(self._store, run_id)
        led_by = StoredPolicy.of(record)
        return ANSWER_ID if led_by is not None and led_by.kind == OrchestratorPolicy.kind else None

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
        read_plan(file)
        named[file.stem] = file.resolve()
    return named


def read_plan(path: Path) -> Mapping[str, Any]:
    """Return the contents of the plan file. Raises InvalidRequest, PlanError."""
    try:
        return read_plan_data(path)
    except OSError as error:
        raise InvalidRequest(f"the plan {path} cannot be read: {error.strerror}; check the path") from None


def _declared(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    inputs = plan.get("inputs")
    return cast("Mapping[str, Any]", inputs) if isinstance(inputs, dict) else {}
