"""Speaking to an agent line by line, whoever holds its turn: by a file that only grows, which `_spoken.py` hands on.

A pipe would tell nobody what was written to it, nor how much of it: a process that takes the turn over would say things
twice, or half of them. What is in the file has been said. It needs no reader either: saying something never waits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from plait.backends.agents.acp._relay import END
from plait.backends.agents.acp.wire import Message, Step, decoded, encoded, name_of
from plait.backends.process.proctable import library

_PROGRAM = Path(__file__).with_name("_relay.py")
_SAID, _BELL = "said", "bell"


def spoken_command(folder: Path, seconds: float, command: Sequence[str]) -> list[str]:
    """`command`, started so that it can be spoken to through `folder`. If nobody says anything or rings for that many
    seconds, its input ends, and a few seconds later itself.
    """
    return [sys.executable, "-I", "-S", str(_PROGRAM), str(folder), str(int(seconds) + 1), library(), *command]


def said_in(folder: Path) -> list[Message]:
    """What was said so far, to the last whole line."""
    return said_from(folder, 0)[0]


def said_from(folder: Path, start: int) -> tuple[list[Message], int]:
    """What was said from that byte on, to the last whole line, and where the next one will begin."""
    try:
        with (folder / _SAID).open("rb", buffering=0) as file:
            file.seek(start)
            whole, end, _ = file.read().rpartition(b"\n")
    except OSError:
        return [], start
    messages = [message for line in whole.split(b"\n") if (message := decoded(line)) is not None]
    return messages, start + len(whole) + len(end)


class Speech:
    """What is said to the agent whose folder this is. Makes the files where there are none yet."""

    def __init__(self, folder: Path) -> None:
        self._said = folder / _SAID
        self._bell = folder / _BELL
        if not self._bell.exists():
            os.mkfifo(self._bell, 0o600)
        descriptor = os.open(self._said, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "rb") as file:
            self._rest = file.read().rpartition(b"\n")[2]
        """What a process that was killed has begun to say."""

    def say(self, messages: Sequence[Message]) -> None:
        """Say these."""
        for message in messages:
            self._write(encoded(message))
        if messages:
            self.ring()

    def end(self) -> None:
        """Nothing more will be said."""
        self._write(END)
        self.ring()

    def ring(self) -> None:
        """Somebody is there."""
        with suppress(OSError):  # nobody listens any more
            bell = os.open(self._bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(bell, b"!")
            finally:
                os.close(bell)

    def _write(self, words: bytes) -> None:
        if self._rest:
            words = words[len(self._rest) :] if words.startswith(self._rest) else b"\n" + words
            self._rest = b""
        descriptor = os.open(self._said, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            while words:
                words = words[os.write(descriptor, words) :]
        finally:
            os.close(descriptor)


class Said:
    """What has been said, and what is to be."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._next: dict[str, Message] = {}

    def before(self, messages: Iterable[Message]) -> None:
        """These have been said already."""
        self._said.update(map(name_of, messages))
        self._next = {name: message for name, message in self._next.items() if name not in self._said}

    def say(self, message: Message) -> None:
        """To be said, unless it has been."""
        name = name_of(message)
        if name not in self._said:
            self._next.setdefault(name, message)

    def take(self) -> list[Message]:
        """What is to be said now; from here on it has been."""
        messages = list(self._next.values())
        self._said.update(self._next)
        self._next = {}
        return messages

    def has(self, message: Message) -> bool:
        """Whether it has been said."""
        return name_of(message) in self._said

    def asked(self, step: Step) -> bool:
        """Whether that request has been made."""
        return _name(step) in self._said

    def asks(self, step: Step) -> bool:
        """Whether it has been made, or is to be."""
        return self.asked(step) or _name(step) in self._next


def _name(step: Step) -> str:
    return name_of({"method": "", "id": step.value})
