"""Whether a session's own file holds a prompt: what an agent prints does not always tell, when it is cut early."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from plait.backends.json_fields import at, tables, text


def digest(prompt: str) -> str:
    """What is kept of a prompt, to know it again."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def holds(path: Path, wanted: str) -> bool:
    """Whether a message of the user's in the file, one JSON object a line, has that digest. Never raises."""
    try:
        with path.open("rb") as lines:
            return any(b'"user"' in line and wanted in map(digest, _said(line)) for line in lines)
    except OSError:
        return False


def _said(line: bytes) -> list[str]:
    """The user's words in a line of the file of Claude Code (`message`) or Codex (`payload`)."""
    try:
        told: Any = json.loads(line)
    except ValueError:
        return []
    message = at(told, "message") or at(told, "payload")
    if text(message, "role") != "user":
        return []
    return [text(message, "content"), *(text(block, "text") for block in tables(message, "content"))]
