"""Backend for every agent that speaks the Agent Client Protocol (ACP): goose, opencode, Qwen Code, Gemini CLI, and, by
an adapter, Claude Code and Codex. Tested versions are listed in docs/guides/agents.md.

Each turn starts the agent, and reopens the session made in the first turn. Permission requests are decided by the
backend's policy or by a person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from plait.backends.agents.acp_machine import AcpMachine, TurnGoals
from plait.backends.agents.acp_outbox import sent_messages
from plait.backends.agents.acp_permissions import PermissionPolicy, answer_prompt
from plait.backends.agents.acp_quirks import AcpQuirks, of_command
from plait.backends.agents.acp_turn import AcpConversation
from plait.backends.agents.agent_catalog import ACP, agent
from plait.backends.agents.agent_errors import NETWORK
from plait.backends.agents.agent_protocol import Call
from plait.backends.agents.cli_agent import CliBackend
from plait.backends.backend_protocol import ConversationRequest, Files
from plait.backends.prices import Billing


@dataclass(eq=False, kw_only=True)
class AcpBackend(CliBackend):
    """An agent that speaks ACP on its standard input and output, one process per turn.

    A cancelled turn is first announced to the agent, which has a second to end the turn. The session's id is known once
    the session is open, and reported once the prompt was sent.
    """

    kind: ClassVar[str] = ACP
    program: ClassVar[str] = ""
    adjustable: ClassVar[frozenset[str]] = frozenset({"model"})
    chooses_session: ClassVar[bool] = False

    command: Sequence[str] = ()  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Command to start the agent, such as ("goose", "acp"). The prompt is never part of the command."""
    model: str | None = None
    """Id or name of a model offered by the session. None leaves the choice to the agent."""
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
    def name(self) -> str:
        """The agent's name, as far as the command shows."""
        return self._agent.command or self.command[0].rpartition("/")[2]

    @property
    def install(self) -> str:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """Shell command to install the agent, if the agent is known."""
        known = agent(self.name)
        return known.install if known is not None else "install it"

    @property
    def billing(self) -> Billing:
        """The facts that decide the price of turns without a reported cost."""
        return Billing(self._agent.provider, self.model, sums_requests=True)

    @property
    def called(self) -> str:
        """The first word of the command."""
        return self.command[0]

    @property
    def can_fork(self) -> bool:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the agent is known to fork sessions. If not, a continuation uses the same session or gets the history
        as text.
        """
        return self._agent.forks

    @property
    def passes(self) -> Sequence[str]:
        """Names of the variables for network access and, for known agents, for keys and settings."""
        return (*NETWORK, *self._agent.passes)

    def arguments(self, call: Call) -> Sequence[str]:  # noqa: ARG002 - other agents need it
        """Return the words of the command after the first."""
        return self.command[1:]

    def environment(self, call: Call) -> Mapping[str, str]:  # noqa: ARG002 - other agents need it
        """Return the variables known to help the agent."""
        return self._agent.sets

    def input_text(self, call: Call, prompt: str) -> str:
        """Return the prompt, or a person's decision in words."""
        return prompt if call.answer is None else answer_prompt(prompt)

    def reader(self, call: Call) -> AcpMachine:
        """Return a reader that includes the messages already sent, as recorded in the call's files."""
        goals = TurnGoals(str(self.folder), self.model, self.mode, self.auth_method, self.permissions)
        machine = AcpMachine(call, goals, self.clock(call))
        machine.restore_sent(sent_messages(call.folder))
        return machine

    def conversation(self, request: ConversationRequest, files: Files) -> AcpConversation:
        """Return a conversation that uses `files`."""
        return AcpConversation(self, self.name, request, files)

    @property
    def _agent(self) -> AcpQuirks:
        return of_command(self.command)
