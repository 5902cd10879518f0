"""The guard's program; see guard.py. It is run by its path, in a bare interpreter."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

_LIMIT = 10.0  # seconds; what cannot be killed by then hangs in the kernel


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from proctable import kill_members  # type: ignore[import-not-found]  # noqa: PLC0415

    watched: dict[str, str] = {}
    for line in sys.stdin:
        marker, _, folder = line[1:].rstrip("\n").partition(" ")
        if line[0] == "+":
            watched[marker] = folder
        else:
            watched.pop(marker, None)
    deadline = time.monotonic() + _LIMIT
    while sum([kill_members(marker, None) for marker in watched]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for folder in filter(None, watched.values()):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
