"""Logs through structlog over the standard library's logger `plait`: quiet until somebody asks for more.

Nothing of a prompt, an answer or a key is ever logged above debug level.
"""

from __future__ import annotations

import logging
import sys
import traceback
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import structlog

LogFormat = Literal["console", "json"]


class Log:
    """Lines that carry the same context. structlog takes longer to import than most of ours together, so that waits
    for the first line that somebody wants.
    """

    def __init__(self, context: dict[str, str]) -> None:
        self._context = context

    def info(self, event: str, **values: Any) -> None:
        """What happened."""
        self._write(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        """What somebody may have to look after."""
        self._write(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        """What went wrong."""
        self._write(logging.ERROR, event, values)

    def debug(self, event: str, error: BaseException, **values: Any) -> None:
        """What went wrong in somebody else's code, with its traceback, which may quote prompts and answers."""
        if logging.getLogger("plait").isEnabledFor(logging.DEBUG):
            told = "".join(traceback.format_exception(error))
            # What an error quotes may hold what acts on a terminal.
            plain = "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in told)
            self._write(logging.DEBUG, event, {**values, "exception": plain})

    def _write(self, level: int, event: str, values: dict[str, Any]) -> None:
        if logging.getLogger("plait").isEnabledFor(level):
            self._bound.log(level, event, **values)

    @cached_property
    def _bound(self) -> structlog.stdlib.BoundLogger:
        import structlog  # noqa: PLC0415

        bound: structlog.stdlib.BoundLogger = structlog.wrap_logger(
            logging.getLogger("plait"),
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
            ],
        )
        return bound.bind(**self._context)


def logger(**context: str) -> Log:
    """A logger whose every line carries `context`, such as `run` and `task`."""
    return Log(context)


def configure(style: LogFormat, level: str = "info") -> None:
    """Write plait's log lines to standard error, as text for people or as JSON. What the command's options do."""
    import structlog  # noqa: PLC0415

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
