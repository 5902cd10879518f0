"""Sessions of cancelled tasks, for backends whose sessions hold the status of their run."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from plait.backends.backend_protocol import StatusBackend
from plait.program_log import logger
from plait.runner.engine.run_options import Config
from plait.runner.state.run_state import RunState

_LIMIT_S = 5.0
"""Seconds for all sessions of a run: a store of sessions that hangs does not hold up a cancellation for longer."""


async def note_cancelled(config: Config, run_id: str, state: RunState, sessions: Mapping[int, str]) -> None:
    """Let the backends note in the `sessions` of tasks, by position, that the run was cancelled. An error is logged,
    and changes nothing else: the record of the run counts.
    """
    with anyio.move_on_after(_LIMIT_S) as limit:
        for position, session_id in sessions.items():
            task = state.dag.tasks[position]
            backend = config.backends.get(state.dag.backend_of(task) or config.default)
            if not isinstance(backend, StatusBackend):
                continue
            try:
                await backend.note_cancelled(session_id)
            except Exception as error:
                logger(run=run_id).warning("session_not_updated", task=task.id, error=type(error).__name__)
    if limit.cancelled_caught:
        logger(run=run_id).warning("sessions_not_updated", why=f"no answer within {_LIMIT_S:g} s")
