"""Every command on a PostgreSQL server; the passwords of addresses, and servers that cannot be reached."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from pathlib import Path

import asyncpg
import pytest

from plait import PostgresStore
from plait.clock_and_ids import iso
from plait.events import RunClaimed
from tests.contracts.store.samples import CREATED, RUNNING, Writer, owner
from tests.support.processes.command import PLAIT, environment, plait_here
from tests.support.stores.postgres import empty, worker_dsn

PLAN = """name: letters
backends: {default: {kind: function, call: "answers.py:answer"}, person: {kind: person}}
tasks:
  - {id: a, prompt: one}
  - {id: b, prompt: "two {{ a }}", depends_on: a}
  - {id: c, prompt: "Which one?", backend: person}
"""
PASSWORD = "s3cret-of-mine"


@pytest.fixture
def dsn() -> str:
    dsn = worker_dsn()
    asyncio.run(empty(dsn))
    return dsn


def test_every_command_works_on_a_server(tmp_path: Path, dsn: str) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "answers.py").write_text("async def answer(prompt: str) -> str:\n    return f're: {prompt}'\n")
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}

    ran = plait_here(tmp_path, "run", "plan.yaml", "--store", dsn, "-q", **state)
    assert ran.code == 4, ran.err  # waits for a person
    [run] = plait_here(tmp_path, "runs", "--json", PLAIT_STORE=dsn).value
    assert (run["name"], run["status"]) == ("letters", "waiting_input")
    assert "Which one?" in plait_here(tmp_path, "answer", "--store", dsn).out
    answered = plait_here(tmp_path, "answer", run["run_id"], "c", "this", "--store", dsn, **state)
    assert answered.code == 0, answered.err
    resumed = plait_here(tmp_path, "resume", run["run_id"], "--store", dsn, "-q", **state)
    assert resumed.code == 0, resumed.err
    assert "re: two re: one" in plait_here(tmp_path, "show", "last", "b", "--store", dsn).out
    for command in (("show", "last"), ("log", "last"), ("graph", "last"), ("cancel", "last"), ("runs", "--long")):
        done = plait_here(tmp_path, *command, "--store", dsn, **state)
        assert done.code == 0, done.err
    assert not (tmp_path / ".plait").exists()
    deleted = plait_here(tmp_path, "gc", "--keep", "0", "--json", "--store", dsn, **state).value
    assert [one["run_id"] for one in deleted["runs"]] == [run["run_id"]]
    assert "backups" in deleted["remains"]
    assert plait_here(tmp_path, "runs", "--json", "--store", dsn).value == []


@pytest.mark.parametrize("skew", [600.0, -600.0], ids=["ahead", "behind"])
def test_a_reader_with_a_wrong_clock_shows_whether_the_owner_is_alive(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    right_time = time.time

    def shown() -> list[str]:
        with monkeypatch.context() as reader:
            reader.setattr(time, "time", lambda: right_time() + skew)
            [listed] = plait_here(tmp_path, "runs", "--json", "--store", dsn).value
            return [listed["status"], plait_here(tmp_path, "show", "last", "--json", "--store", dsn).value["status"]]

    now = right_time()
    asyncio.run(store_run(dsn, RunClaimed(iso(now), owner(), now + 300.0)))
    assert shown() == ["running", "running"]
    asyncio.run(set_back(dsn, 200.0))
    assert shown() == ["running", "running"]
    asyncio.run(set_back(dsn, 301.0))
    assert shown() == ["interrupted", "interrupted"]


async def store_run(dsn: str, claim: RunClaimed) -> None:
    """Store a running run of an owner on another host."""
    async with PostgresStore(dsn) as store:
        await Writer(store).write(CREATED, claim, RUNNING)


async def set_back(dsn: str, seconds: float) -> None:
    """Let the last batch of every run be `seconds` ago, by the clock of the server."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("UPDATE runs SET written_at = clock_timestamp() - make_interval(secs => $1)", seconds)
    finally:
        await connection.close()


