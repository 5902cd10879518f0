"""Logging through structlog, on the standard logger `plait`. Without a handler of a caller, Python prints warnings and
errors as the text of `_Line`.

Prompts, answers and keys are never logged above debug level.
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


class _Line(dict[str, Any]):
    """The values of a log line. As text, it is one line for a person: `store_degraded run=r error='disk is full'`."""

    def __str__(self) -> str:
        values = (f"{name}={_shown(value)}" for name, value in self.items() if name not in _OF_THE_RECORD)
        return " ".join((str(self.get("event")), *values))


_OF_THE_RECORD = frozenset({"event", "level", "timestamp"})


def _shown(value: object) -> str:
    """Return `value` as a word, or as Python writes it, without control characters."""
    text = str(value)
    return text if text.isprintable() and text and " " not in text else repr(value)


def _as_line(log: Any, name: str, values: Any) -> tuple[tuple[_Line], dict[str, Any]]:
    import structlog  # noqa: PLC0415

    (line,), more = structlog.stdlib.ProcessorFormatter.wrap_for_formatter(log, name, values)
    return (_Line(line),), more


class Log:
    """A logger with the same context in every line. The first written line imports structlog, a slow import."""

    def __init__(self, context: dict[str, str]) -> None:
        self._context = context

    def info(self, event: str, **values: Any) -> None:
        """Log a normal event."""
        self._write(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        """Log an event that may need attention."""
        self._write(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        """Log a failure."""
        self._write(logging.ERROR, event, values)

    def debug(self, event: str, error: BaseException, **values: Any) -> None:
        """Log a foreign error with the traceback. The traceback may quote prompts and answers."""
        if logging.getLogger("plait").isEnabledFor(logging.DEBUG):
            text = "".join(traceback.format_exception(error))
            # A quoted prompt or answer may contain terminal control characters.
            plain = "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)
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
                _as_line,
            ],
        )
        return bound.bind(**self._context)


def logger(**context: str) -> Log:
    """Return a logger with `context` in every line, for example `run` and `task`."""
    return Log(context)


def configure_logging(style: LogFormat, level: str = "info") -> None:
    """Write plait's log lines to standard error, as text or as JSON. Used by the command's options."""
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
