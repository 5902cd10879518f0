"""What a PostgresStore says and refuses before it has a server; `postgres/` has the tests with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait import PostgresStore
from plait.errors import StoreNotOpen

DSN = "postgresql://me:secret@host/db"


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a store's mode is 'create', 'existing' or 'read', not 'write'$"):
        PostgresStore(DSN, mode="write")  # type: ignore[arg-type]


def test_an_address_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(
        ValueError, match=r"^a PostgresStore needs an address like postgresql://.*, not 'mysql://me:"
    ) as e:
        PostgresStore("mysql://me:secret@host/db")
    assert "secret" not in str(e.value)


def test_a_store_shows_its_address_without_the_password() -> None:
    assert repr(PostgresStore(DSN, mode="read")) == "PostgresStore('postgresql://me:***@host/db', mode='read')"
    assert PostgresStore(DSN).mode == "create"


async def test_a_store_that_is_not_open_refuses_every_call() -> None:
    store = PostgresStore(DSN)
    said = r"^the store postgresql://me:\*\*\*@host/db is not open; use it inside `async with`$"
    calls: list[Any] = [
        store.list_runs(),
        store.wait_for_note("r"),
        store.obstacle(),
        store.purge([]),
        store.silence("r"),
    ]
    for call in calls:
        with pytest.raises(StoreNotOpen, match=said):
            await call
    await store.close()
    assert (store.files_root, store.server_version) == (None, "")


def test_files_are_below_the_state_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = PostgresStore(DSN)
    store._store_id = "0123"  # what opening reads
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert store.files_root == tmp_path / "plait" / "0123"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert store.files_root == Path("/home/me/.local/state/plait/0123")
