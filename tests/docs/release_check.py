"""Build the sdist and the wheel, and use the wheel as a stranger would: `make release-check`.

The wheel is built twice, from the checkout and from the sdist, and has to hold every tracked file of the packages both
times. It is then installed into an environment of its own, where the first Python example of
README.md runs against a model server on 127.0.0.1, outside the checkout. The package index serves the dependencies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import anyio
import anyio.to_thread

from tests.docs.documents import blocks
from tests.support.obliging import oblige
from tests.support.wire import serve

ROOT = Path(__file__).parents[2]
LINKED = ("backends", "persistence", "runner")
"""Folders at the root that `plait` links to."""


class ReleaseError(Exception):
    """A release from this checkout would be wrong; the message says in which way."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="plait-release-") as made:
        try:
            anyio.run(check, Path(made))
        except ReleaseError as wrong:
            print(f"release-check: {wrong}", file=sys.stderr)
            return 1
    print("release-check: the sdist and the wheel are whole, and README's first example runs from the wheel")
    return 0


async def check(folder: Path) -> None:
    """Raise ReleaseError if a step fails."""
    wanted = tracked()
    wheel = build(ROOT, folder / "checkout", "--wheel", "*.whl")
    check_contents(names_in(wheel), wanted, "the wheel from the checkout")
    sdist = build(ROOT, folder / "sdist", "--sdist", "*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [source] = (folder / "unpacked").iterdir()
    again = build(source, folder / "from-sdist", "--wheel", "*.whl")
    check_contents(names_in(again), wanted, "the wheel from the sdist")
    await use(wheel, folder / "stranger")


def tracked() -> set[str]:
    """Return the name that each tracked file of the packages has to have in the wheel."""
    files = run(["git", "ls-files", "--", "src/plait", *LINKED], ROOT).split()
    links = {f"plait/{name}" for name in LINKED}
    return {name.removeprefix("src/") if name.startswith("src/") else f"plait/{name}" for name in files} - links


def build(source: Path, into: Path, kind: str, pattern: str) -> Path:
    """Build one distribution of `source` in an environment of its own, and return its file."""
    run([sys.executable, "-m", "build", kind, "--outdir", str(into), str(source)], source)
    [built] = into.glob(pattern)
    return built


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def check_contents(names: Collection[str], wanted: Collection[str], where: str) -> None:
    """Raise ReleaseError unless `plait` is the one package in `names`, and every file in `wanted` is there."""
    tops = {name.partition("/")[0] for name in names}
    if packages := {top for top in tops if not top.endswith(".dist-info")} - {"plait"}:
        raise ReleaseError(f"{where} has top-level names besides plait: {', '.join(sorted(packages))}")
    if missing := sorted(set(wanted) - set(names)):
        raise ReleaseError(f"{where} lacks {len(missing)} files of the checkout: {', '.join(missing[:10])}")


async def use(wheel: Path, folder: Path) -> None:
    """Install `wheel` in an empty environment, and run README's example and the command in an empty folder."""
    venv.create(folder / "venv", with_pip=True)
    (place := folder / "place").mkdir()
    programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    run([str(programs / "python"), "-m", "pip", "install", "-q", f"plait @ {wheel.as_uri()}"], place)
    (place / "example.py").write_text(example(), encoding="utf-8")
    async with serve(oblige) as server:
        environment = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "test", "HOME": str(place)}
        told = await anyio.to_thread.run_sync(
            run, [str(programs / "python"), "-W", "error", "example.py"], place, environment
        )
        if not told.strip() or "Usage(" not in told:
            raise ReleaseError(f"README's first example printed {told!r}")
    version = run([str(programs / "plait"), "--version"], place)
    hint = run([str(programs / "python"), "-c", HINT], place)
    if wheel.as_uri() not in hint:
        raise ReleaseError(f"plait {version.strip()} names the wrong command to install an extra: {hint.strip()}")


HINT = "from plait.backends.extras import install_command; print(install_command('server'))"


def example() -> str:
    """Return the first Python block of README.md."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    return next(block.text for block in blocks("README.md", page) if block.info == "python")


def run(command: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run `command` in `folder` without this checkout on its path; return the output. Raise ReleaseError on failure."""
    inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        command, cwd=folder, env={**inherited, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
