"""`plait` on a file system without locks. See ssh.py."""

from __future__ import annotations

import errno
import fcntl
import os

from plait.runner.cli import main


def _refuse(_descriptor: int, _how: int) -> None:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


if __name__ == "__main__":
    fcntl.flock = _refuse
    main()
