"""Gemini CLI (`gemini -o stream-json`), run for one turn at a time. Tested with 0.61.0.

The last event is `result`. The exit status is 0 after a signal, and an HTTP status, cut to 8 bits, after an error. The
session drops the prompt of a failed turn, and keeps the prompt of an interrupted turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

from plait.backends.agents.backend import CliBackend
from plait.backends.agents.error_kinds import NETWORK
from plait.backends.agents.gemini.reader import GeminiReader
from plait.backends.agents.protocol import Call
from plait.backends.prices import Billing
from plait.backends.process.private import private_file
from plait.backends.text import check_base_url

_PASSES = (
    "GEMINI_API_KEY",
    "GEMINI_CLI_HOME",
    "GEMINI_MODEL",
    "GOOGLE_API_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_CLOUD_LOCATION",
    "GOOGLE_CLOUD_PROJECT",
    "GOOGLE_GEMINI_BASE_URL",
    "GOOGLE_GENAI_USE_GCA",
    "GOOGLE_GENAI_USE_VERTEXAI",
    "GOOGLE_VERTEX_BASE_URL",
    *NETWORK,
)


@dataclass(eq=False, kw_only=True)
class GeminiBackend(CliBackend):
    """Gemini CLI, run as `gemini`, one process per turn.

    The working folder is declared as trusted, because Gemini CLI does not run otherwise.

    Gemini CLI retries a failed request ten times, for minutes, unless its settings file has a smaller
    `general.maxAttempts`. No other option limits the retries, and the waiting is not visible from outside.
    """

    kind: ClassVar[str] = "gemini"
    program: ClassVar[str] = "gemini"
    install: ClassVar[str] = "npm install -g @google/gemini-cli"
    chooses_session: ClassVar[bool] = True
    can_fork: ClassVar[bool] = False

    model: str | None = None
    """Model; None for the agent's default."""
    approval_mode: str | None = None
    """One of Gemini CLI's own modes: "auto_edit", "yolo", "plan". Without a mode, tools that need permission, such as a
    shell, are not available.
    """
    system: str | None = None
    """Replaces the system prompt."""
    base_url: str | None = None
    """Another server for the agent's requests. Needs "gemini-api-key" as `security.auth.selectedType` in the agent's
    own settings file.
    """

    def __post_init__(self) -> None:
        check_base_url(self.base_url, "the environment variable GEMINI_API_KEY")

    @property
    def billing(self) -> Billing:
        """The facts that decide the price of turns without a reported cost."""
        return Billing(self.base_url or "google", self.model, sums_requests=True)

    @property
    def passes(self) -> Sequence[str]:
        """Names of the variables with keys, settings and network access."""
        return _PASSES

    def new_session_id(self) -> str | None:
        """Return a random id that is not a UUID, because Gemini CLI loses sessions with UUIDs; the comment explains the
        cause.
        """
        # A session resumed in a later minute gets a second, empty file. The next process deletes the empty file, and
        # with it all files whose names end in the same eight letters and digits, including the session's own file. With
        # another character among the eight, only the empty file is deleted.
        return f"_{uuid4().hex}"

    def arguments(self, call: Call) -> Sequence[str]:
        """Return the command's arguments. Writes the system prompt, if any, into `call.folder`."""
        if self.system is not None:
            private_file(call.folder / "system-prompt.md", self.system)
        return ["--output-format=stream-json", "--skip-trust", *self._options(call)]

    def _options(self, call: Call) -> Iterator[str]:
        if self.model is not None:
            yield f"--model={self.model}"
        if self.approval_mode is not None:
            yield f"--approval-mode={self.approval_mode}"
        if call.session_id is not None:
            yield f"--{'resume' if call.resume else 'session-id'}={call.session_id}"

    def environment(self, call: Call) -> Mapping[str, str]:
        """Return variables for a single process, which obeys signals, without telemetry."""
        variables = {"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_TELEMETRY_ENABLED": "false"}
        if self.system is not None:
            variables["GEMINI_SYSTEM_MD"] = str(call.folder / "system-prompt.md")
        if self.base_url is not None:
            variables["GOOGLE_GEMINI_BASE_URL"] = self.base_url
        return variables

    def reader(self, call: Call) -> GeminiReader:
        """Return a reader for the output of the call."""
        return GeminiReader(call, self.clock(call))
