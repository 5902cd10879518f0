"""The program of the watchdog; see child_process.py. A bare interpreter runs the file by its path.

`_watchdog_main.py PID STARTED LIBRARY`: the number and the start time of the watched process, and
`process_table.library()`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

_LIMIT = 10.0  # seconds; after this time the kernel holds the processes that are left
_PAUSE = 0.3  # seconds; a child that was being started receives its mark meanwhile


def main() -> None:
    _, pid, started, library = sys.argv
    sys.path += [str(Path(__file__).parent), *filter(None, [library])]
    from process_table import ProcessTag, kill_tree, start_time  # type: ignore[import-not-found]  # noqa: PLC0415

    watched: dict[str, list[Any]] = {}
    for line in sys.stdin:
        marker, *more = json.loads(line)
        watched[marker] = more
        if not more:
            del watched[marker]
    while start_time(int(pid)) == started:  # the socket may end while the process lives
        time.sleep(0.02)
    tags: list[Any] = [ProcessTag(marker, *tag) for marker, (*tag, _) in watched.items()]
    for _ in range(2):
        kill_tree(tags, _LIMIT)
        time.sleep(_PAUSE)
    for *_, folder in watched.values():
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
