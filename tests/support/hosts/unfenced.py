"""`plait` with a bug: a host process does not end the host process of an earlier owner. See bugs.py."""

from __future__ import annotations

from plait.backends.hosts import host_process
from plait.runner.cli import main

if __name__ == "__main__":
    host_process._end_holder = lambda holder: None  # type: ignore[assignment]  # pyright: ignore[reportPrivateUsage]
    main()
