"""The guard's program; see guard.py. It is run by its path, in a bare interpreter, with the number and the start time
of the process that it serves.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

_LIMIT = 10.0  # seconds; what cannot be killed by then hangs in the kernel
_PAUSE = 0.3  # seconds, in which a child that was just being started gets its mark


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from proctable import Turn, end, start_time  # type: ignore[import-not-found]  # noqa: PLC0415

    watched: dict[str, list[Any]] = {}
    for line in sys.stdin:
        marker, *more = json.loads(line)
        watched[marker] = more
        if not more:
            del watched[marker]
    while start_time(int(sys.argv[1])) == sys.argv[2]:  # the end of the socket alone says little
        time.sleep(0.02)
    turns = [Turn(marker, *known) for marker, (*known, _) in watched.items()]
    for _ in range(2):
        end(turns, _LIMIT)
        time.sleep(_PAUSE)
    for *_, folder in watched.values():
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
