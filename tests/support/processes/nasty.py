"""Children that are hard to be rid of, or to read from: `python -I -S nasty.py NAME DESCRIPTOR`.

They and all that they start hold the descriptor open: it is the end of a pipe, which ends when the last of them is
gone. Most say "ready" when they are at their worst. Each ends by itself after a while.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable

LIFE = 300.0  # seconds
_PR_SET_DUMPABLE = 4


def deaf() -> None:
    _ignore()
    _say("ready")
    _live()


def escapes() -> None:
    """A stray in a session of its own, whose parent is gone."""
    _start_stray(_ignored_life)
    _say("ready")
    _live()


def vanishes() -> None:
    """The same, without its environment: another program, and nothing that it has inherited but descriptors."""
    _wait_for_mark()
    _start_stray(_cleared)
    _say("ready")
    _live()


def leaves_a_vanished() -> None:
    """The same, and its starter is over."""
    _wait_for_mark()
    _start_stray(_cleared)
    _say("ready")


def cleared() -> None:
    """A program with no environment, in a session of its own, that still has its parent."""
    _start(_cleared_in_session)
    _say("ready")
    _live()


def orphans() -> None:
    """A program with no environment, whose parent is gone, in the session that it was born in."""
    _start(lambda: _start(_cleared))
    os.wait()
    _say("ready")
    _live()


def hides() -> None:
    """Nobody of its own user may look at its environment."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _start_stray(_ignored_life)
    _say("ready")
    _live()


def bears() -> None:
    """A new child all the time, each in a session of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for born in range(100):
        _start_stray(_ignored_life)
        if born == 5:
            _say("ready")
    _live()


def runs_away() -> None:
    """One process after the other in sessions of their own, each gone as soon as it has started the next one."""
    _ignore()
    if not os.fork():
        for _ in range(3000):
            os.setsid()
            time.sleep(0.01)
            if os.fork():
                os._exit(0)
        os._exit(0)
    _say("ready")
    _live()


def guards_itself() -> None:
    """Two that bring each other back."""
    _ignore()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _start(_keeper)
    _say("ready")
    _live()


def _keeper() -> None:
    until = time.monotonic() + LIFE
    while time.monotonic() < until:
        born = os.fork()
        if not born:
            os.setsid()
            _ignored_life()
        os.waitpid(born, 0)


def floods() -> None:
    _say("ready")
    for _ in range(100):
        os.write(1, b"all work and no play makes a dull day\n" * 27_000)


def many_lines() -> None:
    """Twice as much as its reader may take, and some more."""
    _write_mebibytes(128)


def gigabyte() -> None:
    _write_mebibytes(1024)


def _write_mebibytes(count: int) -> None:
    for _ in range(count):
        os.write(1, (b"x" * 1023 + b"\n") * 1024)


def long_line() -> None:
    os.write(1, b"before\n")
    for _ in range(100):
        os.write(1, b"x" * 2**20)
    os.write(1, b"\nafter\nready\n")


def holds() -> None:
    """Its output is held open when it is over."""
    _start_stray(_ignored_life)
    _say("ready")


def goes_on_writing() -> None:
    """Its output grows when it is over."""
    _start_stray(_writes)
    _say("ready")


def _writes() -> None:
    until = time.monotonic() + LIFE
    while time.monotonic() < until:
        os.write(1, b"stray\n")
        time.sleep(0.001)


def counts() -> None:
    """Half of its work, and the other half when there is a file `go` in its folder."""
    for number in range(1000):
        _say(str(number))
    _say("ready")
    _wait_for_go()
    for number in range(1000, 2000):
        _say(str(number))


def _wait_for_go() -> None:
    until = time.monotonic() + LIFE
    while not os.access("go", os.F_OK) and time.monotonic() < until:
        time.sleep(0.01)


def never_reads() -> None:
    _say("ready")
    _live()


def closes() -> None:
    _say("ready")
    for descriptor in range(3):
        os.close(descriptor)
    _live()


def cleans() -> None:
    """It takes its time to end when it is asked to."""
    signal.signal(signal.SIGTERM, lambda *_: _say("asked"))
    _say("ready")
    signal.pause()
    time.sleep(0.1)
    _say("cleaned")


def empties() -> None:
    """Its own output, as a tool does that writes to /dev/stdout, when there is a file `go` in its folder."""
    _say("x" * 1000)
    _wait_for_go()
    os.close(os.open("/dev/stdout", os.O_WRONLY | os.O_TRUNC))
    _say("ready")
    _live()


def dies() -> None:
    os._exit(3)


def dies_by_signal() -> None:
    _say("ready")
    os.kill(os.getpid(), signal.SIGSEGV)


def rubbish() -> None:
    os.write(1, bytes(range(256)) * 4 + b"\n\0\0\n\xff\xfe\nready\n\0 no end")


def regroups() -> None:
    """Not in the group that it was started in."""
    _start(_regrouped)
    _say("ready")
    _live()


def _regrouped() -> None:
    os.setpgid(0, 0)
    _ignored_life()


def stopped() -> None:
    """It, and what it has started, hears of no signal."""
    _start(_stops)
    _say("ready")
    _stops()


def _stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    _live()


def _wait_for_mark() -> None:
    """A program takes its time to start; on a busy machine, whoever started it may take more."""
    locks = 10
    until = time.monotonic() + LIFE
    while resource.getrlimit(locks)[0] == resource.RLIM_INFINITY and time.monotonic() < until:
        time.sleep(0.001)


def _start(work: Callable[[], None]) -> None:
    """In a child, which is at it when this returns."""
    reading, writing = os.pipe()
    if not os.fork():
        os.close(reading)
        os.set_inheritable(writing, False)  # the end of the file: this has happened, or another program is run
        if work not in {_cleared, _cleared_in_session}:
            os.close(writing)
        work()
        os._exit(0)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)


def _start_stray(work: Callable[[], None]) -> None:
    """The same in a grandchild in a session of its own, whose parent is over."""

    def between() -> None:
        os.setsid()
        _start(work)

    _start(between)
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        os.wait()


def _cleared_in_session() -> None:
    os.setsid()
    _cleared()


def _cleared() -> None:
    os.execve("/bin/sleep", ["sleep", str(int(LIFE))], {})


def _ignored_life() -> None:
    _ignore()
    _live()


def _ignore() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _live() -> None:
    time.sleep(LIFE)


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[2]), True)
    globals()[sys.argv[1]]()
