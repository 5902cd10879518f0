"""The command `plait`."""

from __future__ import annotations

import gc
import sys

_CANCELLED = 6
"""`command_line.CANCELLED`, which may not be imported yet."""


def main() -> None:
    """Run the command with the arguments of this process, and exit with its exit code."""
    # A command makes its plan and its tasks once, and they stay: with the usual 700 a tenth of its start is the search
    # for garbage among them.
    gc.set_threshold(50_000)
    try:
        from plait.runner.cli.command_line import cli, exit_process, run_cli  # noqa: PLC0415 - `import plait.runner.cli.terminal_output` needs no click
    except KeyboardInterrupt:  # Ctrl-C before the command has begun
        sys.exit(_CANCELLED)

    exit_process(run_cli(cli, sys.argv[1:]))
