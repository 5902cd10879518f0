"""The tools of an agent, over MCP on standard input and output: each starts, reads, answers or cancels runs.

Clients end a call after 30 to 60 s, so no call lasts longer than MOST_WAIT_S: an agent starts a run, then waits in
several calls. A result is returned in pieces, because a client cuts or refuses a long one.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from importlib import metadata
from typing import Annotated, Any, ParamSpec, Protocol, TypeAlias

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from plait.clock_and_ids import Clock
from plait.errors import PlaitError, RunOwned, TaskNotFound
from plait.json_form import JsonValue
from plait.runner.client.runs import POLL_SECONDS, Runs
from plait.runner.views.view_models import RunDetail, RunView, TaskView
from plait.statuses import RunStatus, TaskStatus

MOST_WAIT_S = 20.0
MOST_CHARACTERS = 20_000
"""Characters of results in one answer."""
_MOST_TASKS = 20
_MOST_RUNS = 20
_TO_START = frozenset({RunStatus.QUEUED, RunStatus.INTERRUPTED})
_UNDER_WAY = frozenset({RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.CANCELLING})


class PlanHost(Protocol):
    """The plans that an agent may run, and the executor of their runs."""

    def describe(self) -> list[dict[str, Any]]:
        """Return each plan as a JSON object with `plan`, its name, and `inputs`, its inputs with their defaults."""
        ...

    async def create(self, plan: str, inputs: Mapping[str, JsonValue], key: str | None) -> str:
        """Store a run of the plan as queued, one for a key, and return its id. Raises PlaitError."""
        ...

    async def has_made(self, run_id: str) -> bool:
        """Return whether the run was made from one of the plans. Raises RunNotFound."""
        ...

    async def result_task(self, run_id: str) -> str | None:
        """Return the id of the task whose result is the result of the run; None if all final tasks are."""
        ...

    async def start(self, run_id: str) -> None:
        """Execute the run in the background. Return once this process owns the run. Raises PlaitError if the run is not
        of one of the plans, RunOwned if another live process executes the run.
        """
        ...


class RunTools:
    """The tools. Every method raises PlaitError or StoreError with a message for the agent."""

    def __init__(self, runs: Runs, host: PlanHost, clock: Clock) -> None:
        self._runs = runs
        self._host = host
        self._clock = clock

    def list_plans(self) -> dict[str, Any]:
        """Return the plans."""
        return {"plans": self._host.describe()}

    async def list_runs(self) -> dict[str, Any]:
        """Return the newest runs."""
        return {"runs": [_brief(run) for run in await self._runs.list(_MOST_RUNS)]}

    async def start_run(self, plan: str, inputs: Mapping[str, JsonValue], key: str | None) -> dict[str, Any]:
        """Start a run of `plan`. With a known `key`, continue the run of that key if it was interrupted."""
        run_id = await self._host.create(plan, inputs, key)
        if (await self._runs.get(run_id, tasks=False)).status in _TO_START:
            await self._start(run_id)
        return await self.run_status(run_id)

    async def resume_run(self, run_id: str) -> dict[str, Any]:
        """Continue an interrupted, queued or waiting run."""
        await self._start(run_id)
        return await self.run_status(run_id)

    async def run_status(self, run_id: str) -> dict[str, Any]:
        """Return the state of the run."""
        run = await self._runs.get(run_id)
        tasks = run.tasks.values()
        return {
            **_brief(run),
            "error": run.error,
            "running": _ids(task for task in tasks if task.status is TaskStatus.RUNNING),
            "failed": [
                {"task_id": task.task_id, "error": (task.error or "")[:500]}
                for task in tasks
                if task.status is TaskStatus.FAILED
            ][:_MOST_TASKS],
            "questions": _ids(task for task in tasks if task.status is TaskStatus.WAITING_INPUT),
        }

    async def wait_for_run(self, run_id: str, seconds: float) -> dict[str, Any]:
        """Wait until the run has ended, waits for an answer or is interrupted, at most `seconds`. Return its state."""
        with anyio.move_on_after(seconds):
            while (await self._runs.get(run_id, tasks=False)).status in _UNDER_WAY:
                await self._clock.sleep(POLL_SECONDS)
        return await self.run_status(run_id)

    async def get_result(self, run_id: str, task_id: str | None, offset: int) -> dict[str, Any]:
        """Return the result of a task from the character `offset`, or the results of the final tasks."""
        run = await self._runs.get(run_id)
        wanted = task_id or await self._host.result_task(run_id)
        if wanted is None:
            chosen = _final_tasks(run)
        elif wanted in run.tasks:
            chosen = [run.tasks[wanted]]
        elif task_id is None:
            chosen = []  # a goal without an answer yet
        else:
            raise TaskNotFound(f"run {run_id} has no task {task_id!r}; without task_id, the final tasks are named")
        left, results = MOST_CHARACTERS, list[dict[str, Any]]()
        for task in chosen:
            one = _result(task, offset if len(chosen) == 1 else 0, left)
            left -= len(one["text"] or "")
            results.append(one)
        return {"run_id": run_id, "status": run.status.value, "results": results}

    async def list_questions(self, run_id: str) -> dict[str, Any]:
        """Return the open questions of the run."""
        run = await self._runs.get(run_id)
        asking = [task for task in run.tasks.values() if task.status is TaskStatus.WAITING_INPUT]
        return {"run_id": run_id, "questions": [_question(task) for task in asking]}

    async def answer_question(self, run_id: str, task_id: str, answer: JsonValue) -> dict[str, Any]:
        """Answer the question of a task. A run that waited continues here, if it is of one of the plans."""
        taken = await self._runs.answer(run_id, task_id, answer, wait=MOST_WAIT_S / 2)
        run = await self._runs.get(run_id, tasks=False)
        if run.status is RunStatus.WAITING_INPUT and await self._host.has_made(run_id):
            await self._start(run_id)
        return {"taken": taken, **await self.run_status(run_id)}

    async def cancel_run(self, run_id: str) -> dict[str, Any]:
        """Cancel the run for good."""
        await self._runs.cancel(run_id, wait=MOST_WAIT_S / 2)
        return await self.run_status(run_id)

    async def _start(self, run_id: str) -> None:
        with suppress(RunOwned):  # another process executes the run already
            await self._host.start(run_id)


def _brief(run: RunView) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "name": run.name,
        "status": run.status.value,
        "done": run.done,
        "total": run.total,
        "counts": {status.value: number for status, number in run.counts.items()},
        "created_at": run.created_at,
        "ended_at": run.ended_at,
        "cost_usd": run.cost_usd,
    }


def _ids(tasks: Iterable[TaskView]) -> list[str]:
    return [task.task_id for task in tasks][:_MOST_TASKS]


def _final_tasks(run: RunDetail) -> list[TaskView]:
    """Return the tasks on which no other task depends, except tasks that add tasks: the added tasks are the result."""
    needed = {name for task in run.tasks.values() for name in task.depends_on}
    for key in ("continues", "for_each"):
        needed.update(str(task.spec[key]) for task in run.tasks.values() if key in task.spec)
    wholes = {task.task_id for task in run.tasks.values() if "for_each" in task.spec}
    needed.update(task.task_id for task in run.tasks.values() if task.added_by in wholes)
    last = [task for task in run.tasks.values() if task.task_id not in needed]
    return [task for task in last if not task.spec.get("adds_tasks")]


def _result(task: TaskView, offset: int, most: int) -> dict[str, Any]:
    text = task.text or ""
    end = min(len(text), offset + max(most, 0))
    small = task.data is not None and len(json.dumps(task.data)) <= most
    return {
        "task_id": task.task_id,
        "status": task.status.value,
        "text": None if task.text is None else text[offset:end],
        "next_offset": end if end < len(text) else None,
        "data": task.data if small else None,
        "error": task.error,
    }


def _question(task: TaskView) -> dict[str, Any]:
    asks = task.asks
    return {
        "task_id": task.task_id,
        "question": task.question,
        "schema": None if asks is None else asks.schema,
        "default": None if asks is None else asks.default,
        "deadline_at": None if asks is None else asks.deadline_at,
    }


INSTRUCTIONS = (
    "plait runs a plan, a graph of subtasks for language models and agents, in parallel, and stores each step. Start a "
    "run of a named plan with start_run and a `key` of your choice: start_run with the same key returns the same run, "
    "also in a later session, and continues it if it was interrupted. A run takes minutes or hours: call wait_for_run "
    "until the status is completed, failed or cancelled. While the status is waiting_input, answer with "
    "answer_question, after asking the user if the answer is theirs to give."
)
_P = ParamSpec("_P")
_Tool: TypeAlias = Callable[_P, Awaitable[dict[str, Any]]]
_RunId: TypeAlias = Annotated[str, Field(description="The id of the run, as start_run or list_runs returns it.")]
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)


def make_server(tools: RunTools) -> MCPServer[None]:
    """Return a server that publishes `tools`."""
    server: MCPServer[None] = MCPServer("plait", instructions=INSTRUCTIONS, version=metadata.version("plait"))
    _add_reads(server, tools)
    _add_verbs(server, tools)
    return server


async def serve(tools: RunTools) -> None:
    """Serve on standard input and output until the client closes its end. While serving, `print` writes to standard
    error.
    """
    await make_server(tools).run_stdio_async()


def _add_reads(server: MCPServer[None], tools: RunTools) -> None:
    async def list_plans() -> dict[str, Any]:
        return tools.list_plans()

    async def list_runs() -> dict[str, Any]:
        return await tools.list_runs()

    async def run_status(run_id: _RunId) -> dict[str, Any]:
        return await tools.run_status(run_id)

    async def wait_for_run(
        run_id: _RunId,
        seconds: Annotated[float, Field(ge=0, le=MOST_WAIT_S, description="The longest time to wait.")] = MOST_WAIT_S,
    ) -> dict[str, Any]:
        return await tools.wait_for_run(run_id, seconds)

    async def get_result(
        run_id: _RunId,
        task_id: Annotated[str | None, Field(description="The id of a task; without it, the final tasks.")] = None,
        offset: Annotated[int, Field(ge=0, description="The first character of the text, for a long result.")] = 0,
    ) -> dict[str, Any]:
        return await tools.get_result(run_id, task_id, offset)

    async def list_questions(run_id: _RunId) -> dict[str, Any]:
        return await tools.list_questions(run_id)

    def add(tool: _Tool[...], description: str) -> None:
        server.add_tool(_explained(tool), description=description, annotations=_READS)

    add(list_plans, "List the plans that start_run accepts, with their inputs and defaults.")
    add(list_runs, "List the newest runs with their statuses.")
    add(run_status, "Return the status of a run: counts of tasks, what runs, what failed, which tasks ask a question.")
    add(
        wait_for_run,
        f"Wait at most {MOST_WAIT_S:g} s for a run to end, to ask a question or to be interrupted, then return its "
        "status. Call again while the status is running.",
    )
    add(
        get_result,
        "Return the results of the final tasks of a run, or of one task. One answer has at most "
        f"{MOST_CHARACTERS:,} characters; next_offset is the offset of the rest.",
    )
    add(list_questions, "List the open questions of a run, each with the JSON Schema of the answer.")


def _add_verbs(server: MCPServer[None], tools: RunTools) -> None:
    async def start_run(
        plan: Annotated[str, Field(description="The name of a plan of list_plans.")],
        inputs: Annotated[
            dict[str, Any] | None,
            Field(
                description="Values for inputs of the plan, by name, in place of defaults. Where a default names files "
                "or rows, give the texts or the rows themselves, as a list."
            ),
        ] = None,
        key: Annotated[
            str | None, Field(description="A name of your choice for this piece of work: one run for each key.")
        ] = None,
    ) -> dict[str, Any]:
        return await tools.start_run(plan, inputs or {}, key)

    async def resume_run(run_id: _RunId) -> dict[str, Any]:
        return await tools.resume_run(run_id)

    async def answer_question(
        run_id: _RunId,
        task_id: Annotated[str, Field(description="The id of the task that asks.")],
        answer: Annotated[Any, Field(description="A text, or JSON that matches the schema of the question.")],
    ) -> dict[str, Any]:
        return await tools.answer_question(run_id, task_id, answer)

    async def cancel_run(run_id: _RunId) -> dict[str, Any]:
        return await tools.cancel_run(run_id)

    def add(tool: _Tool[...], description: str, *, destructive: bool = False) -> None:
        hints = ToolAnnotations(read_only_hint=False, destructive_hint=destructive, idempotent_hint=True)
        server.add_tool(_explained(tool), description=description, annotations=hints)

    add(start_run, "Start a run of a plan in the background, and return its id and status at once.")
    add(resume_run, "Continue a run that was interrupted, or that waits after its questions were answered.")
    add(answer_question, "Answer the question of a task; the first answer counts, and the run continues.")
    add(cancel_run, "Cancel a run for good.", destructive=True)


def _explained(tool: _Tool[_P]) -> _Tool[_P]:
    """Return `tool` with errors that the agent can mend as errors of the tool, with their text."""

    @wraps(tool)
    async def call(*args: _P.args, **kwargs: _P.kwargs) -> dict[str, Any]:
        try:
            return await tool(*args, **kwargs)
        except PlaitError as error:
            raise ToolError(str(error)) from error

    return call
