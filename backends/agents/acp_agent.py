"""Backend for every agent that speaks the Agent Client Protocol (ACP): goose, opencode, Qwen Code, Gemini CLI, and, by
an adapter, Claude Code and Codex. Tested versions are listed in docs/guides/agents.md.

Each turn starts the agent, and reopens the session made in the first turn. Permission requests are decided by the
backend's policy or by a person.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import ClassVar

import anyio

from plait.backends.agents._acp_relay import END
from plait.backends.agents.acp_machine import (
    AcpMachine,
    Message,
    PermissionPolicy,
    PermissionRequest,
    TurnGoals,
    answer,
    answer_prompt,
    name_of,
    permission_request,
    prompt_of,
)
from plait.backends.agents.agent_catalog import ACP, CatalogEntry, acp_agent_of
from plait.backends.agents.agent_output import AgentCall, Reader, UnreportedCall, earlier, exchanges
from plait.backends.agents.cli_agent import LAST_WORD, AgentBackend, AgentConversation, Sessions, first_before, marked
from plait.backends.backend_protocol import ConversationRequest, Files, Output, Reply
from plait.backends.json_fields import at, since, text
from plait.backends.prices import Billing
from plait.backends.process.child_process import Child
from plait.backends.process.process_table import library
from plait.backends.running_turn import when_cancelled
from plait.errors import BackendError
from plait.json_form import JsonValue
from plait.safe_text import parse_json
from plait.usage import NO_USAGE, Usage


@dataclass(eq=False, kw_only=True)
class AcpBackend(AgentBackend):
    """An agent that speaks ACP on its standard input and output, one process per turn.

    A cancelled turn is first announced to the agent, which has a second to end the turn. The session's id is known once
    the session is open, and reported once the prompt was sent.
    """

    kind: ClassVar[str] = ACP
    adjustable: ClassVar[frozenset[str]] = frozenset({"model", "cwd", "env", "shared"})
    chooses_session: ClassVar[bool] = False

    command: Sequence[str] = ()  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Command to start the agent, such as ("goose", "acp"). The prompt is never part of the command."""
    mode: str | None = None
    """Id or name of a mode offered by the session. None leaves the choice to the agent."""
    auth_method: str | None = None
    """Id of a login method, for agents that are not logged in yet."""
    permissions: PermissionPolicy = "deny"
    """Decision on permission requests. "deny": refuse, and the agent continues without. "allow": allow. "ask": end the
    turn with a question, and the task waits.

    The answer to the question is the name of one of the options offered by the agent, and may come at any time, in any
    process. The next turn passes the answer to the agent in the same session and decides the same tool use accordingly;
    any other tool use is a new question. Actions without a request depend on the agent's own settings and on `mode`.
    """

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ValueError(f'command must be a list of words, such as ["goose", "acp"], not {self.command!r}')
        if self.permissions not in {"deny", "allow", "ask"}:
            raise ValueError(f'permissions must be "deny", "allow" or "ask", not {self.permissions!r}')

    @property
    def entry(self) -> CatalogEntry:
        """What the catalogue knows about the agent, as far as the command shows which it is."""
        return acp_agent_of(self.command)

    @property
    def name(self) -> str:
        """The agent's name, as far as the command shows."""
        return self.entry.program or self.command[0].rpartition("/")[2]

    @property
    def called(self) -> str:
        """The first word of the command."""
        return self.command[0]

    @property
    def billing(self) -> Billing:
        """The facts that decide the price of turns without a reported cost."""
        return Billing(self.entry.provider, self.model, sums_requests=True)

    @property
    def can_fork(self) -> bool:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the agent is known to fork sessions. If not, a continuation uses the same session or gets the history
        as text.
        """
        return self.entry.forks

    def arguments(self, call: AgentCall) -> Sequence[str]:  # noqa: ARG002 - other agents need it
        """Return the words of the command after the first."""
        return self.command[1:]

    def input_text(self, call: AgentCall, prompt: str) -> str:
        """Return the prompt, or a person's decision in words."""
        return prompt if call.answer is None else answer_prompt(prompt)

    def reader(self, call: AgentCall) -> AcpMachine:
        """Return a reader that includes the messages already sent, as recorded in the call's files."""
        goals = TurnGoals(str(self.folder), self.model, self.mode, self.auth_method, self.permissions)
        machine = AcpMachine(call, goals, self.clock(call))
        machine.restore_sent(sent_messages(call.folder))
        return machine

    def conversation(self, request: ConversationRequest, files: Files, *, guarded: bool) -> AcpConversation:
        """Return a conversation that uses `files`. A `guarded` agent ends with this process."""
        return AcpConversation(self, request, files, guarded=guarded)

    @classmethod
    def transcript_reader(cls, folder: Path) -> AcpTranscriptReader:
        """Return a reader that follows a turn without taking part."""
        return AcpTranscriptReader(folder)


