"""The command `plait`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command with the arguments of this process, and exit with its exit code."""
    from plait.runner.cli.app import cli  # noqa: PLC0415 - `import plait.runner.cli.display.text` needs no click
    from plait.runner.cli.exits import exit_process, run_cli  # noqa: PLC0415

    exit_process(run_cli(cli, sys.argv[1:]))
