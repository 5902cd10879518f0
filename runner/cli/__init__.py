"""The command `plait`."""

from __future__ import annotations

import sys

_CANCELLED = 6
"""`command_exits.CANCELLED`, which may not be imported yet."""


def main() -> None:
    """Run the command with the arguments of this process, and exit with its exit code."""
    try:
        from plait.runner.cli.command_exits import exit_process, run_cli  # noqa: PLC0415
        from plait.runner.cli.command_line import cli  # noqa: PLC0415 - `import plait.runner.cli.terminal_output` needs no click
    except KeyboardInterrupt:  # Ctrl-C before the command has begun
        sys.exit(_CANCELLED)

    exit_process(run_cli(cli, sys.argv[1:]))
