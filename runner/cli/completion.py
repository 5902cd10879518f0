"""Values that a shell offers for arguments of the command: runs and tasks of the store, and kinds of backends.

click asks for values through the type of an argument. The types here replace the plain text of arguments by their
names, only while a shell completes a line.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from plait.persistence.store_protocol import Store
from plait.runner.cli.command_options import KINDS, STORE_VARIABLE
from plait.runner.client.store_place import (
    DEFAULT_STORE,
    ServerAddress,
    StorePlace,
    find_run,
    read_only_store,
    store_place,
)

_PATIENCE_S = 2.0
"""Seconds until a shell gets no values from a slow store."""
_MOST_RUNS = 50
_Items: TypeAlias = "list[CompletionItem[str]]"
_Read: TypeAlias = "Callable[[Store], Awaitable[_Items]]"


def add_values(command: click.Command) -> None:
    """Make the arguments and options of `command` offer values."""
    for parameter in command.params:
        if parameter.type is click.STRING and parameter.name in _VALUES:
            parameter.type = _VALUES[parameter.name]


class RunName(StringParamType):
    """A run of the store."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:  # noqa: ARG002 - signature of click
        """Return the newest runs that begin with `incomplete`, each with its name and status."""

        async def read(store: Store) -> _Items:
            runs = await store.list_runs(_MOST_RUNS)
            items = [CompletionItem(run.run_id, help=f"{run.name} {run.status}".strip()) for run in runs]
            newest = [CompletionItem("last", help="the last run, but for a try")] if runs else []
            return [item for item in (*newest, *items) if item.value.startswith(incomplete)]

        return _read_values(ctx, read)


class PlanOrRun(RunName):
    """A plan file or a run of the store."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:
        """Return the runs that begin with `incomplete`; files if there are none."""
        return super().shell_complete(ctx, param, incomplete) or [CompletionItem(incomplete, type="file")]


class TaskName(StringParamType):
    """A task of the run that the argument `run` names."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:  # noqa: ARG002 - signature of click
        """Return the tasks that begin with `incomplete`, each with its status."""

        async def read(store: Store) -> _Items:
            run = await find_run(store, ctx.params.get("run") or "last")
            tasks = await store.list_tasks(run.run_id)
            return [
                CompletionItem(task.task_id, help=task.status) for task in tasks if task.task_id.startswith(incomplete)
            ]

        return _read_values(ctx, read)


class BackendKind(StringParamType):
    """A kind of backend."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> _Items:  # noqa: ARG002 - signature of click
        """Return the kinds that begin with `incomplete`."""
        kinds = KINDS.replace(" or ", ", ").split(", ")
        return [CompletionItem(kind) for kind in kinds if kind.startswith(incomplete)]


_VALUES = {"run": RunName(), "like": RunName(), "what": PlanOrRun(), "task": TaskName(), "backend": BackendKind()}
"""The types by the name of the argument or option."""


def _read_values(context: click.Context, read: _Read) -> _Items:
    """Return the values from the store of the command line; none if the store cannot be read. A shell that completes a
    line has no place for an error.
    """

    async def read_in_time() -> _Items:
        with anyio.move_on_after(_PATIENCE_S):
            async with read_only_store(_store_of(context)) as store:
                return await read(store)
        return []

    try:
        return anyio.run(read_in_time)
    except Exception:  # a message would stand in the middle of the line that is being typed
        return []


def _store_of(context: click.Context) -> StorePlace:
    given = context.params.get("store_path") or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
    return given if isinstance(given, ServerAddress) else store_place(str(given))
