"""Gemini CLI (`gemini -o stream-json`), run for one turn at a time. Tested with 0.61.0.

Its last word is `result`; its exit status is 0 after a signal and an HTTP status, cut to 8 bits, after an error. The
session drops the prompt of a turn that failed, and keeps that of one that was cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

from plait.backends.agents.backend import CliBackend
from plait.backends.agents.error_kinds import NETWORK
from plait.backends.agents.gemini.reader import GeminiReader
from plait.backends.agents.protocol import Call
from plait.backends.process.private import private_file

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
    """Gemini CLI, run as `gemini`, one process a turn. For what all agents have in common see `CliBackend`.

    `approval_mode` is one of its own words: "auto_edit", "yolo", "plan"; without it, it has no tools that would have to
    ask, such as a shell. `system` replaces its system prompt. `base_url` is another server for its requests: its own
    settings file then has to choose "gemini-api-key" as `security.auth.selectedType`. The folder that it works in is
    taken for trusted, without which it does not run. `now` tells the Unix time.

    It tries ten times by itself, for minutes, unless its settings file says less as `general.maxAttempts`: there is no
    other way to tell it, and none to see it wait.
    """

    kind: ClassVar[str] = "gemini"
    program: ClassVar[str] = "gemini"
    install: ClassVar[str] = "npm install -g @google/gemini-cli"
    chooses_session: ClassVar[bool] = True
    can_fork: ClassVar[bool] = False

    model: str | None = None
    approval_mode: str | None = None
    system: str | None = None
    base_url: str | None = None
    now: Callable[[], float] = time.time

    @property
    def passes(self) -> Sequence[str]:
        """Its keys, its settings, and how the network is reached."""
        return _PASSES

    def new_session_id(self) -> str | None:
        """A random id that is no UUID, since it forgets sessions that have one: see the code."""
        # Resumed in a later minute, a session has a second file, an empty one. The next process cleans that away with
        # all files whose names end in the same eight letters and digits, the session's own among them. With another
        # sign among the eight, it takes the empty file alone.
        return f"_{uuid4().hex}"

    def arguments(self, call: Call) -> Sequence[str]:
        """The arguments; writes the system prompt into `call.folder`, where there is one."""
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
        """One process instead of two, which also heeds signals; no telemetry."""
        variables = {"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_TELEMETRY_ENABLED": "false"}
        if self.system is not None:
            variables["GEMINI_SYSTEM_MD"] = str(call.folder / "system-prompt.md")
        if self.base_url is not None:
            variables["GOOGLE_GEMINI_BASE_URL"] = self.base_url
        return variables

    def reader(self, call: Call) -> GeminiReader:
        """A reader for that turn's output."""
        return GeminiReader(call, self.now)
