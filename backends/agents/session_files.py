"""Detect whether a session's own file holds a prompt. The output of an agent that ended early does not always show
that.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from plait.backends.json_fields import at, tables, text


def digest(prompt: str) -> str:
    """Return the digest by which a prompt is recognised later."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def holds(path: Path, wanted: str) -> bool:
    """Return whether a user message in the file, one JSON object per line, has the digest `wanted`. Never raises."""
    try:
        with path.open("rb") as lines:
            return any(b'"user"' in line and wanted in map(digest, _said(line)) for line in lines)
    except OSError:
        return False


def _said(line: bytes) -> list[str]:
    """Return the user's texts in a line of a session file of Claude Code (`message`) or Codex (`payload`)."""
    try:
        told: Any = json.loads(line)
    except ValueError:
        return []
    message = at(told, "message") or at(told, "payload")
    if text(message, "role") != "user":
        return []
    return [text(message, "content"), *(text(block, "text") for block in tables(message, "content"))]
