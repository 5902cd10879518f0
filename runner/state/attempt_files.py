"""Where the files of a run's turns lie below the files root of its store. Pure.

    <root>/<run>/<task>/<attempt>/    one turn's own
    <root>/sessions/                  shared by all

Ids are any text. Different ones get different names, also where a file system does not tell small letters from capital
ones or takes no long names, and no name leads out of its folder.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from string import ascii_letters, digits

from plait.backends.protocol import Files

SESSIONS = "sessions"
_PLAIN = frozenset(f"{ascii_letters}{digits}._-".encode())
_LONGEST, _DIGEST = 100, 32
"""Characters of a name, and of the digest that is the end of some. A name without one has no `~` in it."""
_AS_IT_IS = re.compile(rf"[a-z0-9_-][a-z0-9._-]{{0,{_LONGEST - 1}}}")
"""Ids that are names already, as most are."""


@lru_cache(maxsize=16)  # every task of a run asks
def run_folder(root: Path, run_id: str) -> Path:
    """The folder of all files of the run's turns."""
    return root / _name(run_id)


def turn_files(root: Path, run_id: str, task_id: str, attempt: int | str) -> Files:
    """The files of one attempt of a task, which for a person's turn after the run is `0-` and a number."""
    return Files(run_folder(root, run_id).joinpath(_name(task_id), str(attempt)), _sessions(root))


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