_CANCEL = 1.0
"""Seconds for the agent to end a cancelled turn; after that, the agent is ended."""
_STOP = 10.0
"""Seconds for the agent to end a turn with a question. Data saved by then is available when the answer comes."""
_SLACK = 5.0
"""Seconds after a turn's timeout until the relay stops waiting for messages."""
_TELLING = 3
"""Number of prompts that identify a conversation, even if the agent has lost some."""


class AcpConversation(AgentConversation):
    """A conversation with an agent, one process per turn. See `AcpBackend`."""

    def __init__(self, backend: AcpBackend, request: ConversationRequest, files: Files, *, guarded: bool) -> None:
        super().__init__(backend, request, files, guarded=guarded)
        self._sessions = Sessions(files.sessions, f"acp-{backend.name}")
        kind, _, action = self._question.partition("-")
        choice = self._answer if kind == "asks" else None
        self._granted = {action: choice} if isinstance(choice, str) else {}
        self._machine: AcpMachine | None = None

    async def send(self, prompt: str) -> Reply:
        """Implement `Conversation.send`. With an open question, the session id ends in `?` and an id of the request."""
        reply = await super().send(prompt)
        permission = None if self._machine is None else self._machine.permission_request
        if reply.question is None or reply.session_id is None or permission is None:
            return reply
        return replace(reply, session_id=marked(reply.session_id, f"asks-{permission.action_id}"))

    async def _let_work(self, call: AgentCall, reader: Reader, sent: str, cut: list[UnreportedCall]) -> Child:
        assert isinstance(reader, AcpMachine)
        machine = self._machine = reader
        until = self._until()
        is_first = not self._first_call_done
        # The longest prompts of the conversation so far: a short prompt may occur in any conversation.
        prompts = sorted((one.content for one in self._request.history if one.role == "user"), key=len)[-_TELLING:]
        machine.goals = replace(
            machine.goals,
            prompt=self._backend.input_text(call, sent),
            granted=self._granted,
            holds=list(self._earlier_prompts()) if self._request.resumes_interrupted and is_first else (),
            earlier_prompts=prompts if call.resume and is_first else (),
        )
        async with self._child(call, "", cut) as child:
            outbox = Outbox(call.folder)
            machine.restore_sent(sent_messages(call.folder))
            await self._speak(child, machine, outbox, until)
            outbox.end()
            await child.wait(LAST_WORD)
        return child

    async def _speak(self, child: Child, machine: AcpMachine, outbox: Outbox, until: float) -> None:
        """Exchange messages with the agent until its last message, or until the patience for the agent ends."""
        patience = anyio.CancelScope()
        lines = 0

        def on_line(line: bytes) -> bool:
            nonlocal lines
            lines += 1
            self._on_line(machine, line)
            outbox.send(machine.take())
            self._note_session(machine.session_id)
            if machine.permission_request is not None:
                patience.deadline = min(patience.deadline, anyio.current_time() + _STOP)
            return machine.is_final

        outbox.send(machine.take())
        outbox.ring()  # announces the presence of this process, which may have adopted the turn
        failure: BackendError | None = None
        try:
            with patience, when_cancelled(patience.cancel):
                await child.follow(on_line, idle=self._backend.idle_timeout, until=until)
        except BackendError as error:
            failure = error
        finally:
            if not machine.is_final and machine.permission_request is None:
                # Cancel the agent's turn, and wait briefly for its end.
                machine.cancel()
                if messages := machine.take():
                    outbox.send(messages)
                    new = count(1 - lines)  # the lines are read from the first again
                    with anyio.CancelScope(shield=True), suppress(BackendError):
                        await child.follow(
                            lambda line: next(new) > 0 and on_line(line),
                            idle=_CANCEL,
                            until=anyio.current_time() + _CANCEL,
                        )
        if failure is not None:
            raise failure

    def _words(self, call: AgentCall) -> Sequence[str]:
        Outbox(call.folder)
        return relayed_command(call.folder, self._backend.turn_timeout + _SLACK, super()._words(call))

    def _own(self, folder: Path, session_id: str | None, usage: Usage) -> Usage:
        """Return the cost of the call. ACP counts tokens by turn, cost by session."""
        if usage.cost_usd is None or session_id is None:
            return usage
        before = first_before(folder, self._sessions.spent(session_id) or NO_USAGE)
        self._sessions.note_spent(session_id, usage)
        # A killed agent may have lost a part of its count.
        cost = usage.cost_usd if usage.cost_usd < (before.cost_usd or 0.0) else since(usage, before).cost_usd
        return replace(usage, cost_usd=cost)

    def _earlier_prompts(self) -> Iterator[str]:
        """Yield the prompts of earlier attempts."""
        for attempt in earlier(self._files.turn):
            for call in exchanges(attempt):
                yield from filter(None, map(prompt_of, sent_messages(call)))


