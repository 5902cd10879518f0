"""Turns with an agent that speaks the Agent Client Protocol: the I/O around `machine.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import anyio

from plait.backends.agents.acp_machine import AcpMachine
from plait.backends.agents.acp_messages import AcpStep, prompt_of
from plait.backends.agents.acp_outbox import Outbox, relayed_command, sent_messages
from plait.backends.agents.acp_permissions import Grant, marked, unmarked
from plait.backends.agents.agent_protocol import Call, Program, Reader
from plait.backends.agents.agent_sessions import Sessions, first_before, since
from plait.backends.agents.agent_transcript import UnreportedCall, earlier, exchanges
from plait.backends.agents.conversation import LAST_WORD, CliConversation
from plait.backends.agents.output_lines import read_line
from plait.backends.backend_protocol import ConversationRequest, Files, Reply
from plait.backends.json_fields import at
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Child
from plait.backends.turn_cancellation import when_cancelled
from plait.errors import BackendError
from plait.usage import NO_USAGE, Usage

_CANCEL = 1.0
"""Seconds for the agent to end a cancelled turn; after that, the agent is ended."""
_STOP = 10.0
"""Seconds for the agent to end a turn with a question. Data saved by then is available when the answer comes."""
_SLACK = 5.0
"""Seconds after a turn's timeout until the relay stops waiting for messages."""
_TELLING = 3
"""Number of prompts that identify a conversation, even if the agent has lost some."""
_GRANTED = "granted"


class AcpConversation(CliConversation):
    """A conversation with the agent called `name`, one process per turn. See `AcpBackend`."""

    def __init__(self, program: Program, name: str, request: ConversationRequest, files: Files) -> None:
        session_id, deed = unmarked(request.session_id)
        super().__init__(program, replace(request, session_id=session_id), files)
        self._sessions = Sessions(files.sessions, f"acp-{name}")
        self._grant = self._granted(deed)
        self._machine: AcpMachine | None = None

    async def send(self, prompt: str) -> Reply:
        """Implement `Conversation.send`. With an open question, the session id ends in `?` and an id of the request."""
        reply = await super().send(prompt)
        wanted = None if self._machine is None else self._machine.permission_request
        if reply.question is None or reply.session_id is None or wanted is None:
            return reply
        return replace(reply, session_id=marked(reply.session_id, wanted))

    async def _let_work(self, call: Call, reader: Reader, sent: str, cut: list[UnreportedCall]) -> Child:
        assert isinstance(reader, AcpMachine)
        machine = self._machine = reader
        until = self._until()
        machine.goals = replace(
            machine.goals,
            prompt=self._program.input_text(call, sent),
            grant=self._grant,
            holds=list(self._asked_before()) if self._request.resumes_interrupted and not self._first_call_done else (),
            earlier_prompts=self._earlier_prompts() if call.resume and not self._first_call_done else (),
        )
        async with AsyncExitStack() as held:
            child = await self._found(held, call) or await self._start(held, call, "", cut)
            outbox = Outbox(call.folder)
            machine.restore_sent(sent_messages(call.folder))
            await self._speak(child, machine, outbox, until)
            outbox.end()
            await child.wait(LAST_WORD)
        self._note_skipped(child)
        return child

    async def _speak(self, child: Child, machine: AcpMachine, outbox: Outbox, until: float) -> None:
        """Exchange messages with the agent until its last message, or until the patience for the agent ends."""
        patience = anyio.CancelScope()

        def on_line(line: bytes) -> bool:
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
                await child.follow(on_line, idle=self._program.idle_timeout, until=until)
        except BackendError as error:
            failure = error
        finally:
            if not machine.is_final and machine.permission_request is None:
                with anyio.CancelScope(shield=True):
                    await _cancel(child, machine, outbox)
        if failure is not None:
            raise failure

    def _words(self, call: Call) -> Sequence[str]:
        Outbox(call.folder)
        return relayed_command(call.folder, self._program.turn_timeout + _SLACK, super()._words(call))

    def _notes(self) -> Mapping[str, str]:
        return {} if self._grant is None else {_GRANTED: json.dumps([self._grant.action_id, self._grant.choice])}

    def _own(self, folder: Path, session_id: str | None, usage: Usage) -> Usage:
        """Return the cost of the call. ACP counts tokens by turn, cost by session."""
        if usage.cost_usd is None or session_id is None:
            return usage
        before = first_before(folder, self._sessions.spent(session_id) or NO_USAGE)
        self._sessions.note_spent(session_id, usage)
        # A killed agent may have lost a part of its count.
        cost = usage.cost_usd if usage.cost_usd < (before.cost_usd or 0.0) else since(usage, before).cost_usd
        return replace(usage, cost_usd=cost)

    def _earlier_prompts(self) -> Sequence[str]:
        """Return the longest prompts of the conversation so far; a short prompt may occur in any conversation."""
        return sorted((one.content for one in self._request.history if one.role == "user"), key=len)[-_TELLING:]

    def _asked_before(self) -> Iterator[str]:
        """Yield the prompts of earlier attempts."""
        for attempt in earlier(self._files.turn):
            for call in exchanges(attempt):
                yield from filter(None, map(prompt_of, sent_messages(call)))

    def _granted(self, deed: str | None) -> Grant | None:
        """Return the decision for this turn, made now or in the attempt that started the turn."""
        answer = self._request.answer
        if answer is not None:
            return Grant(deed, answer.value) if deed is not None and isinstance(answer.value, str) else None
        before = [self._files.turn] if self._request.attaches else list(earlier(self._files.turn))[:1]
        if not (self._request.attaches or self._request.resumes_interrupted):
            before = []
        return next((grant for attempt in before if (grant := _noted(attempt)) is not None), None)


def _noted(attempt: Path) -> Grant | None:
    for call in exchanges(attempt):
        known = read_manifest(call)
        with suppress(ValueError, TypeError, KeyError):
            deed, choice = json.loads(known.note[_GRANTED] if known is not None else "")
            return Grant(str(deed), str(choice))
    return None


async def _cancel(child: Child, machine: AcpMachine, outbox: Outbox) -> None:
    """Cancel the agent's turn, and wait briefly for the end of the turn."""

    def is_over(line: bytes) -> bool:
        events = read_line(line).events
        return any("method" not in event and at(event, "id") == AcpStep.PROMPT.value for event in events)

    machine.cancel()
    lines = machine.take()
    if lines:
        outbox.send(lines)
        with suppress(BackendError):
            await child.follow(is_over, idle=_CANCEL, until=anyio.current_time() + _CANCEL)
