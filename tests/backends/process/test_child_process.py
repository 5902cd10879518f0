"""The process room, child by child: what is read, what is refused, and what holds when the machine gives less."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait.backends.process import child_process
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Child, Launch, adopted, child_environment, running, sweep
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from tests.support.processes.room import PYTHON, ROOT, Kin, nasty, nothing_left

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs procfs")


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(child_process, "GRACE", 0.3)
    with nothing_left():
        yield


def saying(text: str, cwd: Path) -> Launch:
    return Launch((*PYTHON, "-c", text), child_environment(), cwd, b"")


async def followed(start: Launch, folder: Path, **limits: float) -> tuple[list[bytes], Child]:
    """All lines of a child, and the child when it is over."""
    found: list[bytes] = []
    until = anyio.current_time() + limits.get("until", 60)
    async with running(start, folder) as child:
        await child.follow(lambda line: bool(found.append(line)), idle=limits.get("idle", 60), until=until)
    return found, child


@pytest.mark.parametrize(("name", "status"), [("dies", 3), ("dies_by_signal", -signal.SIGSEGV), ("rubbish", 0)])
async def test_how_a_child_ended_is_told(name: str, status: int, tmp_path: Path, holds: Kin) -> None:
    _, child = await followed(nasty(name, holds, tmp_path), tmp_path / "t")
    assert child.status == status


_NESTED = """
import sys, time, anyio
from pathlib import Path
from plait.backends.process.child_process import Launch, child_environment, running

own = Path("/proc/self/oom_score_adj")
own.write_text(sys.argv[1])
folder = Path(sys.argv[2])
child = '''
import pathlib, subprocess, sys, time
while not pathlib.Path("go").exists():
    time.sleep(0.01)
show = [sys.executable, "-c", "print(open('/proc/self/oom_score_adj').read().strip())"]
subprocess.run(show)
print(open('/proc/self/oom_score_adj').read().strip())
'''

async def main():
    start = Launch((sys.executable, "-c", child), child_environment(), folder, b"")
    async with running(start, folder / "t") as started:
        (folder / "go").touch()
        await started.follow(lambda line: print(line.decode()), idle=60, until=anyio.current_time() + 60)
    print(own.read_text().strip())