class AcpTranscriptReader(AcpMachine):
    """Follows the call with its files in `folder` without taking part, for `plait log`: shows the outputs of
    `AcpMachine` and the decisions, and decides nothing.

    The agent's output does not contain the answers to permission requests; the file of messages to the agent does.
    Neither file has times: a missing answer is looked up again with the agent's next message.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(AgentCall(folder), TurnGoals(""), lambda: 0.0)
        self._position = 0
        self._answers: dict[str, Message] = {}
        self._requests: dict[str, PermissionRequest] = {}
        """Requests without a known answer."""

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one message of the agent, and return its outputs, preceded by decisions made in the meantime."""
        if "method" in event and not self._requests:
            return super().read(event)
        self._listen()
        return [*self._decisions(), *super().read(event)]

    def _permission_requested(self, identity: JsonValue, params: JsonValue) -> None:
        request = permission_request(params)
        self._outputs += self._tool(at(params, "toolCall"))
        self._show("waiting", request.question.text)
        self._requests[name_of(answer(identity, None))] = request
        self._listen()
        self._outputs += self._decisions()

    def _listen(self) -> None:
        """Read the messages sent to the agent in the meantime."""
        messages, self._position = sent_messages_from(self._call.folder, self._position)
        self.restore_sent(messages)
        self._answers.update({name_of(message): message for message in messages if "method" not in message})

    def _decisions(self) -> Iterator[Output]:
        for name in [name for name in self._requests if name in self._answers]:
            request, chosen = self._requests.pop(name), text(self._answers.pop(name), "result", "outcome", "optionId")
            option = next((option for option in request.options if option.identity == chosen), None)
            if option is None:
                decision = f"not allowed as yet: {request.about}"
            else:
                verb = "not allowed" if option.kind.startswith("reject") else "allowed"
                decision = f"{verb}: {request.about} ({option.name})"
            yield Output("notice", decision, self.usage)


# Messages to the agent, sent line by line from any process that holds its turn: an append-only file, copied to the
# agent by `_acp_relay.py`. With a pipe, a process that adopts the turn could not see which messages were written, or
# how much of a message, and would repeat messages in whole or in part. A message in the file counts as sent. Writing to
# the file never waits for a reader.

_PROGRAM = Path(__file__).with_name("_acp_relay.py")
_MESSAGES, _BELL = "messages", "bell"


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
        with (folder / _MESSAGES).open("rb", buffering=0) as file:
            file.seek(start)
            whole, end, _ = file.read().rpartition(b"\n")
    except OSError:
        return [], start
    messages = list[Message]()
    for line in whole.split(b"\n"):
        with suppress(ValueError):
            message = parse_json(line.decode())
            if isinstance(message, dict):
                messages.append(message)
    return messages, start + len(whole) + len(end)


class Outbox:
    """Messages to the agent of the call in `folder`. Creates the files if missing."""

    def __init__(self, folder: Path) -> None:
        self._messages = folder / _MESSAGES
        self._bell = folder / _BELL
        if not self._bell.exists():
            os.mkfifo(self._bell, 0o600)
        descriptor = os.open(self._messages, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "rb") as file:
            self._rest = file.read().rpartition(b"\n")[2]
        """Unfinished line, left by a process that was killed while writing."""

    def send(self, messages: Sequence[Message]) -> None:
        """Send the messages."""
        for message in messages:
            self._write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
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
        descriptor = os.open(self._messages, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            while words:
                words = words[os.write(descriptor, words) :]
        finally:
            os.close(descriptor)
