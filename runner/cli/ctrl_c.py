"""The first Ctrl-C, SIGTERM or SIGHUP stops a run in order; the second Ctrl-C or SIGTERM ends the process, also while
nothing of Python can run.

A handler of Python runs between two instructions of Python, and one of the event loop when the loop is free: neither
runs while a function of the user blocks the loop, or a library holds the interpreter. So the system itself has to end
the process. The flag SA_RESETHAND makes the system restore a signal's default action, which is to end the process, when
the signal is first delivered. Python cannot set the flag; the C library can.

The end is that of any kill: stored steps stay. The watchdog (`backends/process/child_process.py`) ends the agents that
die with this process, and the agents that this process was ending; a resume follows the others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType

import anyio
import anyio.abc

_ENDING = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"
_IS_MACOS = sys.platform == "darwin"
_RESET = 0x4 if _IS_MACOS else -0x80000000


async def stop_on_signal(
    stop: Callable[[], None],
    note: Callable[[str], None],
    at_shutdown: Callable[[], None] | None = None,
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    """Call `stop` at the first signal, or `at_shutdown`, if given, at a SIGTERM or SIGHUP; a second Ctrl-C or SIGTERM
    ends the process. A signal that is ignored from the start stays ignored: a shell ignores Ctrl-C for background jobs,
    and `nohup` ignores SIGHUP.
    """
    handled = [one for one in (*_ENDING, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    ending = [one for one in _ENDING if one in handled]
    stopping = False
    try:
        with anyio.open_signal_receiver(*handled) as signals:
            end_at_second(ending)
            task_status.started()
            async for first in signals:
                stopping = True
                # The first signal may be another one than the second.
                for number in ending:
                    signal.signal(number, signal.SIG_DFL)
                if signal.SIGHUP in handled:
                    signal.signal(signal.SIGHUP, _ignore_hangup)
                if sys.stderr.isatty():  # a live display hides the cursor, and a second signal leaves it hidden
                    with suppress(OSError):
                        os.write(2, _SHOW_CURSOR)
                note("stopping, and storing the state of the run; a second signal exits at once")
                (stop if at_shutdown is None or first == signal.SIGINT else at_shutdown)()
                await anyio.sleep_forever()
    finally:
        if stopping and signal.SIGHUP in handled:
            signal.signal(signal.SIGHUP, _ignore_hangup)


def _ignore_hangup(_number: int, _frame: FrameType | None) -> None:
    """Ignore SIGHUP. A closed terminal sends it twice, from the kernel and from the shell, and the second is no request
    to exit at once.
    """


class _Action(ctypes.Structure):
    """`struct sigaction` of macOS, and of Linux with glibc or musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint32 if _IS_MACOS else ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("rest", ctypes.c_ubyte * 64),
    )


def end_at_second(signals: Iterable[signal.Signals]) -> None:
    """Make the second delivery of each of `signals` end the process. The handlers have to be set before.

    On a system without `sigaction` nothing changes.
    """
    with suppress(AttributeError, OSError):
        sigaction = ctypes.CDLL(None).sigaction
        for number in signals:
            action = _Action()
            if sigaction(int(number), None, ctypes.byref(action)) == 0:
                action.flags |= _RESET
                sigaction(int(number), ctypes.byref(action), None)
