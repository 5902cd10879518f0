"""A process that reads what one nasty child says, and then says itself how much memory it took to read it, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio

from plait.backends.process.child_process import running
from tests.support.processes.room import kin, nasty


def peak() -> int:
    """Bytes. Not `ru_maxrss`, which begins with what the process had that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def read(name: str, folder: Path) -> dict[str, int]:
    lines = total = before = 0

    def on_line(line: bytes) -> bool:
        nonlocal lines, total
        lines, total = lines + 1, total + len(line)
        return False

    with kin() as holds:
        async with running(nasty(name, holds, folder), folder / "t") as child:
            before = peak()
            await child.follow(on_line, idle=60, until=anyio.current_time() + 60)
    return {"lines": lines, "total": total, "skipped": child.skipped, "grown": peak() - before}


if __name__ == "__main__":
    print(json.dumps(anyio.run(read, sys.argv[1], Path(sys.argv[2]))))
