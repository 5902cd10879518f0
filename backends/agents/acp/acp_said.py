"""What is said to an agent in a turn: each message once, also where another process said the first of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from plait.backends.agents.acp.wire import Message, Step, name_of


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