anyio.run(main)
"""


@pytest.mark.parametrize(("own", "raised"), [(0, 300), (900, 1000)])
def test_a_child_and_its_tools_are_the_kernel_s_first_choice(own: int, raised: int, tmp_path: Path) -> None:
    """In a process of its own, because the score of a process cannot be lowered again."""
    if int(Path("/proc/self/oom_score_adj").read_text()) > own:
        pytest.skip("the tests themselves have a higher score")
    argv = [sys.executable, "-c", _NESTED, str(own), str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(raised), str(raised), str(own)]


async def test_lines_are_handed_on_whatever_is_in_them(tmp_path: Path, holds: Kin) -> None:
    lines, _ = await followed(nasty("rubbish", holds, tmp_path), tmp_path / "t")
    assert b"\n".join(lines) == bytes(range(256)) * 4 + b"\n\0\0\n\xff\xfe\nready\n\0 no end"


async def test_a_stray_that_writes_for_ever_does_not_keep_us(tmp_path: Path, holds: Kin) -> None:
    """However slowly we read."""
    lines: list[bytes] = []

    def on_line(line: bytes) -> bool:
        lines.append(line)
        time.sleep(0.003 if line == b"stray" else 0)
        return False

    async with running(nasty("goes_on_writing", holds, tmp_path), tmp_path / "t") as child:
        await child.follow(on_line, idle=60, until=anyio.current_time() + 100)
    assert b"ready" in lines


async def test_what_is_said_after_somebody_emptied_the_file_is_heard(tmp_path: Path, holds: Kin) -> None:
    lines: list[bytes] = []

    def on_line(line: bytes) -> bool:
        lines.append(line)
        (tmp_path / "go").touch()
        return line == b"ready"

    async with running(nasty("empties", holds, tmp_path), tmp_path / "t") as child:
        await child.follow(on_line, idle=60, until=anyio.current_time() + 60)
    assert lines == [b"x" * 1000, b"ready"]


async def test_a_child_that_is_stopped_is_asked_to_end_like_any_other(tmp_path: Path, holds: Kin) -> None:
    async with running(nasty("stopped", holds, tmp_path), tmp_path / "t") as child:
        await child.follow(lambda line: line == b"ready", idle=60, until=anyio.current_time() + 60)
    assert child.status == -signal.SIGTERM


async def test_a_child_gets_its_time_to_end_when_a_scope_is_cancelled(tmp_path: Path, holds: Kin) -> None:
    with anyio.CancelScope() as scope:
        async with running(nasty("cleans", holds, tmp_path), tmp_path / "t") as child:
            await child.follow(lambda line: scope.cancel() or False, idle=60, until=anyio.current_time() + 60)
    assert child.tail("stdout").split() == ["ready", "asked", "cleaned"]
    assert child.status == 0


@pytest.mark.parametrize("stream", [1, 2])
async def test_a_child_that_would_fill_the_disk_is_ended(
    stream: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "MOST_OUTPUT", 2**20)
    text = f"import os, time\nwhile True:\n os.write({stream}, b'x' * 65536 + b'\\n')\n time.sleep(0.001)"
    with pytest.raises(BackendError, match="more than 0 GiB of output") as caught:
        await followed(saying(text, tmp_path), tmp_path / "t")
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT


@pytest.mark.parametrize(
    ("out", "err", "is_enough"), [(0, 700, False), (700, 0, False), (600, 600, True), (0, 1100, True), (1100, 0, True)]
)
@pytest.mark.parametrize("name", ["stdout", "stderr"])
async def test_the_bound_is_on_both_outputs_together(
    name: str, out: int, err: int, is_enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "MOST_OUTPUT", 2**20)
    text = f"import os, time\nos.write(1, b'x' * {out * 1024})\nos.write(2, b'x' * {err * 1024})\n"
    text += "time.sleep(60)" if is_enough else f"os.write({1 if name == 'stdout' else 2}, b'\\nready\\n')"
    async with running(saying(text, tmp_path), tmp_path / "t") as child:
        with pytest.raises(BackendError, match="more than 0 GiB of output") if is_enough else nullcontext():
            until = anyio.current_time() + 60
            await child.follow(lambda line: line == b"ready", idle=60, until=until, name=name)


REFUSED: list[tuple[str, Callable[[Path], Launch], type[Exception], str]] = [
    ("no program", lambda folder: Launch(["no-such"], {}, folder, b""), BackendUnavailable, "no program no-such"),
    ("no interpreter", lambda folder: Launch([_script(folder)], {}, folder, b""), BackendUnavailable, "first line"),
    ("no folder", lambda folder: Launch(["true"], {}, folder / "x", b""), BackendUnavailable, "no folder .*/x to work"),
    ("a file", lambda folder: Launch([str(ROOT / "README.md")], {}, folder, b""), BackendUnavailable, "be executed"),
    ("no binary", lambda folder: Launch([_empty(folder)], {}, folder, b""), BackendUnavailable, "not a program"),
    ("a NUL", lambda folder: Launch(["true", "a\0b"], {}, folder, b""), BackendError, "invalid_request: .* null byte"),
    ("surrogates", lambda folder: Launch(["true", "\ud800"], {}, folder, b""), BackendError, "invalid_request: "),
    ("too long", lambda folder: Launch(["true", "a" * 2**22], {}, folder, b""), BackendError, "request: .* long"),
]  # fmt: skip


def _script(folder: Path) -> str:
    program = folder / "program"
    program.write_text("#!/no/such/node\n")
    program.chmod(0o700)
    return str(program)


def _empty(folder: Path) -> str:
    program = folder / "program"
    program.write_bytes(b"\0\0\0\0")
    program.chmod(0o700)
    return str(program)


@pytest.mark.parametrize(("what", "start", "kind", "message"), REFUSED, ids=[row[0] for row in REFUSED])
async def test_what_cannot_be_started_is_said_in_one_line(
    what: str, start: Callable[[Path], Launch], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message) as caught:
        await followed(start(tmp_path), tmp_path / "t")
    assert "\n" not in str(caught.value)
    assert await sweep(tmp_path, []) == 0
    known = read_manifest(tmp_path / "t")
    assert known is not None and not known.is_alive


async def test_files_that_cannot_be_written_are_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BackendError, match="transient: cannot start true, because its files cannot be written"):
        await followed(Launch(["true"], {}, tmp_path, b""), tmp_path / "file" / "t")


async def test_a_machine_without_room_for_a_process_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", no_room)
    with pytest.raises(BackendError, match="transient: cannot start true: Resource temporarily"):
        await followed(Launch(["true"], {}, tmp_path, b""), tmp_path / "t")


async def test_a_child_whose_number_cannot_be_written_down_does_not_stay(
    tmp_path: Path, holds: Kin, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen

    def then_full(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        (tmp_path / "t" / f"child.{os.getpid()}.new").mkdir()
        return popen(*words, **options)

    monkeypatch.setattr(subprocess, "Popen", then_full)
    with pytest.raises(BackendError, match="because its files cannot be written"):
        await followed(nasty("deaf", holds, tmp_path), tmp_path / "t")
    assert holds.is_gone(0)


async def test_a_folder_has_one_child(tmp_path: Path, holds: Kin) -> None:
    async with running(nasty("deaf", holds, tmp_path), tmp_path / "t") as child:
        with pytest.raises(FileExistsError, match="has the files of another child"):
            await followed(nasty("deaf", holds, tmp_path), tmp_path / "t")
        assert read_manifest(tmp_path / "t") == child.manifest
    with pytest.raises(FileExistsError):
        await followed(nasty("deaf", holds, tmp_path), tmp_path / "t")


async def test_nobody_adopts_where_there_was_no_child(tmp_path: Path) -> None:
    async with adopted(tmp_path) as child:
        assert child is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"marker": 7}', '{"marker": "no number", "note": {}}'])
async def test_a_damaged_note_of_a_child_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "child.json").write_text(text)
    assert read_manifest(tmp_path) is None
    assert await sweep(tmp_path, []) == 0


async def test_a_child_gets_what_programs_need_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "MY_KEY", "LC_ALL", "PLAIT_TURN_00"):
        monkeypatch.setenv(name, "told")
    environment = child_environment(["MY_KEY"])
    assert "OPENAI_API_KEY" not in environment
    start = Launch((*PYTHON, "-c", "import os; print(*os.environ, sep='\\n')"), environment, tmp_path, b"")
    names = {line.decode() for line in (await followed(start, tmp_path / "t"))[0]}
    assert {"PATH", "MY_KEY", "LC_ALL", "PLAIT_TURN_00"} < names
