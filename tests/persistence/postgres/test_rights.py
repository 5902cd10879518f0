"""Databases and roles that can store no run, and servers that refuse to write for good or only for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

import asyncpg
import pytest

from plait import DAG, ParallelRunner, PostgresStore, RunStatus, Task
from plait.errors import Conflict, StoreError, StoreRefused, StoreUnusable
from plait.events import StoreAwaited
from plait.persistence import postgres_connection
from tests.support.fakes import Talker
from tests.support.stores.postgres import restart_as_standby

ONE = DAG([Task("a", "a")])


async def execute(dsn: str, *statements: str) -> None:
    opened = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await opened.execute(statement)
    finally:
        await opened.close()


def as_role(dsn: str, role: str) -> str:
    return dsn.replace("postgres@", f"{role}@", 1)


def in_database(dsn: str, name: str) -> str:
    return urlsplit(dsn)._replace(path=f"/{name}").geturl()


@pytest.fixture
async def reader(dsn: str) -> AsyncGenerator[str]:
    """The address of the store for a role that may only read."""
    name = f"reads_{urlsplit(dsn).path.strip('/')}"
    await execute(dsn, f"CREATE ROLE {name} LOGIN", f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
    yield as_role(dsn, name)
    await execute(dsn, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.mark.parametrize("mode", ["create", "existing"])
async def test_a_role_that_may_only_read_is_refused_where_runs_are_written(
    dsn: str, reader: str, mode: postgres_connection.Mode
) -> None:
    with pytest.raises(
        StoreUnusable, match=r"may not write to postgresql://\S+: it lacks INSERT on texts, .*; let the owner GRANT "
    ):
        async with PostgresStore(reader, mode=mode):
            pass
    async with PostgresStore(dsn) as store:
        run_id = (await ParallelRunner(Talker(), store=store).run(ONE)).run_id
    async with PostgresStore(reader, mode="read") as store:
        record = await store.get_run(run_id)
        assert record is not None and record.status == "completed"
        assert "lacks INSERT on texts" in (await store.obstacle() or "")


async def test_each_right_that_a_run_needs_is_looked_at(dsn: str, reader: str) -> None:
    role = urlsplit(reader).username
    await execute(
        dsn,
        f"GRANT INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO {role}",
        f"REVOKE UPDATE ON tasks FROM {role}",
    )
    with pytest.raises(StoreUnusable, match="it lacks UPDATE on tasks; "):
        async with PostgresStore(reader):
            pass
    await execute(dsn, f"GRANT UPDATE ON tasks TO {role}", f"REVOKE UPDATE ON notes FROM {role}")
    async with PostgresStore(reader) as store:
        result = await ParallelRunner(Talker(), store=store).run(ONE)
    assert (result.status, result.degraded) == (RunStatus.COMPLETED, ())


async def test_a_role_without_rights_is_told_who_grants_them(dsn: str, reader: str) -> None:
    await execute(dsn, f"REVOKE SELECT ON plait_store FROM {urlsplit(reader).username}")
    told = "cannot open the store: .*: permission denied for table plait_store; let the owner of the tables GRANT"
    with pytest.raises(StoreUnusable, match=told):
        async with PostgresStore(reader, mode="read"):
            pass


async def test_a_role_whose_transactions_are_read_only_is_refused(dsn: str, reader: str) -> None:
    role = urlsplit(reader).username
    await execute(
        dsn,
        f"GRANT INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO {role}",
        f"ALTER ROLE {role} SET default_transaction_read_only = on",
    )
    with pytest.raises(StoreUnusable, match=r"may only read in .*default_transaction_read_only is on"):
        async with PostgresStore(reader):
            pass


async def test_a_standby_is_refused_where_runs_are_written_and_can_be_read(own_server: tuple[str, object]) -> None:
    dsn, server = own_server
    async with PostgresStore(dsn) as store:
        run_id = (await ParallelRunner(Talker(), store=store).run(ONE)).run_id
    await asyncio.to_thread(restart_as_standby, server)
    for mode in ("create", "existing"):
        with pytest.raises(StoreUnusable, match=r"is a standby, which can only be read; name the primary server$"):
            async with PostgresStore(dsn, mode=mode):
                pass
    async with PostgresStore(dsn, mode="read") as store:
        record = await store.get_run(run_id)
        assert record is not None and record.status == "completed"
        assert "is a standby" in (await store.obstacle() or "")


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_a_database_that_cannot_store_every_character_is_refused(dsn: str, encoding: str) -> None:
    name = f"{urlsplit(dsn).path.strip('/')}_{encoding.lower()}"
    made = f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    await execute(dsn, f"DROP DATABASE IF EXISTS {name}", made)
    try:
        with pytest.raises(StoreUnusable, match=f"has the encoding {encoding}, .* ENCODING 'UTF8'"):
            async with PostgresStore(in_database(dsn, name)):
                pass
    finally:
        await execute(dsn, f"DROP DATABASE {name}")


async def test_a_database_that_is_missing_is_refused_with_one_remedy(dsn: str) -> None:
    with pytest.raises(StoreUnusable, match=r'"nowhere" does not exist; create the database, or correct the address$'):
        async with PostgresStore(in_database(dsn, "nowhere")):
            pass


async def test_a_right_that_is_lost_in_mid_run_is_not_waited_for_at_the_end_and_caught_up_once_back(
    dsn: str, reader: str
) -> None:
    role = urlsplit(reader).username
    rights = "INSERT, UPDATE ON ALL TABLES IN SCHEMA public"
    await execute(dsn, f"GRANT {rights} TO {role}")

    async def work(prompt: str) -> str:
        if prompt == "a":
            await execute(dsn, f"REVOKE {rights} FROM {role}")
        return prompt

    async with PostgresStore(reader) as store:
        async with ParallelRunner(work, store=store).start(ONE) as run:
            told = [event async for event in run.events()]
            result = await run.result()
        assert [one.lost > 0 for one in result.degraded] == [True]
        assert "permission denied" in result.degraded[0].error and "GRANT" in result.degraded[0].error
        assert not any(isinstance(event, StoreAwaited) for event in told)
        await execute(dsn, f"GRANT {rights} TO {role}")
        again = await ParallelRunner(Talker(), store=store).resume(run.run_id)
    assert (again.status, again.degraded) == (RunStatus.COMPLETED, ())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncpg.InsufficientPrivilegeError, StoreRefused),
        (asyncpg.InvalidCatalogNameError, StoreRefused),
        (asyncpg.InvalidPasswordError, StoreRefused),
        (asyncpg.InvalidAuthorizationSpecificationError, StoreRefused),
        (asyncpg.ReadOnlySQLTransactionError, StoreRefused),
        (asyncpg.DiskFullError, StoreRefused),
        (asyncpg.UndefinedTableError, StoreRefused),
        (asyncpg.RaiseError, Conflict),
        (asyncpg.CheckViolationError, Conflict),
        (asyncpg.UnknownPostgresError, Conflict),
        (asyncpg.CannotConnectNowError, StoreError),
        (asyncpg.AdminShutdownError, StoreError),
        (asyncpg.TooManyConnectionsError, StoreError),
        (ConnectionRefusedError, StoreError),
    ],
)
def test_refusals_that_need_a_person_are_told_from_those_that_pass(error: type[Exception], kind: type) -> None:
    found = postgres_connection.explained("postgresql://me@host/db", error("why"))
    assert type(found) is kind
    assert "why" in str(found)


def test_a_standby_refuses_only_until_it_is_promoted() -> None:
    error = asyncpg.ReadOnlySQLTransactionError("cannot execute UPDATE in a read-only transaction")
    assert type(postgres_connection.explained("postgresql://me@host/db", error, on_standby=True)) is StoreError


async def test_a_trigger_that_raises_fails_the_task_whose_result_it_refuses(dsn: str) -> None:
    await execute(
        dsn,
        "CREATE FUNCTION no_poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.text LIKE '%poison%' THEN RAISE EXCEPTION 'no poison here'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER no_poison BEFORE INSERT OR UPDATE ON attempts FOR EACH ROW EXECUTE FUNCTION no_poison()",
    )
    try:
        async with PostgresStore(dsn) as store:
            dag = DAG([Task("a", "poison"), Task("b", "b", ["a"]), Task("c", "harmless \0")])
            result = await ParallelRunner(Talker(), store=store).run(dag)
            record = await store.get_run(result.run_id)
            stored = {task.task_id: task.status for task in await store.list_tasks(result.run_id)}
    finally:
        await execute(dsn, "DROP FUNCTION no_poison CASCADE")
    assert record is not None and (record.status, record.owner) == ("failed", None)
    assert stored == {"a": "failed", "b": "pending", "c": "completed"}
    assert "no poison here" in (result["a"].error or "")
