"""Ends the process at a second Ctrl-C or SIGTERM, also while nothing of Python can run.

A handler of Python runs between two instructions of Python, and one of the event loop when the loop is free: neither
runs while a function of the user blocks the loop, or a library holds the interpreter. So the system itself has to end
the process. The flag SA_RESETHAND makes the system restore a signal's default action, which is to end the process, when
the signal is first delivered. Python cannot set the flag; the C library can.

The end is that of any kill: stored steps stay. The watchdog (`backends/process/watchdog.py`) ends the agents that die
with this process, and the agents that this process was ending; a resume follows the others.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

_IS_MACOS = sys.platform == "darwin"
_RESET = 0x4 if _IS_MACOS else -0x80000000


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
