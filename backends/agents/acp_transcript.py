"""Follow a turn with an agent that speaks ACP without taking part, for `plait log`.

The agent's output does not contain the answers to permission requests; the file of messages to the agent does. Neither
file has times: a missing answer is looked up again with the agent's next message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from plait.backends.agents.acp_machine import AcpMachine, TurnGoals
from plait.backends.agents.acp_messages import Message, answer, name_of
from plait.backends.agents.acp_outbox import sent_messages_from
from plait.backends.agents.acp_permissions import PermissionRequest, permission_request
from plait.backends.agents.agent_protocol import Call
from plait.backends.backend_protocol import Output
from plait.backends.json_fields import at, text
from plait.json_form import JsonValue


class AcpTranscriptReader(AcpMachine):
    """A `Reader` of the call with its files in `folder`. Shows the outputs of `AcpMachine` and the decisions, and
    decides nothing.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(Call(folder), TurnGoals(""), lambda: 0.0)
        self._place = 0
        self._answers: dict[str, Message] = {}
        self._requests: dict[str, PermissionRequest] = {}
        """Requests without a known answer."""

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one message of the agent, and return its outputs, preceded by decisions made in the meantime."""
        if "method" in event and not self._requests:
            return super().read(event)
        self._listen()
        return [*self._answered(), *super().read(event)]

    def _permission_requested(self, identity: JsonValue, params: JsonValue) -> None:
        wanted = permission_request(params)
        self._shown += self._updates.tool(at(params, "toolCall"))
        self._show("waiting", wanted.question.text)
        self._requests[name_of(answer(identity, None))] = wanted
        self._listen()
        self._shown += self._answered()

    def _listen(self) -> None:
        """Read the messages sent to the agent in the meantime."""
        messages, self._place = sent_messages_from(self._call.folder, self._place)
        self.restore_sent(messages)
        self._answers.update({name_of(message): message for message in messages if "method" not in message})

    def _answered(self) -> Iterator[Output]:
        for name in [name for name in self._requests if name in self._answers]:
            yield Output("notice", _told(self._requests.pop(name), self._answers.pop(name)), self.usage)


def _told(wanted: PermissionRequest, message: Message) -> str:
    chosen = text(message, "result", "outcome", "optionId")
    option = next((option for option in wanted.options if option.identity == chosen), None)
    if option is None:
        return f"not allowed as yet: {wanted.about}"
    return f"{'not allowed' if option.kind.startswith('reject') else 'allowed'}: {wanted.about} ({option.name})"
