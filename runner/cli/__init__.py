"""The command `plait`."""

import sys

try:
    from plait.runner.cli.command_line import main
except KeyboardInterrupt:  # Ctrl-C before the command has begun
    sys.exit(6)  # `command_line.CANCELLED`

__all__ = ["main"]
