"""The server that publishes the tools on standard input and output."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from importlib import metadata
from typing import Annotated, Any, ParamSpec, TypeAlias

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from plait.errors import PlaitError
from plait.runner.serving.mcp_tools import MOST_CHARACTERS, MOST_WAIT_S, RunTools

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
