"""Every agent that speaks the Agent Client Protocol (ACP): goose, opencode, Qwen Code, Gemini CLI, and by an adapter
Claude Code and Codex. Tested versions are in docs/agents.md.

The agent is started for each turn, and opens the session again that it made for the first one. What it asks for
permission to do is decided here, or by a person.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from plait.backends.agents.acp.conversation import AcpConversation
from plait.backends.agents.acp.machine import Aims, Talk
from plait.backends.agents.acp.outbox import said_in
from plait.backends.agents.acp.permissions import Policy, told
from plait.backends.agents.acp.quirks import Agent, of_command
from plait.backends.agents.backend import CliBackend
from plait.backends.agents.catalog import ACP
from plait.backends.agents.error_kinds import NETWORK
from plait.backends.agents.protocol import Call
from plait.backends.protocol import Files, Opening


@dataclass(eq=False, kw_only=True)
class AcpBackend(CliBackend):
    """An agent that speaks ACP on its standard input and output, one process a turn. For what all agents have in common
    see `CliBackend`.

    `command` starts the agent, such as ("goose", "acp"); the prompt is never part of it. `model` and `mode` are ids or
    names of those that its sessions offer, its own choice for None. `auth_method` is the id of a way to log in, for
    agents that are not logged in yet.

    `permissions` says what becomes of what the agent asks for permission to do. "deny": it is not allowed, and goes on
    without. "allow": it is. "ask": the turn ends with a question, and the task waits. The answer is the name of one of
    the options that the agent offers, and may come at any time, in any process: the agent hears of it in the same
    session, and the very same use of a tool is decided so in that turn; another one is asked about anew. What an agent
    does without asking is up to its own settings, and to `mode`.

    A cancelled turn is told so first, and has a second to end. Of a session, the id is known once it is open, and
    reported when the prompt has been said in it. `now` tells the Unix time.
    """

    kind: ClassVar[str] = ACP
    program: ClassVar[str] = ""
    install: ClassVar[str] = "install it"
    chooses_session: ClassVar[bool] = False

    command: Sequence[str] = ()  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    model: str | None = None
    mode: str | None = None
    auth_method: str | None = None
    permissions: Policy = "deny"
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ValueError('command is a list of words that start an agent, such as ["goose", "acp"]')
        if self.permissions not in {"deny", "allow", "ask"}:
            raise ValueError(f'permissions is "deny", "allow" or "ask", not {self.permissions!r}')

    @property
    def name(self) -> str:
        """What the agent is called, as far as its command tells."""
        return self._agent.command or self.command[0].rpartition("/")[2]

    @property
    def called(self) -> str:
        """The first word of the command."""
        return self.command[0]

    @property
    def can_fork(self) -> bool:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the agent is known to branch sessions off; others go on in the same one, or are told it as text."""
        return self._agent.forks

    @property
    def passes(self) -> Sequence[str]:
        """How the network is reached, and, for agents that are known, their keys and settings."""
        return (*NETWORK, *self._agent.passes)

    def arguments(self, call: Call) -> Sequence[str]:  # noqa: ARG002 - other agents need it
        """The rest of the command."""
        return self.command[1:]

    def environment(self, call: Call) -> Mapping[str, str]:  # noqa: ARG002 - other agents need it
        """What is known to do a called agent good."""
        return self._agent.sets

    def says(self, call: Call, prompt: str) -> str:
        """The prompt, or what a person has decided."""
        return prompt if call.answer is None else told(prompt)

    def reader(self, call: Call) -> Talk:
        """The turn as far as its files tell."""
        aims = Aims(str(self.folder), self.model, self.mode, self.auth_method, self.permissions)
        talk = Talk(call, aims, self.now)
        talk.has_said(said_in(call.folder))
        return talk

    def conversation(self, opening: Opening, files: Files) -> AcpConversation:
        """A conversation with its files there."""
        return AcpConversation(self, self.name, opening, files)

    @property
    def _agent(self) -> Agent:
        return of_command(self.command)
