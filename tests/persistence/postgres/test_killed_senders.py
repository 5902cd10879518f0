"""SIGKILL of a process that sends a note, at each boundary: the note is stored whole or not at all."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from plait import PostgresStore
from plait.failpoints import SENT
from plait.persistence import Note
from tests.contracts.store.samples import OPENING, RUN, START_A, Writer, at
from tests.support.processes.warm import Warm

SENDER = """
import os, signal, sys
import anyio
from plait import PostgresStore
from plait import failpoints
from plait.persistence import Note

def die(name):
    if name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with PostgresStore(sys.argv[1], mode="existing") as store:
        failpoints.on_reach = die
        await store.send(sys.argv[2], Note("cancel", "2026-11-21T23:00:05.000Z"))

anyio.run(main)
"""
STORED = {"txn.begun": 0, "txn.before_commit": 0, SENT: 1, "txn.after_commit": 1}
"""The number of notes after a kill at each boundary. The server ends a statement that it has received."""


@pytest.mark.parametrize("boundary", STORED)
async def test_a_note_of_a_killed_sender_is_stored_or_not(
    tmp_path: Path, store: PostgresStore, dsn: str, boundary: str
) -> None:
    writer = Writer(store)
    await writer.write(*OPENING)
    sender = Warm([sys.executable, "-c", SENDER, dsn, RUN, boundary], cwd=tmp_path)
    assert sender.wait(60) == -signal.SIGKILL
    await store.send(RUN, Note("answer", at(6)))  # waits for the lock of a transaction that is not over yet
    notes = await store.list_notes(RUN)
    assert len(notes) - 1 == STORED[boundary]
    assert [note.number for note in notes] == list(range(1, len(notes) + 1))
    await writer.write(START_A)  # the owner is not disturbed
