"""Start an agent and pass messages to its standard input, line by line; see acp_agent.py. Run by path, in a bare
interpreter: `_acp_relay.py FOLDER SECONDS LIBRARY COMMAND...`. LIBRARY is `process_table.library()`.

The process forks. The parent becomes the agent, with a pipe as its standard input. The child copies the file `messages`
in the folder, which any process may extend, to the pipe. Copying ends when the agent exits, when the file has the end
mark, or when no message and no bell arrives for SECONDS: no process is expected to return then, and an agent that does
not exit at the end of its input is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

END = b"\x04"
"""End mark: no further messages. JSON never contains this byte."""
_GRACE = 5.0  # seconds from the end of input to the end of the agent


def main() -> NoReturn:
    folder, seconds, library, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.dup2(write_end, 1)
        for descriptor in (read_end, write_end):
            os.close(descriptor)
        _relay_messages(folder, seconds, library)
        os._exit(0)
    os.dup2(read_end, 0)
    for descriptor in (read_end, write_end):
        os.close(descriptor)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # this interpreter ignores the signal, and programs inherit that
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell; the command is the user's own
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _relay_messages(folder: Path, seconds: int, library: str) -> None:
    signal.signal(signal.SIGALRM, _time_up)
    try:
        _copy(folder, seconds)
    except BrokenPipeError:  # the agent has ended
        return
    except TimeoutError:
        os.close(1)
        agent, end = os.getppid(), time.monotonic() + _GRACE
        while os.getppid() == agent and time.monotonic() < end:
            time.sleep(0.1)
        _kill(folder, library)


def _time_up(*_: object) -> NoReturn:
    raise TimeoutError


def _copy(folder: Path, seconds: int) -> None:
    # Open for reading and writing, so that end of file never occurs when a writer closes the bell.
    bell = os.open(folder / "bell", os.O_RDWR | os.O_NONBLOCK)
    messages = os.open(folder / "messages", os.O_RDONLY)
    signal.alarm(seconds)
    while True:
        piece = os.read(messages, 65536)
        if not piece:
            _wait(bell)
            signal.alarm(seconds)  # a process is present, even without a message
            continue
        signal.alarm(seconds)
        words, end, _ = piece.partition(END)
        _write(words)
        if end:
            return


def _wait(bell: int) -> None:
    """Wait until the bell rings. Raises BrokenPipeError if the agent exits."""
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    poll.register(1, 0)
    if any(descriptor == 1 for descriptor, _ in poll.poll()):
        raise BrokenPipeError
    os.read(bell, 65536)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _kill(folder: Path, library: str) -> None:
    """Kill all processes of the turn except this process."""
    sys.path += [str(Path(__file__).parents[1] / "process"), *filter(None, [library])]
    from process_table import ProcessTag, kill_tree  # type: ignore[import-not-found]  # noqa: PLC0415

    manifest = json.loads((folder / "child.json").read_bytes())
    kill_tree([ProcessTag(manifest["marker"], manifest["pid"], manifest["started"])], _GRACE)


if __name__ == "__main__":
    main()
