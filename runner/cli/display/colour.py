"""Colours for statuses, where a terminal shows them and nobody asked for none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO

import click

from plait.runner.domain.status import RunStatus, TaskStatus

COLOURS: Mapping[str, str] = {
    TaskStatus.RUNNING: "cyan",
    TaskStatus.WAITING_INPUT: "magenta",
    TaskStatus.COMPLETED: "green",
    TaskStatus.FAILED: "red",
    TaskStatus.SKIPPED: "yellow",
    RunStatus.INTERRUPTED: "yellow",
    RunStatus.CANCELLED: "yellow",
}


def coloured(text: str, status: str, stream: IO[str]) -> str:
    """`text` in the colour of `status`, if `stream` is a terminal."""
    colour = COLOURS.get(status)
    if colour is None or not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return click.style(text, fg=colour)
