"""The tables of this format, and the statements for many rows."""

from __future__ import annotations

import re
from hashlib import sha256

from plait.persistence import tables
from plait.persistence.tables import (
    ADD_NOTE,
    COLUMNS,
    FORMAT,
    KINDS,
    SET_LAST_SEQ,
    SET_STATUS,
    Write,
    for_all_rows,
    for_each_row,
    schema,
)

MADE = {203: "94456c39d2bba06a"}
"""What each format makes of the words below, comments and blanks aside. Other tables need another FORMAT."""
WORDS = {word: word.upper() for word in ("text", "int", "float", "bytes", "serial", "table", "keyed")}


def test_other_tables_have_another_format() -> None:
    whole = " ".join(re.sub(r"--[^\n]*", "", schema(WORDS)).split())
    assert sha256(whole.encode()).hexdigest()[:16] == MADE[FORMAT]


def test_the_columns_and_their_kinds_are_those_of_the_tables() -> None:
    assert list(COLUMNS) == ["texts", "runs", "tasks", "attempts", "messages", "events", "notes", "accounts"]
    assert COLUMNS["texts"] == ["sha256", "content"]
    assert COLUMNS["notes"] == ["run_id", "number", "at", "kind", "task_id", "body", "checksum"]
    assert len(COLUMNS["attempts"]) == 31
    assert (KINDS["sha256"], KINDS["content"], KINDS["cost_usd"], KINDS["seq"]) == ("bytes", "text", "float", "int")
    assert {column for columns in COLUMNS.values() for column in columns} <= KINDS.keys()


def test_every_write_names_columns_of_its_table() -> None:
    assert Write("notes").columns == tuple(COLUMNS["notes"])
    writes = [one for one in vars(tables).values() if isinstance(one, Write)]
    assert len(writes) == 26
    assert all({*write.columns, *write.key} <= {*COLUMNS[write.table]} for write in writes)


def test_every_change_finds_its_rows_by_their_whole_key() -> None:
    keys = {"runs": ("run_id",), "tasks": ("run_id", "position"), "attempts": ("run_id", "position", "attempt")}
    assert Write("notes", key="run_id").key == ("run_id",)
    writes = {name: one for name, one in vars(tables).items() if isinstance(one, Write)}
    inserts = {name for name, one in writes.items() if not one.key}
    assert inserts == {
        *("ADD_TEXT", "ADD_RUN", "ADD_TASK", "ADD_TASK_USUALLY", "ADD_MESSAGE", "ADD_EVENT", "ADD_NOTE"),
        *("END_ATTEMPT", "COMPLETE_USUALLY", "COMPLETE_FUNCTION"),
    }
    whole = {name for name in inserts if writes[name].columns == tuple(COLUMNS[writes[name].table])}
    assert whole == {"ADD_TEXT", "END_ATTEMPT", "ADD_MESSAGE", "ADD_EVENT", "ADD_NOTE"}
    for name in writes.keys() - inserts:
        assert writes[name].key == keys[writes[name].table], name


def test_the_statement_for_one_row_and_for_some() -> None:
    assert for_each_row(Write("notes", "run_id body", end=" ON CONFLICT DO NOTHING")) == (
        "INSERT INTO notes (run_id, body) VALUES (?, ?) ON CONFLICT DO NOTHING"
    )
    assert for_each_row(Write("notes", "run_id body"), 2) == "INSERT INTO notes (run_id, body) VALUES (?, ?), (?, ?)"
    assert for_each_row(SET_STATUS) == "UPDATE tasks SET status = ? WHERE run_id = ? AND position = ?"
    assert for_each_row(SET_STATUS, 2) == (
        "UPDATE tasks AS t SET status = u.column1 FROM (VALUES (?, ?, ?), (?, ?, ?)) AS u "
        "WHERE t.run_id = u.column2 AND t.position = u.column3"
    )
    assert ADD_NOTE.columns == tuple(COLUMNS["notes"])


def test_the_statement_for_the_rows_of_several_writes() -> None:
    note = Write("notes", "run_id number body", end=" ON CONFLICT DO NOTHING")
    assert for_all_rows((SET_STATUS, note)) == (
        "WITH w0 AS (UPDATE tasks AS t SET status = u.status FROM unnest(?::text[], ?::text[], ?::bigint[]) "
        "AS u (status, run_id, position) WHERE t.run_id = u.run_id AND t.position = u.position), "
        "w1 AS (INSERT INTO notes (run_id, number, body) SELECT u.run_id, u.number, u.body "
        "FROM unnest(?::text[], ?::bigint[], ?::text[]) AS u (run_id, number, body) ON CONFLICT DO NOTHING) SELECT 1"
    )


def test_the_statement_with_a_head_writes_only_beside_the_expected_head() -> None:
    statement = for_all_rows((SET_STATUS,), SET_LAST_SEQ)
    assert statement.startswith("WITH head AS (UPDATE runs SET last_seq = ?, input_tokens = ?, ")
    assert (
        "written_at = clock_timestamp(), lease_s = coalesce(?, lease_s) WHERE run_id = ? AND last_seq = ? "
        "AND epoch = ? AND owner_id IS NOT DISTINCT FROM ? RETURNING number), w0 AS (UPDATE tasks AS t SET "
        "status = u.status FROM head, unnest("
    ) in statement
    assert statement.endswith(") SELECT count(*) FROM head")
