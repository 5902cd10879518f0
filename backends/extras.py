"""Packages of extras: check for an installed package, and name the command that adds an extra to this installation.

The command depends on the origin of plait: a checkout, a folder, an archive or a repository given to pip, or an index.
Only an index resolves a name like `plait[server]`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from plait.errors import BackendUnavailable

_ROOT = Path(__file__).resolve().parents[1]  # a checkout, or the installed package `plait`


def require(module: str, extra: str) -> None:
    """Raise BackendUnavailable with the installation command of `extra` if `module` is missing. Import nothing."""
    if find_spec(module) is None:
        raise BackendUnavailable(f"the {module} package is not installed; run: {install_command(extra)}")


def missing_extra(user: str, extra: str, *modules: str) -> str:
    """Return the message that `user` needs `extra`, if one of its `modules` is missing; empty otherwise."""
    missing = [name for name in modules if find_spec(name) is None]
    if not missing:
        return ""
    return f"{user} needs the extra `{extra}` ({' and '.join(missing)}); run: {install_command(extra)}"


def install_command(extra: str) -> str:
    """Return the shell command that adds `extra` to this installation of plait."""
    if (_ROOT / "pyproject.toml").is_file():
        return pip_install("-e", f"{_ROOT}[{extra}]")
    return pip_install(_requirement(extra, _origin()))


def pip_install(*arguments: str) -> str:
    """Return the shell command that installs `arguments` with the pip of this Python.

    A bare `pip` may belong to another Python, or refuse to change an environment that the system manages.
    """
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *arguments])


def _origin() -> Mapping[str, Any]:
    """Return the origin of plait recorded by pip (PEP 610); empty for an index or an unknown origin."""
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415 - half of a start of plait

    try:
        text = distribution("plait").read_text("direct_url.json")
        origin: object = json.loads(text or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return {}
    return cast("Mapping[str, Any]", origin) if isinstance(origin, dict) else {}


def _requirement(extra: str, origin: Mapping[str, Any]) -> str:
    from urllib.request import url2pathname  # noqa: PLC0415 - as above

    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        return f"{url2pathname(urlsplit(url).path)}[{extra}]"
    source = origin.get("vcs_info")
    if isinstance(source, dict):
        named = cast("Mapping[str, object]", source)
        url = f"{named.get('vcs', 'git')}+{url}@{named.get('commit_id', 'HEAD')}"
    return f"plait[{extra}] @ {url}" if url else f"plait[{extra}]"
