"""Checks of answers that hold up nothing: small ones at once, large ones in a thread, costly ones in a process.

JSON is parsed, and checked by jsonschema-rs, with the interpreter held: a thread alone would stop the event loop as
well. So a thread does what a bound keeps short, one thread at a time, and a check above `MAX_COST` runs in a process of
its own. The process is killed when the caller is cancelled, and ends itself after `CPU_LIMIT` seconds of processor
time.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from plait.backends import _schema_validator
from plait.backends.errors import BackendError, ErrorKind
from plait.backends.protocol import JsonValue
from plait.backends.structured import Elsewhere, Schema, TooCostly

if TYPE_CHECKING:
    from anyio import CapacityLimiter
    from anyio.lowlevel import RunVar

LARGE = 64 * 1024
"""Characters of a text that is parsed in a thread. Parsing takes 15 ms for a million characters."""
CPU_LIMIT = 10
"""Seconds of processor time that a check in a process may take."""
_MOST_AT_ONCE = 4
_WALL_FACTOR = 6
"""Seconds that a process may take for each second of processor time: the machine may be busy."""
_Result = TypeVar("_Result")

# The threads would compete for the interpreter, and the event loop would wait for each of them in turn.
_interpreter = threading.Lock()


async def read_answer(schema: Schema, text: str) -> JsonValue:
    """Return the JSON value in an answer's `text`, as `Schema.read`.

    Raises Mismatch, and BackendError (invalid_output) if the check takes too long. Cancellation ends the check.
    """
    if len(text) <= LARGE:
        try:
            return schema.read(text)
        except TooCostly:
            pass
    return await _check_apart(partial(schema.read, text))


async def check_answer(schema: Schema, value: JsonValue) -> JsonValue:
    """Return `value` if it fits the schema, as `Schema.check`. Raises as `read_answer`."""
    if not is_large(value):
        try:
            return schema.check(value)
        except TooCostly:
            pass
    return await _check_apart(partial(schema.check, value))


async def in_thread(function: Callable[..., _Result], *args: Any) -> _Result:
    """Return the result of a function that holds the interpreter for long, such as parsing; one runs at a time.

    Cancellation abandons the call.
    """

    from anyio.to_thread import run_sync  # noqa: PLC0415 - small answers do without anyio

    def call() -> _Result:
        with _interpreter, _paused_collector():
            return function(*args)

    return await run_sync(call, abandon_on_cancel=True, limiter=_limiter())


@contextmanager
def _paused_collector() -> Generator[None]:
    """Pause the garbage collector: a pass over a large new value takes longer than parsing the value, and would hold
    the interpreter right after the parsing, without a pause for the event loop.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_large(value: object) -> bool:
    """Return whether `value`, as JSON, may have more than `LARGE` characters. Looks at a few thousand parts at most."""
    if value is None:
        return False
    left = LARGE // 8
    rest: list[object] = [value]
    while rest:
        one = rest.pop()
        left -= 1
        if isinstance(one, str):
            left -= len(one) // 8
        elif isinstance(one, dict):
            rest += cast("dict[str, object]", one).values()
        elif isinstance(one, list | tuple):
            rest += cast("list[object]", one)
        if left < len(rest):
            return True
    return False


async def _check_apart(check: Callable[[Elsewhere], JsonValue]) -> JsonValue:
    process = _CheckingProcess()
    try:
        return await in_thread(check, process.problems)
    except BaseException:
        process.stop()
        raise


def _limiter() -> CapacityLimiter:
    """Return the limiter of the running event loop."""
    from anyio import CapacityLimiter  # noqa: PLC0415

    kept = _limiters()
    try:
        return kept.get()
    except LookupError:
        limiter = CapacityLimiter(_MOST_AT_ONCE)
        kept.set(limiter)
        return limiter


@cache
def _limiters() -> RunVar[CapacityLimiter]:
    from anyio.lowlevel import RunVar  # noqa: PLC0415

    return RunVar("plait_schema_checks")


class _CheckingProcess:
    """The process of one check. Held by `subprocess`, because a thread waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def stop(self) -> None:
        """Kill the process; none is started from now on."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def problems(self, schema: str, value: str) -> list[str]:
        """Return the first few mismatches. Raises BackendError (invalid_output) if the check does not end in time."""
        with self._lock:
            if self._stopped:
                raise _took_too_long()
            self._process = process = _start()
        given = schema.encode()
        _interpreter.release()
        try:
            said, _ = process.communicate(b"%d\n%s%s" % (len(given), given, value.encode()), CPU_LIMIT * _WALL_FACTOR)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            process.kill()
            process.communicate()
            _interpreter.acquire()
        verdict, _, places = said.partition(b"\n")
        if verdict == b"[]":
            return []
        if verdict != b"mismatch":
            raise _took_too_long()
        return cast("list[str]", json.loads(places)) if places else ["it does not fit, in too many places to list"]


def _took_too_long() -> BackendError:
    return BackendError(
        ErrorKind.INVALID_OUTPUT,
        f"the answer cannot be checked against output_schema: that took more than {CPU_LIMIT} s, or too much memory; "
        "make the schema simpler or the answer smaller",
    )


def _start() -> subprocess.Popen[bytes]:
    found = importlib.util.find_spec("jsonschema_rs")
    home = str(Path(found.origin).parent.parent) if found is not None and found.origin else ""
    # Ctrl-C in a terminal reaches the processes of the terminal's group: the check goes on until this process ends it.
    return subprocess.Popen(  # noqa: S603 - our own program, no shell
        [sys.executable, "-I", "-S", str(Path(_schema_validator.__file__)), home, str(CPU_LIMIT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
