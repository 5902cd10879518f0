"""The command `plait`. Nothing here or in the modules of the commands imports more than click before it is needed."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command with this process's arguments and leave with its exit code."""
    from plait.runner.cli.app import cli  # noqa: PLC0415 - `import plait.runner.cli.display.text` does not need click
    from plait.runner.cli.exits import exit_process, run_cli  # noqa: PLC0415

    exit_process(run_cli(cli, sys.argv[1:]))
