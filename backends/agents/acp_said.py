"""What is said to an agent in a turn: each message once, also where another process said the first of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from backends.agents.acp_wire import Message, Step, name_of
from backends.values import value


@value
class Line:
    """Something to be said, not before a moment in Unix time."""

    message: Message
    not_before: float | None = None


class Said:
    """What has been said, and what is to be."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._next: dict[str, Line] = {}

    def before(self, messages: Iterable[Message]) -> None:
        """These have been said already."""
        self._said.update(name_of(message) for message in messages)
        self._next = {name: line for name, line in self._next.items() if name not in self._said}

    def say(self, message: Message, not_before: float | None = None) -> None:
        """To be said, unless it has been."""
        name = name_of(message)
        if name not in self._said:
            self._next.setdefault(name, Line(message, not_before))

    def take(self) -> list[Line]:
        """What is to be said now; from here on it has been."""
        lines, self._next = list(self._next.values()), {}
        self._said.update(name_of(line.message) for line in lines)
        return lines

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
