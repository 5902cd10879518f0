"""Install the agents' commands, in the versions that the tests know: `python -m tests.real_agents.install [NAME ...]`.

They come by npm into a cache folder: `~/.cache/plait-clis`, or what PLAIT_CLIS says. npm runs no install scripts here:
the programs that need one to be put in their place (`versions.json` names the file) are linked to directly.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_VERSIONS = Path(__file__).with_name("versions.json")
_LONGEST_INSTALL = 300.0


@dataclass(frozen=True)
class Cli:
    """One command and its version. `file` is a pattern for what is to be run, below the folder that npm filled."""

    name: str
    package: str
    version: str
    command: str
    file: str

    def folder(self, cache: Path) -> Path:
        """Where its command lies: a folder for PATH that holds this one command."""
        return cache / f"{self.name}-{self.version}" / "bin"

    def path(self, cache: Path) -> Path:
        return self.folder(cache) / self.command


def cache_folder() -> Path:
    return Path(os.environ.get("PLAIT_CLIS") or "~/.cache/plait-clis").expanduser()


def known() -> dict[str, Cli]:
    """Every command of `versions.json`, by its name there."""
    return {name: Cli(name, **given) for name, given in json.loads(_VERSIONS.read_text()).items()}


def install(cli: Cli, cache: Path) -> str | None:
    """Installs what is not there yet. Why that was not possible, in one line; None when it is there."""
    if cli.path(cache).exists():
        return None
    npm = shutil.which("npm")
    if npm is None:
        return "there is no command 'npm' here"
    cache.mkdir(parents=True, exist_ok=True)
    # Beside its place and moved there last: a broken install is never taken for a whole one.
    with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as new:
        problem = _fetch(npm, cli, Path(new))
        if problem is None:
            Path(new).rename(cli.folder(cache).parent)
            Path(new).mkdir()
        return problem


def _fetch(npm: str, cli: Cli, folder: Path) -> str | None:
    package = f"{cli.package.format(platform=_platform())}@{cli.version}"
    quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--ignore-scripts"]
    try:
        done = subprocess.run(
            [npm, "install", *quiet, "--prefix", str(folder), package],
            capture_output=True,
            check=False,
            text=True,
            timeout=_LONGEST_INSTALL,
        )
    except subprocess.TimeoutExpired:
        return f"npm install {package} took more than {_LONGEST_INSTALL:.0f} s"
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("npm error")] or ["npm said nothing"]
        return f"npm install {package}: {said[0]}"
    found = sorted(folder.glob(cli.file))
    if not found:
        return f"{package} has no {cli.file}"
    (folder / "bin").mkdir()
    (folder / "bin" / cli.command).symlink_to(Path("..") / found[0].relative_to(folder))
    return None


def _platform() -> str:
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return f"{platform.system().lower()}-{machine}"


def main(names: Sequence[str]) -> int:
    clis, cache = known(), cache_folder()
    if unknown := set(names) - set(clis):
        print(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(clis)}", file=sys.stderr)
        return 2
    missing = 0
    for cli in (clis[name] for name in names or clis):
        if problem := install(cli, cache):
            missing += 1
            print(f"{cli.name} {cli.version} is not obtainable, its tests are skipped: {problem}", file=sys.stderr)
        else:
            print(f"{cli.name} {cli.version}: {cli.path(cache)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
