"""A run that asks, is answered and ends, with SIGKILL at random boundaries, and a receiver of notices that is away for
an hour.

The receiver is a process of its own on 127.0.0.1, which writes down what it takes. Boundaries are those of the store's
transactions, and both sides of each try to send. At the end the receiver must have each notice of a stored event, with
the id of that event, and no other one.

`python -m tests.faults.campaigns.notice_kills SEED ...` plays seeds, `--count N` those from 0 on, `--planted` the bugs.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import HTTPError
from urllib.request import urlopen

import anyio

from plait import ParallelRunner, Retry, RunStatus, SQLiteStore, Task, failpoints
from plait.backends import ask
from plait.clock_and_ids import Clock, iso
from plait.events import Event, RunCompleted, RunFailed, TaskWaiting
from plait.json_form import to_json
from plait.persistence import Store
from plait.persistence.store_records import EventRecord, Note
from plait.runner.client.unsent_notices import UnsentNotices
from plait.runner.domain.notify_target import NoticeWord, NotifyTarget
from plait.runner.engine import notices
from plait.runner.engine.checkpointer import Checkpointer
from plait.runner.recovery import resume
from plait.statuses import RUN_DONE
from tests.faults.campaigns import killed_runs
from tests.faults.campaigns.killed_runs import Campaign, in_a_process
from tests.faults.campaigns.report import Scale

RUNS: dict[Scale, int] = {"quick": 30, "nightly": 500}
AWAY_S = 3_600
"""Seconds for which the receiver is away, in the runs in which it is."""
_KILLS = 6
_KINDS = (("", 40), ("txn.", 20), ("notice.", 2))
"""How the names of boundaries begin, and the number of those that a process is killed at the latest."""
_ROUNDS = 80
_WORDS = {TaskWaiting.kind: "question", RunCompleted.kind: "done", RunFailed.kind: "failed"}
_VARIABLE = "HOOK_OF_THE_CAMPAIGN"


class Ahead(Clock):
    """A clock that is ahead, and short sleeps."""

    def __init__(self, ahead: float) -> None:
        self._ahead = ahead

    def wall(self) -> float:
        return time.time() + self._ahead

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds / 1_000)


@dataclass
class Told(killed_runs.Told):
    """What one run showed."""

    sent: int = 0
    again: int = 0


def tell(seed: int, bug: str | None = None) -> Told:
    """Play one seed to its end, in processes of its own. Call it in a process without threads."""
    importlib.import_module("aiohttp")  # once, and not again in each process
    told, rng = Told("notice_kills", seed), random.Random(f"notices {seed}")
    fails, is_away, ahead = rng.random() < 0.4, rng.random() < 0.5, 0.0
    with tempfile.TemporaryDirectory(prefix="plait-notices-") as place, _receiver(Path(place)) as url:
        folder = Path(place)
        (folder / "away").touch() if is_away else None
        os.environ[_VARIABLE] = url
        for _ in range(_ROUNDS):
            kind, most = rng.choice(_KINDS)
            kill = (kind, rng.randint(1, most)) if told.kills.total() < _KILLS else None
            ended = in_a_process(partial(_execute, folder, ahead, kill, bug, fails=fails), folder)
            if isinstance(ended, str):
                told.kills[ended] += 1
                continue
            if "problem" in ended:
                told.broken(ended["problem"])
                return told
            ahead += 600
            if ahead >= AWAY_S:
                (folder / "away").unlink(missing_ok=True)
            if ended["is_over"] and ended["due"] is None:
                _judge(folder, ended["events"], told)
                return told
        told.broken(f"no end after {_ROUNDS} processes")
    return told


def _judge(folder: Path, stored: Mapping[str, str], told: Told) -> None:
    """Compare what the receiver took with the events that are stored."""
    lines = (folder / "taken").read_text().splitlines() if (folder / "taken").exists() else []
    taken = Counter((one["id"], one["on"]) for one in map(json.loads, lines))
    for notice in stored.items() - taken.keys():
        told.broken(f"{notice} was not sent")
    for notice in taken.keys() - stored.items():
        told.broken(f"{notice} tells of what did not happen")
    told.sent, told.again = len(taken), taken.total() - len(taken)


@contextmanager
def _receiver(folder: Path) -> Generator[str]:
    """Run the receiver in a process, which takes nothing while there is a file `away`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_away = (folder / "away").exists()
            if not is_away:
                with (folder / "taken").open("ab") as taken:
                    taken.write(body + b"\n")
            self.send_response(503 if is_away else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        child = os.fork()
        if not child:
            server.serve_forever(0.01)
            os._exit(0)
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _execute(
    folder: Path, ahead: float, kill: tuple[str, int] | None, bug: str | None, *, fails: bool
) -> dict[str, Any]:
    """Go on with the run, and send what is due; `kill` is the boundary at which the process ends, of those that begin
    so.
    """
    reached = 0

    def count(name: str) -> None:
        nonlocal reached
        if kill is None or not name.startswith(kill[0]):
            return
        reached += 1
        if reached == kill[1]:
            (folder / "boundary").write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)

    deliver = notices._deliver  # pyright: ignore[reportPrivateUsage]

    async def counted(target: NotifyTarget, notice: Mapping[str, Any]) -> str | None:
        count("notice.before_send")
        why = await deliver(target, notice)
        count("notice.after_send")
        return why

    failpoints.on_reach = count
    plant = nullcontext if bug is None else BUGS[bug]
    at_once = mock.patch.object(resume, "longest_delay", return_value=0.0)
    with mock.patch.object(notices, "_deliver", counted), at_once, plant():
        return anyio.run(partial(_go_on, folder, Ahead(ahead), fails=fails))


