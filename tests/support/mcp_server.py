"""An MCP server over standard input and output, for tests: `python mcp_server.py [FILE]`.

Appends a line to FILE for each event, with the server's process number.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from mcp.server import MCPServer

LOG = Path(sys.argv[1]) if len(sys.argv) > 1 else None


def note(event: str) -> None:
    if LOG is not None:
        with LOG.open("a") as file:
            file.write(f"{event} {os.getpid()}\n")


note("start")
server = MCPServer("stock")


@server.tool()
def count(item: str) -> str:
    """Count the pieces of an item in stock."""
    note(f"count-{item}")
    return f"7 pieces of {item} for {os.environ.get('SHOP', 'nobody')}"


@server.tool()
def hang() -> str:
    """Wait for a minute, with a child that does the same."""
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    note(f"hang-{child.pid}")
    time.sleep(60)
    return "late"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


server.run()
