"""What a real process does to the files of one folder, as the system calls that strace sees."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.stores.power_vfs import Acknowledged, Recording, Sync, SyncFolder, Truncate, Write

DONE = "done"
"""The line, in one call, by which the process says that what it did can be relied on."""
_LIMIT = 60.0  # seconds
_CALLS = "openat,write,fsync,fdatasync,ftruncate,rename,unlink"
"""Those that Python makes. Any other one that changes files would show as an image that cannot be."""
_LINE = re.compile(r"(\w+)\((.*)\) += (\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"(\d+)<([^>]*)>")


def missing() -> str | None:
    """Why no process can be watched here; None when it can."""
    if shutil.which("strace") is None:
        return "needs strace, to see what a process asks of the disk"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "strace may not watch processes here"


def record_calls(recording: Recording, code: str, folder: Path, *arguments: str) -> None:
    """Add to `recording` what `code`, told `arguments`, does to the files in `folder` in a process of its own, until it
    prints DONE.
    """
    trace = folder.with_name(f"{folder.name}.strace")
    options = ["-y", "-xx", "-s", str(1 << 24), "-e", f"trace={_CALLS}", "-o", str(trace)]
    done = subprocess.run(
        ["strace", *options, sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{DONE}\n"), done.stderr
    watched = _Watched(folder.resolve(), recording)
    with trace.open() as lines:
        for call in _calls(lines):
            watched.see(call)
    trace.unlink()


@dataclass(frozen=True, slots=True)
class _Call:
    """One that did not fail: the texts among its arguments, and the descriptor that it is about, with its path."""

    name: str
    arguments: str
    texts: list[bytes]
    descriptor: int
    path: Path

    @property
    def paths(self) -> list[Path]:
        return [Path(text.decode()) for text in self.texts]


def _calls(lines: Iterator[str]) -> Iterator[_Call]:
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        texts = [_bytes(found[1]) for found in _TEXT.finditer(match[2])]
        # An open returns the descriptor, the others are given it.
        descriptor = _DESCRIPTOR.search(line, match.start(3) if match[1] == "openat" else match.start(2))
        number, path = (int(descriptor[1]), descriptor[2]) if descriptor else (-1, "")
        # Of a pipe the name is not escaped, and of no account.
        place = Path(_bytes(path).decode() if path.startswith("\\x") else "")
        yield _Call(match[1], match[2], texts, number, place)


def _bytes(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


class _Watched:
    def __init__(self, folder: Path, recording: Recording) -> None:
        self._folder = folder
        self._recording = recording
        self._positions: dict[int, int] = {}

    def see(self, call: _Call) -> None:
        """Add what the call does to the folder, if it does anything."""
        match call.name:
            case "rename" if call.paths[0].parent == self._folder:
                source, target = call.paths
                self._recording.name(target, self._recording.files[source.name])
                self._recording.name(source, None)
            case "unlink" if call.paths[0].parent == self._folder:
                self._recording.name(call.paths[0], None)
            case "fsync" | "fdatasync" if call.path == self._folder:
                self._recording.add(SyncFolder())
            case "write" if call.descriptor == 1 and call.texts == [f"{DONE}\n".encode()]:
                self._recording.add(Acknowledged())
            case _ if call.path.parent == self._folder:
                self._see_file(call, self._recording.opened(str(call.path)))
            case _:
                pass

    def _see_file(self, call: _Call, file: int) -> None:
        match call.name:
            case "openat":
                self._positions[call.descriptor] = 0
                if "O_TRUNC" in call.arguments:
                    self._recording.add(Truncate(file, 0))
            case "write":
                self._recording.add(Write(file, self._positions[call.descriptor], call.texts[0]))
                self._positions[call.descriptor] += len(call.texts[0])
            case "ftruncate":
                self._recording.add(Truncate(file, int(call.arguments.rpartition(",")[2])))
            case _:
                self._recording.add(Sync(file))
