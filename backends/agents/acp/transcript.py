"""A turn with an agent that speaks ACP, as somebody hears it who only listens: what `plait log` tells of it.

The agent's output alone does not say what it was answered when it asked for permission; what was said to it does. The
two are files without times: an answer that is not there yet is looked for again with the agent's next message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from plait.backends.agents.acp.machine import Aims, Talk
from plait.backends.agents.acp.outbox import said_from
from plait.backends.agents.acp.permissions import Wish, wish_of
from plait.backends.agents.acp.wire import Message, answer, name_of
from plait.backends.agents.protocol import Call
from plait.backends.json_fields import at, text
from plait.backends.protocol import JsonValue, Output


class Overheard(Talk):
    """A `Reader` of the call with its files in `folder`. It shows what `Talk` does, but decides nothing, and tells what
    was decided.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(Call(folder), Aims(""), lambda: 0.0)
        self._place = 0
        self._answers: dict[str, Message] = {}
        self._wishes: dict[str, Wish] = {}
        """Not known to be answered."""

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """One message of the agent's; what it shows, and before that what it had been answered meanwhile."""
        if "method" in event and not self._wishes:
            return super().read(event)
        self._listen()
        return [*self._answered(), *super().read(event)]

    def _asked(self, identity: JsonValue, params: JsonValue) -> None:
        wish = wish_of(params)
        self._shown += self._updates.tool(at(params, "toolCall"))
        self._show("waiting", wish.question.text)
        self._wishes[name_of(answer(identity, None))] = wish
        self._listen()
        self._shown += self._answered()

    def _listen(self) -> None:
        """Hear what was said to it meanwhile."""
        messages, self._place = said_from(self._call.folder, self._place)
        self.has_said(messages)
        self._answers.update({name_of(message): message for message in messages if "method" not in message})

    def _answered(self) -> Iterator[Output]:
        for name in [name for name in self._wishes if name in self._answers]:
            yield Output("notice", _told(self._wishes.pop(name), self._answers.pop(name)), self.usage)


def _told(wish: Wish, message: Message) -> str:
    chosen = text(message, "result", "outcome", "optionId")
    option = next((option for option in wish.options if option.identity == chosen), None)
    if option is None:
        return f"not allowed as yet: {wish.about}"
    return f"{'not allowed' if option.kind.startswith('reject') else 'allowed'}: {wish.about} ({option.name})"
