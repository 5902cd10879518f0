"""Passwords from a password file, a service file and the environment, on a server that asks for one."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait import PostgresStore
from plait.errors import StoreUnusable
from tests.support.processes.command import PLAIT, environment
from tests.support.processes.fleet import until
from tests.support.stores.postgres import address, end_server, start_server

pytestmark = pytest.mark.slow

PASSWORD = "s3cret-of-mine"
PLAN = """
backends: {w: {kind: function, call: "work.py:work"}}
tasks: [{id: a, prompt: one}]
"""
WORK = """
from pathlib import Path
import anyio

async def work(prompt):
    Path("begun").touch()
    while not Path("go").exists():
        await anyio.sleep(0.01)
    return "done"
"""


@dataclass
class Locked:
    """A server on which the user `me` needs PASSWORD."""

    server: Any
    socket: str

    @property
    def bare(self) -> str:
        """The address without a user."""
        return address(self.server, "postgres").replace("postgres@", "")

    @property
    def dsn(self) -> str:
        """The address of `me`, without the password."""
        return address(self.server, "postgres").replace("postgres@", "me@")


@pytest.fixture(scope="module")
def locked() -> Iterator[Locked]:
    with tempfile.TemporaryDirectory(prefix="plait-postgres-") as folder:
        server = start_server(Path(folder) / "data")
        try:
            rules = Path(server.pgdata) / "pg_hba.conf"
            rules.write_text(f"local all me scram-sha-256\n{rules.read_text()}")
            statements = f"CREATE ROLE me LOGIN SUPERUSER PASSWORD '{PASSWORD}'; SELECT pg_reload_conf()"
            subprocess.run(
                [f"{server.bin_path}/psql", address(server), "-c", statements], check=True, capture_output=True
            )
            yield Locked(server, str(server.get_postmaster_info().socket_dir))
        finally:
            end_server(server)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this folder the home, without any file of a password."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PGPASSWORD", "PGPASSFILE", "PGSERVICE", "PGSERVICEFILE", "PGUSER", "PGHOST"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


async def opens(dsn: str) -> bool:
    try:
        async with PostgresStore(dsn) as store:
            await store.list_runs()
    except StoreUnusable:
        return False
    return True


def write(file: Path, text: str, mode: int = 0o600) -> str:
    file.write_text(text)
    file.chmod(mode)
    return str(file)


async def test_a_password_file(locked: Locked, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await opens(locked.dsn), "the server asks for a password"
    write(home / ".pgpass", f"# of another server\nelsewhere:*:*:me:no\nlocalhost:*:postgres:me:{PASSWORD}\n")
    assert await opens(locked.dsn)
    monkeypatch.setenv("PGPASSFILE", write(home / "other", "localhost:*:*:me:wrong\n"))
    assert not await opens(locked.dsn)
    monkeypatch.setenv("PGPASSFILE", write(home / "other", f"*:*:*:me:{PASSWORD}\n"))
    assert await opens(locked.dsn)


@pytest.mark.filterwarnings("ignore:password file:UserWarning")
async def test_a_password_file_that_others_may_read_is_not_used(locked: Locked, home: Path) -> None:
    write(home / ".pgpass", f"*:*:*:me:{PASSWORD}\n", 0o644)
    assert not await opens(locked.dsn)


async def test_a_service_file(locked: Locked, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = f"[runs]\nhost={locked.socket}\ndbname=postgres\nuser=me\npassword={PASSWORD}\n"
    write(home / ".pg_service.conf", service)
    assert await opens("postgresql://?service=runs")
    monkeypatch.setenv("PGSERVICEFILE", write(home / "other", service.replace("[runs]", "[others]")))
    assert await opens("postgresql://?service=others")
    monkeypatch.setenv("PGSERVICE", "others")
    assert await opens("postgresql://")


@pytest.mark.parametrize("place", ["PGPASSWORD", "PGPASSFILE", "PLAIT_STORE"])
def test_no_output_row_or_argument_shows_the_password(locked: Locked, home: Path, place: str) -> None:
    (home / "plan.yaml").write_text(PLAN)
    (home / "work.py").write_text(WORK)
    passfile = write(home / "passwords", f"*:*:*:me:{PASSWORD}\n")
    given = {
        "PGPASSWORD": {"PGPASSWORD": PASSWORD, "PLAIT_STORE": locked.dsn},
        "PGPASSFILE": {"PGPASSFILE": passfile, "PLAIT_STORE": locked.dsn},
        "PLAIT_STORE": {"PLAIT_STORE": locked.dsn.replace("me@", f"me:{PASSWORD}@")},
    }[place]
    variables = environment(XDG_STATE_HOME=str(home / "state"), **given)
    command = [*PLAIT, "run", "plan.yaml", "--log-level", "debug"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=home, env=variables, stdout=pipe, stderr=pipe, text=True) as process:
        until((home / "begun").exists)
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        (home / "go").touch()
        out, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    tables = [f"--table={table}" for table in ("runs", "tasks", "attempts", "events", "notes")]
    dump = subprocess.run(
        [f"{locked.server.bin_path}/pg_dump", "--data-only", *tables, address(locked.server)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "work.py:work" in dump
    assert PASSWORD not in f"{arguments!r} {out} {said} {dump}"


async def test_a_wrong_password_is_one_line_without_it(locked: Locked) -> None:
    with pytest.raises(StoreUnusable) as caught:
        async with PostgresStore(locked.dsn.replace("me@", f"me:{PASSWORD}x@")):
            pass
    assert "password authentication failed" in str(caught.value)
    assert PASSWORD not in str(caught.value)
