"""A private world for one test with real agents: a home, a temporary folder and a working folder of its own.

Its environment has nothing of ours but PATH, every switch that keeps an agent from calling home, and the stub as the
only model. The key is no key.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.real_agents.install import known
from tests.real_agents.stub import Request, Stub

KEY = "no-key"
_HANGS_S = 180.0  # less than LIMIT_S of tests/conftest.py
_SILENCE = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "GEMINI_TELEMETRY_ENABLED": "false",
    "GOOSE_DISABLE_KEYRING": "1",
    "GOOSE_TELEMETRY_ENABLED": "false",
    "OPENCODE_DISABLE_AUTOUPDATE": "true",
    "DO_NOT_TRACK": "1",
    "CI": "1",
    "TERM": "dumb",
    "LANG": "C.UTF-8",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What came of one call of a command. `status` is negative for a signal."""

    argv: Sequence[str]
    status: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def events(self) -> list[Json]:
        """The JSON objects of its output, one a line; other lines left out."""
        return events_in(self.stdout)

    def of(self, kind: str, **wanted: Any) -> list[Json]:
        """The events of that type whose fields are as wanted."""
        return [one for one in self.events if one.get("type") == kind and wanted.items() <= one.items()]

    def __str__(self) -> str:
        shown = self.stdout if len(self.stdout) < 4000 else f"{self.stdout[:1500]} ... {self.stdout[-2500:]}"
        ended = f"ended with {self.status} after {self.seconds:.1f} s"
        return "\n".join([" ".join(self.argv), ended, shown, self.stderr[-1500:]])


def events_in(text: str) -> list[Json]:
    found: list[Json] = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


@dataclass
class Running:
    """A command under way: leader of a session of its own, input and output regular files."""

    argv: Sequence[str]
    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path
    started: float = field(default_factory=time.monotonic)

    def kill(self) -> Turn:
        """SIGKILL for its whole process group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        return self.wait()

    def wait(self, seconds: float = 120) -> Turn:
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"still running after {seconds} s: {self.turn(-9)}") from None
        return self.turn(status)

    def turn(self, status: int) -> Turn:
        texts = [path.read_text(errors="replace") for path in (self.stdout, self.stderr)]
        return Turn(self.argv, status, texts[0], texts[1], time.monotonic() - self.started)


@dataclass(frozen=True)
class World:
    """`root` is the folder that holds it all, `cache` where the commands are (`tests/real_agents/install.py`)."""

    root: Path
    cache: Path
    stub: Stub

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def folder(self) -> Path:
        """The working folder."""
        return self.root / "work"

    @property
    def environment(self) -> dict[str, str]:
        clis = [cli.folder(self.cache) for cli in known().values()]
        path = [*(str(folder) for folder in clis if folder.exists()), os.environ.get("PATH", os.defpath)]
        return {
            **_SILENCE,
            **_addresses(self.stub.url),
            "PATH": os.pathsep.join(path),
            "HOME": str(self.home),
            "TMPDIR": str(self.root / "tmp"),
            "CLAUDE_CODE_TMPDIR": str(self.root / "tmp"),
        }

    def start(self, argv: Sequence[str], prompt: str = "", folder: Path | None = None, **more: str) -> Running:
        """Starts a command with its prompt as standard input; `more` is added to its environment."""
        place = self.root / "turns" / str(time.monotonic_ns())
        place.mkdir(parents=True)
        (place / "in").write_text(prompt)
        with (place / "in").open("rb") as given, (place / "out").open("wb") as out, (place / "err").open("wb") as err:
            process = subprocess.Popen(
                argv,
                stdin=given,
                stdout=out,
                stderr=err,
                cwd=folder or self.folder,
                env=self.environment | more,
                start_new_session=True,
            )
        return Running(argv, process, place / "out", place / "err")

    def run(self, argv: Sequence[str], prompt: str = "", folder: Path | None = None, **more: str) -> Turn:
        return self.start(argv, prompt, folder, **more).wait()

    @property
    def children(self) -> list[int]:
        """The processes of this world that carry a mark of plait's."""
        return marked(f"HOME={self.home}", "PLAIT_TURN_")

    def asked(self, word: str) -> list[Request]:
        """What the model was asked in conversations that have that word in any prompt, in order."""
        return [one for one in self.stub.requests() if not one.aside and word in "\n".join(one.prompts)]


def make_world(root: Path, cache: Path, stub: Stub) -> World:
    """Makes the folders, and the settings without which some agents do not start."""
    world = World(root, cache, stub)
    for folder in (world.home / ".gemini", world.home / ".codex", world.home / ".qwen", world.folder, root / "tmp"):
        folder.mkdir(parents=True)
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    (world.home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    qwen = {"security": {"auth": {"selectedType": "openai"}}, "privacy": {"usageStatisticsEnabled": False}}
    (world.home / ".qwen" / "settings.json").write_text(json.dumps(qwen))
    (world.home / ".codex" / "config.toml").write_text(codex_config(stub.url))
    return world


def codex_config(url: str) -> str:
    """Codex's own settings: the stub for a model, and no retries inside."""
    return f"""
model = "stub-model"
model_provider = "stub"

[model_providers.stub]
name = "stub"
base_url = "{url}/v1"
env_key = "STUB_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false

[features]
plugins = false
unbounded_connection_retries = false
"""


def until(happened: Callable[[], object], what: str) -> None:
    """Waits for something that can be seen, and fails with `what` when it does not come.

    For long: opencode needs 7 s to send a prompt and its tool's result, and a minute where `.ci/run` plays all else.
    """
    end = time.monotonic() + _HANGS_S
    while not happened():
        assert time.monotonic() < end, f"not within {_HANGS_S} s: {what}"
        time.sleep(0.02)


def marked(*variables: str) -> list[int]:
    """The processes that have in their environment, for each of `variables`, one that begins like it."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            has = (folder / "environ").read_bytes().split(b"\0")
            if all(any(one.startswith(wanted.encode()) for one in has) for wanted in variables):
                found.append(int(folder.name))
    return found


@contextmanager
def waiting_tool(world: World) -> Generator[tuple[str, Path]]:
    """Words that have the agent's shell tool wait until the block's end, and the file that is there once it waits."""
    here, go, script = world.folder / "here", world.folder / "go", world.folder / "wait.sh"
    script.write_text(f"touch {here}\nuntil test -e {go}; do sleep 0.1; done\n")
    try:
        yield f"[[tool sh {script}]]", here
    finally:
        go.touch()


def _addresses(url: str) -> Mapping[str, str]:
    opencode = {
        "provider": {
            "stub": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
                "models": {"stub-model": {"name": "stub-model"}},
            }
        },
        "model": "stub/stub-model",
        "small_model": "stub/stub-model",
        "autoupdate": False,
        "share": "disabled",
    }
    return {
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": url,
        "STUB_KEY": KEY,
        "GEMINI_API_KEY": KEY,
        "GOOGLE_GEMINI_BASE_URL": url,
        "OPENAI_API_KEY": KEY,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_MODEL": "stub-model",
        "OPENAI_HOST": url,
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": "stub-model",
        "OPENCODE_CONFIG_CONTENT": json.dumps(opencode),
    }