async def _go_on(folder: Path, clock: Clock, *, fails: bool) -> dict[str, Any]:
    async def work(prompt: str) -> str:
        answer = str(await ask("Where to?")) if prompt == "ask" else prompt
        if fails and prompt == "ask":
            raise ValueError(answer)
        return answer

    tasks = [Task("a", "first"), Task("b", "ask", ["a"], retry=Retry(attempts=2, base_delay=0)), Task("c", "x", ["b"])]
    async with SQLiteStore(folder / "runs.db") as store:
        runner = ParallelRunner(work, store=store, clock=clock, notify=[{"url_env": _VARIABLE}])
        if (record := await store.get_run("r")) is None:
            await runner.run(tasks, "r")
        elif RunStatus(record.status) not in RUN_DONE:
            asked = {one.task_id: "Rome" for one in await runner.runs.questions("r")}
            await runner.resume("r", answers=asked)
        due = await UnsentNotices(store, clock=clock).send()
        failpoints.on_reach = None
        record = await store.get_run("r")
        found = await store.list_events("r")
    assert record is not None
    events = {f"r:{one.seq}": _WORDS[one.kind] for one in found if one.kind in _WORDS}
    return {"is_over": RunStatus(record.status) in RUN_DONE, "due": due, "events": events}


def _noted_as_sent_first() -> AbstractContextManager[object]:
    async def careless(
        store: Store,
        run_id: str,
        to: int,
        target: NotifyTarget,
        event: Any,
        word: NoticeWord,
        number: int,
        clock: Clock,
    ) -> float:
        body = to_json({"to": to, "event": event.seq, "end": "sent", "try": number})
        await store.send(run_id, Note(notices.NOTICE, iso(clock.wall()), None, body))
        notice = await notices._notice(store, run_id, event, word)  # pyright: ignore[reportPrivateUsage]
        await notices._deliver(target, notice)  # pyright: ignore[reportPrivateUsage]
        return 0.0

    return mock.patch.object(notices, "_try", careless)


def _another_id_each_time() -> AbstractContextManager[object]:
    def random_id(run_id: str, _event: EventRecord) -> str:
        return f"{run_id}:{secrets.token_hex(4)}"

    return mock.patch.object(notices, "notice_id", random_id)


def _told_before_it_is_stored() -> AbstractContextManager[object]:
    submit = Checkpointer.submit

    def hasty(self: Checkpointer, new_events: Sequence[Event]) -> Any:
        commit = submit(self, new_events)
        waiting = len(self._unstored) + len(self._gathered)  # pyright: ignore[reportPrivateUsage]
        first = self._position.next_seq + waiting - len(new_events)  # pyright: ignore[reportPrivateUsage]
        for number, one in enumerate(new_events, first):
            if one.kind in _WORDS:
                form = {"id": f"r:{number}", "on": _WORDS[one.kind]}
                with suppress(HTTPError), urlopen(os.environ[_VARIABLE], to_json(form).encode()):
                    pass
        return commit

    return mock.patch.object(Checkpointer, "submit", hasty)


BUGS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "noted as sent before it is sent": _noted_as_sent_first,
    "another id each time": _another_id_each_time,
    "told before it is stored": _told_before_it_is_stored,
}
"""What plants each bug in a process."""
CAMPAIGN = Campaign(
    method="notice_kills",
    unit="runs that tell of themselves",
    runs=RUNS,
    tell=tell,
    bugs=BUGS,
    tried=60,
    figures=lambda told: {
        "notices": sum(one.sent for one in told),
        "sent again": sum(one.again for one in told),
    },
)
run = CAMPAIGN.run


if __name__ == "__main__":
    sys.exit(CAMPAIGN.main(sys.argv[1:]))
