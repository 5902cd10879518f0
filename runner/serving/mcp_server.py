"""The tools of an agent, over MCP on standard input and output: each starts, reads, answers or cancels runs.

Clients end a call after 30 to 60 s, so no call lasts longer than MOST_WAIT_S: an agent starts a run, then waits in
several calls. A result is returned in pieces, because a client cuts or refuses a long one.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import wraps
from importlib import metadata
from typing import Annotated, Any, TypeAlias

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from plait.clock_and_ids import Clock
from plait.errors import PlaitError, RunOwned, TaskNotFound
from plait.runner.client.offered_plans import LocalPlans
from plait.runner.client.runs import POLL_SECONDS, Runs
from plait.runner.views.view_models import RunView, TaskView, view_json
from plait.statuses import TO_START, RunStatus, TaskStatus

MOST_WAIT_S = 20.0
MOST_CHARACTERS = 20_000
"""Characters of results in one answer."""
_MOST_TASKS = 20
_MOST_RUNS = 20
_UNDER_WAY = frozenset({RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.CANCELLING})
_RunId: TypeAlias = Annotated[str, Field(description="The id of the run, as start_run or list_runs returns it.")]


class RunTools:
    """The tools: a client shows their docstrings and the descriptions of their arguments to the agent. Each raises
    PlaitError with a message for the agent.
    """

    def __init__(self, runs: Runs, plans: LocalPlans, clock: Clock) -> None:
        self._runs = runs
        self._plans = plans
        self._clock = clock

    async def list_plans(self) -> dict[str, Any]:
        """List the plans that start_run accepts, with their inputs and defaults."""
        return {"plans": self._plans.describe()}

    async def list_runs(self) -> dict[str, Any]:
        """List the newest runs with their statuses."""
        return {"runs": [_brief(run) for run in await self._runs.list(_MOST_RUNS)]}

    async def start_run(
        self,
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
        """Start a run of a plan in the background, and return its id and status at once."""
        run_id = await self._plans.create(plan, inputs or {}, key)
        if (await self._runs.get(run_id, tasks=False)).status in TO_START:
            await self._start(run_id)
        return await self.run_status(run_id)

    async def resume_run(self, run_id: _RunId) -> dict[str, Any]:
        """Continue a run that was interrupted, or that waits after its questions were answered."""
        await self._start(run_id)
        return await self.run_status(run_id)

    async def run_status(self, run_id: _RunId) -> dict[str, Any]:
        """Return the status of a run: counts of tasks, what runs, what failed, which tasks ask a question."""
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

    async def wait_for_run(
        self,
        run_id: _RunId,
        seconds: Annotated[float, Field(ge=0, le=MOST_WAIT_S, description="The longest time to wait.")] = MOST_WAIT_S,
    ) -> dict[str, Any]:
        """Wait for a run to end, to ask a question or to be interrupted, then return its status. Call again while the
        status is running.
        """
        with anyio.move_on_after(seconds):
            while (await self._runs.get(run_id, tasks=False)).status in _UNDER_WAY:
                await self._clock.sleep(POLL_SECONDS)
        return await self.run_status(run_id)

    async def get_result(
        self,
        run_id: _RunId,
        task_id: Annotated[str | None, Field(description="The id of a task; without it, the final tasks.")] = None,
        offset: Annotated[int, Field(ge=0, description="The first character of the text, for a long result.")] = 0,
    ) -> dict[str, Any]:
        """Return the results of the final tasks of a run, or of one task. A long text comes in several answers:
        next_offset is the offset of the rest.
        """
        run = await self._runs.get(run_id)
        wanted = task_id or await self._plans.result_task(run_id)
        if wanted is None:
            stored = await self._runs.read(run_id)
            chosen = [run.tasks[task.id] for task in stored.state.dag.finals if task.id in run.tasks]
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

    async def list_questions(self, run_id: _RunId) -> dict[str, Any]:
        """List the open questions of a run, each with the JSON Schema of the answer."""
        questions = [
            {
                "task_id": one.task_id,
                "question": one.question,
                "schema": one.asks.schema,
                "default": one.asks.default,
                "deadline_at": one.asks.deadline_at,
            }
            for one in await self._runs.questions(run_id)
            if one.asks is not None
        ]
        return {"run_id": run_id, "questions": questions}

    async def answer_question(
        self,
        run_id: _RunId,
        task_id: Annotated[str, Field(description="The id of the task that asks.")],
        answer: Annotated[Any, Field(description="A text, or JSON that matches the schema of the question.")],
    ) -> dict[str, Any]:
        """Answer the question of a task; the first answer counts, and the run continues."""
        taken = await self._runs.answer(run_id, task_id, answer, wait=MOST_WAIT_S / 2)
        run = await self._runs.get(run_id, tasks=False)
        if run.status is RunStatus.WAITING_INPUT and await self._plans.has_made(run_id):
            await self._start(run_id)
        return {"taken": taken, **await self.run_status(run_id)}

    async def cancel_run(self, run_id: _RunId) -> dict[str, Any]:
        """Cancel a run for good."""
        await self._runs.cancel(run_id, wait=MOST_WAIT_S / 2)
        return await self.run_status(run_id)

    async def pause_run(
        self,
        run_id: _RunId,
        backend: Annotated[str | None, Field(description="Pause this backend of the run alone.")] = None,
        off: Annotated[bool, Field(description="Lift the pause of the run, or of the backend.")] = False,
    ) -> dict[str, Any]:
        """Pause a run: no further task starts until it goes on, and calls under way end normally."""
        await self._runs.pause(run_id, backend=backend, off=off)
        return await self.run_status(run_id)

    async def tune_run(
        self,
        run_id: _RunId,
        concurrency: Annotated[int | None, Field(description="Of the whole run.")] = None,
        limits: Annotated[dict[str, int] | None, Field(description="On backends, by name.")] = None,
    ) -> dict[str, Any]:
        """Change how many tasks of a run are under way at once."""
        await self._runs.tune(run_id, concurrency=concurrency, limits=limits)
        return await self.run_status(run_id)

    async def retry_task(
        self, run_id: _RunId, task_id: Annotated[str, Field(description="The id of the failed task.")]
    ) -> dict[str, Any]:
        """Run a failed task again while its run goes on, or at once one that waits for its next attempt."""
        await self._runs.retry(run_id, task_id)
        return await self.run_status(run_id)

    async def wake_runs(self) -> dict[str, Any]:
        """Continue the runs of the plans of list_plans that wait for a time, such as the end of a limit, which has
        come.
        """
        woken: dict[str, str | None] = {}

        def on_woken(run_id: str, error: PlaitError | None) -> None:
            woken[run_id] = None if error is None else str(error)

        await self._plans.wake(on_woken)
        return {"runs": [{"run_id": run_id, "error": error} for run_id, error in woken.items()]}

    async def _start(self, run_id: str) -> None:
        with suppress(RunOwned):  # another process executes the run already
            await self._plans.start(run_id)


_BRIEF = ("run_id", "name", "status", "done", "total", "counts", "created_at", "ended_at", "cost_usd")


def _brief(run: RunView) -> dict[str, Any]:
    shown = view_json(run)
    return {name: shown[name] for name in _BRIEF}


def _ids(tasks: Iterable[TaskView]) -> list[str]:
    return [task.task_id for task in tasks][:_MOST_TASKS]


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


INSTRUCTIONS = (
    "plait runs a plan, a graph of subtasks for language models and agents, in parallel, and stores each step. Start a "
    "run of a named plan with start_run and a `key` of your choice: start_run with the same key returns the same run, "
    "also in a later session, and continues it if it was interrupted. A run takes minutes or hours: call wait_for_run "
    "until the status is completed, failed or cancelled. While the status is waiting_input, answer with "
    "answer_question, after asking the user if the answer is theirs to give."
)
_Tool: TypeAlias = Callable[..., Awaitable[dict[str, Any]]]
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)


def make_server(tools: RunTools) -> MCPServer[None]:
    """Return a server that publishes `tools`."""
    server: MCPServer[None] = MCPServer("plait", instructions=INSTRUCTIONS, version=metadata.version("plait"))
    reads: tuple[_Tool, ...] = (
        tools.list_plans,
        tools.list_runs,
        tools.run_status,
        tools.wait_for_run,
        tools.get_result,
        tools.list_questions,
    )
    for tool in reads:
        server.add_tool(_explained(tool), annotations=_READS)
    verbs: tuple[_Tool, ...] = (
        tools.start_run,
        tools.resume_run,
        tools.answer_question,
        tools.pause_run,
        tools.tune_run,
        tools.retry_task,
        tools.wake_runs,
        tools.cancel_run,
    )
    for tool in verbs:
        is_destructive = tool == tools.cancel_run
        hints = ToolAnnotations(read_only_hint=False, destructive_hint=is_destructive, idempotent_hint=True)
        server.add_tool(_explained(tool), annotations=hints)
    return server


async def serve(tools: RunTools) -> None:
    """Serve on standard input and output until the client closes its end. While serving, `print` writes to standard
    error.
    """
    await make_server(tools).run_stdio_async()


def _explained(tool: _Tool) -> _Tool:
    """Return `tool` with errors that the agent can mend as errors of the tool, with their text."""

    @wraps(tool)
    async def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return await tool(*args, **kwargs)
        except PlaitError as error:
            raise ToolError(str(error)) from error

    return call
