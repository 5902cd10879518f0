"""Plans that come over HTTP name nothing that runs, reads or sends; and what the application makes of odd requests."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import fastapi.routing
import httpx
import pytest

from plait import DAG, ParallelRunner, Runs, Task
from plait.clock_and_ids import Clock
from plait.errors import PlanError
from plait.persistence import MemoryStore, Store
from plait.runner.client.offered_plans import posted_plan
from plait.runner.serving.http_guard import SignIn
from plait.runner.serving.http_routes import ServedRuns
from plait.runner.serving.http_server import make_app
from tests.support.fakes import Talker
from tests.support.quick_runs import quick_runs
from tests.support.served_backends import set_of, specs_of
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

JSON = {"content-type": "application/json"}
TASKS = [{"id": "a", "prompt": "hello {{ who }}"}]


def test_a_posted_plan_is_a_plan() -> None:
    plan = {"name": "n", "inputs": {"who": "Ada"}, "tasks": [*TASKS, {"id": "b", "prompt": "b", "backend": "w"}]}
    dag = posted_plan(plan, {}, specs_of("w", "x")).dag
    assert (dag.name, dag.inputs, [dag.backend_of(task) for task in dag]) == ("n", {"who": "Ada"}, [None, "w"])
    assert posted_plan(plan, {"who": ["Bob", 1]}, specs_of("w")).dag.inputs == {"who": ["Bob", 1]}
    settings = {"tasks": [{"id": "a", "prompt": "x", "temperature": 0.5, "system": "Be brief."}]}
    (task,) = posted_plan(settings, {}, specs_of("w")).dag
    assert (task.temperature, task.system) == (0.5, "Be brief.")
    required = {"inputs": {"who": {"required": True}}, "tasks": TASKS}
    assert posted_plan(required, {"who": "Ada"}, specs_of("w")).dag.inputs == {"who": "Ada"}


@pytest.mark.parametrize(
    ("changes", "inputs", "said"),
    [
        ({"backends": {"w": {"kind": "function", "call": "os:system"}}}, {}, "backends: the backends of the server"),
        ({"backends": {}}, {}, "backends: the backends of the server"),
        (
            {"tasks": [{**TASKS[0], "model": "big"}]},
            {},
            "tasks[0].model: the models of the server are set at its start",
        ),
        ({"tasks": [{**TASKS[0], "files": "/etc/passwd"}]}, {}, "tasks[0].files: a posted plan reads no files"),
        ({"concurrency": 100}, {}, "concurrency: the server sets how many tasks run at once"),
        ({"inputs": {"who": {"files": "/etc/passwd"}}}, {}, "inputs.who: a posted plan reads no files"),
        ({}, {"who": {"files": "/etc/passwd", "more": 1}}, "inputs.who: a posted plan reads no files"),
        ({"inputs": {"who": {"rows": "/etc/rows.csv"}}}, {}, "inputs.who: a posted plan reads no files; give the rows"),
        ({}, {"who": {"rows": "people.csv", "columns": []}}, "inputs.who: a posted plan reads no files; give the rows"),
        ({}, {"who": {"rows": "/etc/rows.csv"}}, "inputs.who: a posted plan reads no files; give the rows"),
        ({"inputs": {"who": {"required": True}}}, {}, "inputs.who: this input has no default"),
        ({}, {"whom": "Bob"}, "inputs.whom: there is no input 'whom'; did you mean 'who'?"),
        ({}, {"city": "Oslo"}, "inputs.city: there is no input 'city'; the plan has 'who'"),
        ({"tasks": [{"id": "a", "prompt": "a", "backend": "v"}]}, {}, "unknown backend 'v'; the server has 'w', or"),
        ({"defaults": {"backend": "v"}}, {}, "defaults.backend: unknown backend 'v'; the server has 'w', or leave"),
        ({"tasks": [{"id": "a", "prompt": "a", "backend": "ww"}]}, {}, "unknown backend 'ww'; did you mean 'w'?"),
        ({"tasks": [{"id": "a", "prompt": "{% include '/etc/passwd' %}"}]}, {}, "tasks[0].prompt"),
        ({"tasks": []}, {}, "task"),
        ({"notify": [{"url": "http://10.0.0.1/"}]}, {}, "notify: where the notices of the server's runs go is set at"),
        ({"inputs": [1]}, {}, "inputs"),
        ({"name": "\ud800"}, {}, "U+D800"),
        ({}, {"who": float("nan")}, "the plan holds a value that JSON does not have"),
        ({"name": "x" * 2**20}, {}, "a plan may have 1 MiB, this one has 1,048,"),
    ],
)
def test_what_a_posted_plan_may_not_say(changes: dict[str, Any], inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as refused:
        posted_plan({"inputs": {"who": "Ada"}, "tasks": TASKS, **changes}, inputs, specs_of("w"))
    assert said in str(refused.value)
    assert not str(refused.value).startswith("plan")  # there is no file, and no line in it


def test_a_posted_plan_may_have_a_budget() -> None:
    assert posted_plan({"tasks": TASKS, "inputs": {"who": "Ada"}, "budget": 2.5}, {}, specs_of("w")).budget == 2.5


async def test_large_inputs_are_no_large_plan() -> None:
    value = "é" * 2**20
    new = {"plan": {"inputs": {"who": "Ada"}, "tasks": [{"id": "a", "prompt": "{{ who }}"}]}, "inputs": {"who": value}}
    async with application(MemoryStore()) as client:
        answer = await client.post("/api/runs", content=json.dumps(new, ensure_ascii=False), headers=JSON)
        assert answer.status_code == 201, answer.text[:300]


def test_no_file_is_opened_for_a_posted_plan(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.csv").write_text("secret")
    rows = {"rows": f"{tmp_path}/secret.csv"}
    for value in ({"files": str(tmp_path)}, {"files": f"{tmp_path}/*.txt", "max_files": 1}, rows):
        with pytest.raises(PlanError, match="reads no files") as refused:
            posted_plan({"inputs": {"who": value}, "tasks": TASKS}, {}, specs_of("w"))
        assert "secret" not in str(refused.value)


@asynccontextmanager
async def application(store: Store) -> AsyncGenerator[httpx.AsyncClient]:
    async with quick_runs(ParallelRunner(Talker(), store=store)) as service:
        app = make_app(ServedRuns(service, set_of("default")), SignIn("token", "127.0.0.1:8377", Clock()))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            yield client


async def test_a_schema_that_costs_too_much_is_refused_in_one_line() -> None:
    fan = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**fan, "d40": {"type": "string"}}}
    async with application(MemoryStore()) as client:
        plan = {"tasks": [{"id": "a", "prompt": "a", "output_schema": schema}]}
        answer = await client.post("/api/runs", json={"plan": plan}, headers=JSON)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["kind"] == "plan_invalid"
    assert "too costly to check" in error["message"]


NO_SENSE = [
    b"",
    b"{",
    b"[" * 100_000,
    b"\xff\xfe",
    b"[]",
    b'{"plan": 1}',
    b'{"plan": {}, "plam": {}}',
    b'{"plan": {}, "key": ""}',
    b'{"plan": {"tasks": []}, "key": "\\ud800"}',
    b'{"plan": {"tasks": [{"id": "a", "prompt": "a"}], "\\ud800": 1}}',
    b'{"plan": {"tasks": []}, "inputs": {"\\ud800": 1}}',
    b'{"plan": {"tasks": NaN}}',
    b'{"plan": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    b'{"plan": {"x": ' + b"9" * 5000 + b"}}",
]


async def test_a_request_that_makes_no_sense_is_told_why() -> None:
    async with application(MemoryStore()) as client:
        for body in NO_SENSE:
            answer = await client.post("/api/runs", content=body, headers=JSON)
            assert answer.status_code == 422, (body[:40], answer.text)
            error = answer.json()["error"]
            assert error["kind"] in {"invalid_request", "plan_invalid"}, (body[:40], error)


async def test_a_store_that_fails_is_said() -> None:
    async with application(FaultyStore(MemoryStore(), on_write(lambda _: Fault.BEFORE))) as client:
        answer = await client.post("/api/runs", json={"plan": {"tasks": [{"id": "a", "prompt": "a"}]}})
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "store_failed")
        assert (await client.get("/api/runs")).json() == {"runs": []}


async def test_a_bug_tells_nothing_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Runs, "list", broken)
    async with application(MemoryStore()) as client:
        answer = await client.get("/api/runs")
    assert (answer.status_code, answer.json()["error"]["kind"], "secret" in answer.text) == (500, "internal", False)


async def stream(served: ServedRuns, run_id: str, receive: Any, send: Any) -> None:
    """Request the events of a run, as a server does."""
    path = f"/api/runs/{run_id}/events"
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    await make_app(served, SignIn("token", "127.0.0.1:8377", Clock()))(scope, receive, send)


async def test_a_stream_beats_while_nothing_happens_and_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastapi.routing, "_PING_INTERVAL", 0.01)
    sent = list[bytes]()

    async def receive() -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent.count(b": ping\n\n") == 3:
            served.stopping.set()

    async with ParallelRunner(Talker(), store=MemoryStore()).runs as service:
        served = ServedRuns(service, set_of("default"))
        run_id = await service.create(DAG([Task("a", prompt="a")]))
        with anyio.fail_after(60):
            await stream(served, run_id, receive, send)
    told = [text for text in sent if text != b": ping\n\n"]
    assert told[1] == b"retry: 1000\n\n"
    event = dict(line.split(": ", 1) for line in told[2].decode().splitlines() if line)
    assert (event["id"], event["event"], json.loads(event["data"])["seq"]) == ("1", "run_created", 1)
    assert sent[-1] == b""


async def test_a_stream_ends_with_its_client() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_message: Any) -> None:
        pass

    async with ParallelRunner(Talker(), store=MemoryStore()).runs as service:
        run_id = await service.create(DAG([Task("a", prompt="a")]))
        with anyio.fail_after(60):
            await stream(ServedRuns(service), run_id, receive, send)


async def test_a_long_history_is_told_to_nobody_who_has_left() -> None:
    began, sent = anyio.Event(), list[object]()

    async def receive() -> dict[str, Any]:
        await began.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:  # as that of a server with room in its buffer: it does not pause
        sent.append(message)
        began.set()

    runner = ParallelRunner(Talker(), store=MemoryStore())
    async with runner.runs as service:
        run = await runner.run(DAG([Task(f"t{number}", prompt="a") for number in range(200)]))
        await stream(ServedRuns(service), run.run_id, receive, send)
    assert len(sent) < 20


async def test_a_store_that_fails_ends_a_stream_with_a_comment() -> None:
    sent, asked = list[bytes](), 0

    def fails(method: str, _number: int) -> Fault | None:
        nonlocal asked
        asked += method == "list_events"
        return Fault.BEFORE if asked > 1 else None

    async def receive() -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    store = FaultyStore(MemoryStore(), fails)
    async with quick_runs(ParallelRunner(Talker(), store=store)) as service:
        run_id = await service.create(DAG([Task("a", prompt="a")]))
        with anyio.fail_after(60):
            await stream(ServedRuns(service), run_id, receive, send)
    comment = next(text for text in reversed(sent) if text)
    assert comment.startswith(b': "')
    assert comment.endswith(b'"\n\n')
