"""Send messages to an agent line by line, from any process that holds its turn: an append-only file, copied to the
agent by `_acp_relay.py`.

With a pipe, a process that adopts the turn could not see which messages were written, or how much of a message, and
would repeat messages in whole or in part. A message in the file counts as sent. Writing to the file never waits for a
reader.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from plait.backends.agents._acp_relay import END
from plait.backends.agents.acp_messages import AcpStep, Message, decoded, encoded, name_of
from plait.backends.process.process_table import library

_PROGRAM = Path(__file__).with_name("_acp_relay.py")
_SAID, _BELL = "said", "bell"


def relayed_command(folder: Path, seconds: float, command: Sequence[str]) -> list[str]:
    """Return `command` wrapped in the relay, so that messages can be sent through `folder`.

    After `seconds` without a message or a bell the agent's input ends; a few seconds later the agent is ended.
    """
    return [sys.executable, "-I", "-S", str(_PROGRAM), str(folder), str(int(seconds) + 1), library(), *command]


def sent_messages(folder: Path) -> list[Message]:
    """Return the messages sent so far, up to the last whole line."""
    return sent_messages_from(folder, 0)[0]


def sent_messages_from(folder: Path, start: int) -> tuple[list[Message], int]:
    """Return the messages sent from byte `start` on, up to the last whole line, and the position after that line."""
    try:
        with (folder / _SAID).open("rb", buffering=0) as file:
            file.seek(start)
            whole, end, _ = file.read().rpartition(b"\n")
    except OSError:
        return [], start
    messages = [message for line in whole.split(b"\n") if (message := decoded(line)) is not None]
    return messages, start + len(whole) + len(end)


class Outbox:
    """Messages to the agent of the call in `folder`. Creates the files if missing."""

    def __init__(self, folder: Path) -> None:
        self._said = folder / _SAID
        self._bell = folder / _BELL
        if not self._bell.exists():
            os.mkfifo(self._bell, 0o600)
        descriptor = os.open(self._said, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "rb") as file:
            self._rest = file.read().rpartition(b"\n")[2]
        """Unfinished line, left by a process that was killed while writing."""

    def send(self, messages: Sequence[Message]) -> None:
        """Send the messages."""
        for message in messages:
            self._write(encoded(message))
        if messages:
            self.ring()

    def end(self) -> None:
        """Send the end mark."""
        self._write(END)
        self.ring()

    def ring(self) -> None:
        """Ring the bell, to show the relay that a process is present."""
        with suppress(OSError):  # the relay has exited
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


class SentMessages:
    """The messages sent, and the messages to send."""

    def __init__(self) -> None:
        self._sent: set[str] = set()
        self._queued: dict[str, Message] = {}

    def restore(self, messages: Iterable[Message]) -> None:
        """Record messages sent by an earlier process."""
        self._sent.update(map(name_of, messages))
        self._queued = {name: message for name, message in self._queued.items() if name not in self._sent}

    def send(self, message: Message) -> None:
        """Queue a message, unless already sent."""
        name = name_of(message)
        if name not in self._sent:
            self._queued.setdefault(name, message)

    def take(self) -> list[Message]:
        """Return the messages to send now, and record the messages as sent."""
        messages = list(self._queued.values())
        self._sent.update(self._queued)
        self._queued = {}
        return messages

    def was_sent(self, message: Message) -> bool:
        """Return whether the message was sent."""
        return name_of(message) in self._sent

    def sent_step(self, step: AcpStep) -> bool:
        """Return whether the request of `step` was sent."""
        return _name(step) in self._sent

    def has_step(self, step: AcpStep) -> bool:
        """Return whether the request of `step` was sent or is queued."""
        return self.sent_step(step) or _name(step) in self._queued


def _name(step: AcpStep) -> str:
    return name_of({"method": "", "id": step.value})
