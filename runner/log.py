"""Logs through structlog over the standard library's logger `plait`: quiet until somebody asks for more.

Nothing of a prompt, an answer or a key is ever logged above debug level.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["console", "json"]


def logger(**context: str) -> structlog.stdlib.BoundLogger:
    """A logger whose every line carries `context`, such as `run` and `task`."""
    bound: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger("plait"),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
    )
    return bound.bind(**context)


def configure(style: LogFormat, level: str = "info") -> None:
    """Write plait's log lines to standard error, as text for people or as JSON. What the command's options do."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if style == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
    )
    root = logging.getLogger("plait")
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False