def test_doctor_warns_of_a_server_that_may_lose_batches(tmp_path: Path, dsn: str) -> None:
    found = plait_here(tmp_path, "doctor", "--json", "--store", dsn).value["checks"]
    store = {one["check"]: one for one in found}
    assert store["store"]["verdict"] == "ok"
    assert "PostgreSQL" in store["store"]["found"]
    assert store["durability"]["verdict"] == "warning"
    assert "fsync is off" in store["durability"]["found"]  # as the tests start their server
    asynchronous = plait_here(tmp_path, "doctor", "--store", f"{dsn}&synchronous_commit=off").out
    assert "synchronous_commit is off" in asynchronous


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://me:{PASSWORD}@127.0.0.1:1/x",
        f"postgresql://me:a/{PASSWORD}@127.0.0.1:1/x",
        f"postgresql://127.0.0.1:1/x?pass%77ord={PASSWORD}",
    ],
)
def test_a_password_on_the_command_line_is_refused(tmp_path: Path, address: str) -> None:
    refused = plait_here(tmp_path, "runs", "--store", address)
    assert refused.code == 2
    assert "PGPASSFILE" in refused.err
    assert PASSWORD not in refused.err


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "POSTGRES", "mysql"])
@pytest.mark.parametrize("command", [("runs",), ("run", "plan.yaml")], ids=" ".join)
def test_an_address_of_another_scheme_is_no_file(tmp_path: Path, scheme: str, command: tuple[str, ...]) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    done = plait_here(tmp_path, *command, PLAIT_STORE=f"{scheme}://me:{PASSWORD}@db/plait")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"plait: {scheme}://me:***@db/plait is no address of a store; name a PostgreSQL database, such as "
        "postgresql://db/plait, or a file\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize("command", [("runs",), ("show", "last"), ("gc", "--keep", "1"), ("doctor",)])
def test_a_server_that_cannot_be_reached_is_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    address = f"postgresql://me:{PASSWORD}@127.0.0.1:1/x"
    failed = plait_here(tmp_path, *command, PLAIT_STORE=address)
    assert failed.code == 3
    assert PASSWORD not in failed.out + failed.err
    lines = [line for line in (failed.out + failed.err).splitlines() if "postgresql://me:***@127.0.0.1:1/x" in line]
    assert len(lines) == 1
    assert command[0] == "doctor" or lines == failed.err.splitlines()


@pytest.mark.parametrize("command", ["runs", "doctor"])
@pytest.mark.parametrize("first", ["s3cr", "5432"])
def test_an_address_that_cannot_be_read_shows_no_part_of_its_password(tmp_path: Path, command: str, first: str) -> None:
    failed = plait_here(tmp_path, command, PLAIT_STORE=f"postgresql://me:{first}/et%2Fof-mine@127.0.0.1:1/x")
    assert failed.code == 3
    said = " ".join((failed.out + failed.err).split())
    assert "the address postgresql://me:***@127.0.0.1:1/x cannot be read; write /, ?, #, @ and % in a password" in said
    assert not any(part in said for part in (first, "of-mine"))


@pytest.mark.slow
def test_serve_keeps_its_token_in_the_folder_of_the_store(tmp_path: Path, dsn: str) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "answers.py").write_text("async def answer(prompt: str) -> str:\n    return prompt\n")
    command = [*PLAIT, "serve", "--backends", "plan.yaml", "--port", "0", "--json", "--store", dsn]
    server = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(XDG_STATE_HOME=str(tmp_path / "state")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    server.send_signal(signal.SIGINT)
    _, error = server.communicate(timeout=60)
    assert line, error
    token = Path(json.loads(line)["token_file"])
    assert token.is_relative_to(tmp_path / "state" / "plait")
    assert not token.exists()


def test_a_role_that_may_only_read_is_refused_before_anything_is_paid_and_still_reads(tmp_path: Path, dsn: str) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "answers.py").write_text(
        "from pathlib import Path\n\nasync def answer(prompt):\n    Path('called').touch()\n    return prompt"
    )
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert plait_here(tmp_path, "run", "plan.yaml", "--store", dsn, "-q", **state).code == 4
    (tmp_path / "called").unlink()
    role = "only_reads"
    in_database(dsn, f"CREATE ROLE {role} LOGIN", f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    try:
        place = {"PLAIT_STORE": dsn.replace("postgres@", f"{role}@"), **state}
        for command in (("run", "plan.yaml", "-q"), ("resume", "last"), ("answer", "last", "c", "this")):
            done = plait_here(tmp_path, *command, **place)
            assert (done.code, len(done.err.splitlines())) == (3, 1), done.err
            assert f"the role {role} may not write to" in done.err and "GRANT" in done.err
        for command in (("show", "last"), ("log", "last"), ("runs",), ("answer",)):
            assert plait_here(tmp_path, *command, **place).code == 0
        examined = plait_here(tmp_path, "doctor", **place)
        assert examined.code == 3 and f"the role {role} may not write to" in examined.out
    finally:
        in_database(dsn, f"DROP OWNED BY {role}", f"DROP ROLE {role}")
    assert not (tmp_path / "called").exists()


def in_database(dsn: str, *statements: str) -> None:
    async def execute() -> None:
        opened = await asyncpg.connect(dsn)
        for statement in statements:
            await opened.execute(statement)
        await opened.close()

    asyncio.run(execute())
