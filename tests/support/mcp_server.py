"""An MCP server over standard input and output, for tests: `python mcp_server.py [FILE]`.

Appends a line to FILE for each event, with the server's process number. It speaks the protocol itself, for the library
takes a second of a processor at each start; the server that docs/guides/backends.md shows is one of the library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LOG = Path(sys.argv[1]) if len(sys.argv) > 1 else None
NOT_SUPPORTED = {"code": -32601, "message": "Method not found"}


def note(event: str) -> None:
    if LOG is not None:
        with LOG.open("a") as file:
            file.write(f"{event} {os.getpid()}\n")


def count(item: str) -> str:
    """Count the pieces of an item in stock."""
    note(f"count-{item}")
    return f"7 pieces of {item} for {os.environ.get('SHOP', 'nobody')}"


def hang() -> str:
    """Wait for a minute, with a child that does the same."""
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    note(f"hang-{child.pid}")
    time.sleep(60)
    return "late"


def die() -> str:
    """End the server."""
    os._exit(3)


TOOLS: Mapping[str, Callable[..., str]] = {"count": count, "hang": hang, "die": die}


def described(name: str) -> dict[str, Any]:
    items = {"item": {"type": "string"}} if name == "count" else {}
    schema = {"type": "object", "properties": items, "required": [*items]}
    return {"name": name, "description": TOOLS[name].__doc__, "inputSchema": schema}


def answered(method: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request; None for one that this server does not know."""
    match method:
        case "initialize":
            info = {"name": "stock", "version": "1"}
            return {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [described(name) for name in TOOLS]}
        case "tools/call":
            text = TOOLS[given["name"]](**given.get("arguments") or {})
            return {"content": [{"type": "text", "text": text}], "isError": False}
        case "ping":
            return {}
        case _:
            return None


def main() -> None:
    note("start")
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answered(request["method"], request.get("params") or {})
        part = {"error": NOT_SUPPORTED} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **part}), flush=True)


if __name__ == "__main__":
    main()
