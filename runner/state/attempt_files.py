"""The paths of the files of attempts below the files root of a store. Pure functions.

    <root>/<run>/<task>/<attempt>/    files of a single attempt
    <root>/sessions/                  shared by all attempts

Ids are arbitrary texts. Different ids get different names, even on a file system that ignores case or limits the length
of names, and no name leads out of the parent folder.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from string import ascii_letters, digits

from plait.backends.backend_protocol import Files

SESSIONS = "sessions"
_PLAIN = frozenset(f"{ascii_letters}{digits}._-".encode())
_LONGEST, _DIGEST = 100, 32
"""Most characters of a name, and the characters of the digest at the end of some names. Only names with a digest
contain a `~`.
"""
_AS_IT_IS = re.compile(rf"[a-z0-9_-][a-z0-9._-]{{0,{_LONGEST - 1}}}")
"""Ids usable as names without encoding, as most ids are."""


@lru_cache(maxsize=16)  # called for every task of a run
def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of all files of the run's attempts."""
    return root / _name(run_id)


def attempt_files(root: Path, run_id: str, task_id: str, attempt: int | str) -> Files:
    """Return the files of an attempt of a task. For a person's turn after the run, `attempt` is `0-` and a number."""
    return Files(run_folder(root, run_id).joinpath(_name(task_id), str(attempt)), _sessions(root))


def hosts_key(run_id: str, created_at: str) -> str:
    """Return the name of the run on other hosts, different from the name of any other run of any store."""
    return sha256(f"{created_at} {run_id}".encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]


@lru_cache(maxsize=16)
def _sessions(root: Path) -> Path:
    return root / SESSIONS


def _name(text: str) -> str:
    if _AS_IT_IS.fullmatch(text) and text != SESSIONS:
        return text
    encoded = text.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02x}" for byte in encoded)
    if name.startswith("."):
        name = f"%2e{name[1:]}"
    if name and len(name) <= _LONGEST and name == name.lower() and name != SESSIONS:
        return name
    return f"{name[: _LONGEST - _DIGEST - 1]}~{sha256(encoded).hexdigest()[:_DIGEST]}"
