"""Attempts on other hosts: placed before they begin, answered over the connection."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from plait import DAG, OpenQuestion, ParallelRunner, Retry, RunStatus, Task, TaskStatus, events
from plait.backends import CommandBackend, FunctionBackend
from plait.backends.backend_protocol import Allowance
from plait.backends.hosts.host_backend import SSHHost, SSHHosts
from plait.backends.process.process_table import start_time
from plait.events import TaskCompleted, TaskPlaced, TaskStarted
from plait.persistence import Batch, MemoryStore, SQLiteStore
from plait.runner.scheduling.scheduler import Scheduler
from tests.support.hosts import functions
from tests.support.hosts.world import PLAIT, HostFolder
from tests.support.polling import until


@pytest.fixture
def world(tmp_path: Path) -> HostFolder:
    return HostFolder(tmp_path / "hosts")


def tasks(count: int, prompt: str = "hello") -> DAG:
    return DAG(Task(f"t{number}", prompt) for number in range(count))


@pytest.mark.parametrize("stored", ["memory", "sqlite"])
async def test_each_place_is_stored_before_the_attempt_ends(world: HostFolder, tmp_path: Path, stored: str) -> None:
    store = MemoryStore() if stored == "memory" else SQLiteStore(tmp_path / "runs.db")
    async with store:
        runner = ParallelRunner(world.hosts("m1", "m2").placed(functions.echo), store=store)
        result = await runner.run(tasks(6), "r")
        assert set(result.text.values()) == {"re: hello"}
        kinds: dict[str | None, list[tuple[str, str | None]]] = {}
        for event in await store.list_events("r"):
            kinds.setdefault(event.task_id, []).append((event.kind, json.loads(event.detail).get("place")))
    for number in range(6):
        started, placed, completed = kinds[f"t{number}"]
        assert (started[0], completed[0]) == (TaskStarted.kind, TaskCompleted.kind)
        assert placed[0] == TaskPlaced.kind
        assert placed[1] in {"m1", "m2"}
    assert world.processes("m1") == world.processes("m2") == []


class GatedStore(MemoryStore):
    """Holds back the first place of an attempt until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = anyio.Event(), anyio.Event()

    async def write(self, batch: Batch) -> None:
        if any(isinstance(change, TaskPlaced) for change in batch.events):
            self.asked.set()
            await self.gate.wait()
        await super().write(batch)


async def test_nothing_begins_on_a_host_before_its_place_is_stored(world: HostFolder, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    hosts = world.hosts("m1")
    async with GatedStore() as store, anyio.create_task_group() as group:
        group.start_soon(ParallelRunner(hosts.placed(functions.until_file), store=store).run, tasks(1, str(file)))
        await store.asked.wait()
        async with hosts.reachable() as reachable:
            state = await reachable[0].probe()  # by now the host would have begun
        assert (state.at_work, (tmp_path / "file.begun").exists()) == (1, False)
        store.gate.set()
    assert (tmp_path / "file.begun").exists()


async def test_attempts_go_to_the_least_loaded_host_within_its_slots(world: HostFolder, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    hosts = SSHHosts([SSHHost("m1", slots=1, plait=PLAIT), SSHHost("m2", slots=3, plait=PLAIT)], ssh=world.ssh)
    assert hosts.slots == 4
    runner = ParallelRunner(hosts.placed(functions.until_file), concurrency=6)
    placed: list[str] = []
    async with runner.start(tasks(6, str(gate))) as run:
        async for event in run.events():
            if isinstance(event, events.TaskPlaced):
                placed.append(event.place)
            if len(placed) == 4:
                gate.touch()
        result = await run.result()
    assert result.status is RunStatus.COMPLETED
    assert sorted(placed[:4]) == ["m1", "m2", "m2", "m2"]


async def test_as_many_tasks_run_at_once_as_the_hosts_have_slots(world: HostFolder, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    runner = ParallelRunner(world.hosts("m1", "m2", slots=2).placed(functions.until_file), concurrency=None)
    started: list[str] = []
    placed: list[str] = []
    async with runner.start(tasks(6, str(gate))) as run:
        async for event in run.events():
            if isinstance(event, events.TaskStarted):
                started.append(event.task_id)
            if isinstance(event, events.TaskPlaced):
                placed.append(event.task_id)
                if len(placed) == 4:
                    assert len(started) == 4
                    gate.touch()
        assert (await run.result()).status is RunStatus.COMPLETED


async def test_two_runs_share_the_slots_of_a_host(world: HostFolder, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    hosts = world.hosts("m1", slots=1), world.hosts("m1b", slots=1)
    (world.folder / "m1b").symlink_to(world.folder / "m1")
    (world.folder / "m1").mkdir()
    placed: list[str] = []

    async def run(number: int) -> None:
        runner = ParallelRunner(hosts[number].placed(functions.until_file))
        async with runner.start(tasks(1, str(gate))) as running:
            async for event in running.events():
                if isinstance(event, events.TaskPlaced):
                    placed.append(event.place)
                    first.set()
            assert (await running.result()).status is RunStatus.COMPLETED

    first = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(run, 0)
        await first.wait()
        group.start_soon(run, 1)
        while not world.processes("m1b"):  # noqa: ASYNC110 - it is another process's doing
            await anyio.sleep(0.01)
        assert placed == ["m1"]
        gate.touch()
    assert placed == ["m1", "m1b"]


async def this_one(_question: OpenQuestion) -> str:
    return "this one"


def unnamed() -> Callable[[str], str]:
    def inner(prompt: str) -> str:
        return prompt

    return inner


async def test_errors_and_questions_of_a_function_come_back(world: HostFolder) -> None:
    hosts = world.hosts("m1")
    backends = {"bad": hosts.placed(functions.failing), "ask": hosts.placed(functions.asking)}
    runner = ParallelRunner(backends=backends, on_question=this_one)
    dag = DAG([Task("a", backend="bad", prompt="x", retry=Retry(attempts=1)), Task("b", backend="ask", prompt="take")])
    result = await runner.run(dag)
    assert (result["a"].status, result["a"].error_kind, result["a"].error) == (
        TaskStatus.FAILED,
        "refused",
        "not this one",
    )
    assert result["b"].text == "take: this one"


async def test_an_attempt_sees_no_context_variable_of_another_one(world: HostFolder) -> None:
    runner = ParallelRunner(world.hosts("m1", slots=1).placed(functions.set_variable))
    assert set((await runner.run(tasks(3, "me"))).text.values()) == {"nobody"}


@pytest.mark.parametrize(
    ("function", "end"), [(functions.awaiting_cancelled, "unexpected"), (functions.asking_in_group, "which?")]
)
async def test_no_error_of_a_function_ends_the_other_attempts_of_its_host(
    world: HostFolder, tmp_path: Path, function: Callable[[str], Awaitable[str]], end: str
) -> None:
    gate = tmp_path / "gate"
    hosts = world.hosts("m1")
    backends = {"slow": hosts.placed(functions.until_file), "odd": hosts.placed(function)}
    dag = DAG(Task(name, str(gate), backend=name, retry=0) for name in ("slow", "odd"))
    ends: list[str] = []
    async with ParallelRunner(backends=backends).start(dag) as run:
        async for event in run.events():
            if isinstance(event, events.TaskFailed):
                ends.append(f"{event.task_id}: {event.error_kind}")
                gate.touch()
            if isinstance(event, events.TaskWaiting):
                ends.append(f"{event.task_id}: {event.question}")
                gate.touch()
        result = await run.result()
    assert ends == [f"odd: {end}"]
    assert (result["slow"].text, result["slow"].attempts) == ("done", 1)


async def test_an_attempt_on_a_host_has_the_price_of_its_backend(world: HostFolder) -> None:
    result = await ParallelRunner(functions.PricedBackend().on(world.hosts("m1"))).run(DAG([Task("a", "x")]))
    assert result["a"].usage.cost_usd == pytest.approx(2.0)


async def test_the_limits_of_a_server_that_a_host_calls_are_reported(
    world: HostFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Allowance] = []
    monkeypatch.setattr(Scheduler, "lower", lambda _self, _position, allowance: reported.append(allowance))
    await ParallelRunner(functions.LimitedBackend().on(world.hosts("m1"))).run(DAG([Task("a", "x")]))
    assert reported == [Allowance(requests_per_minute=60.0)]


async def test_the_time_limit_counts_from_the_beginning_on_the_host(world: HostFolder, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    hosts = world.hosts("m1", slots=1)
    runner = ParallelRunner(hosts.placed(functions.until_file), concurrency=2)
    dag = DAG([Task("first", str(gate), timeout=3.0, retry=0), Task("second", str(gate), timeout=3.0, retry=0)])
    order: list[str] = []
    async with runner.start(dag) as run:
        async for event in run.events():
            if isinstance(event, events.TaskFailed):
                order.append(event.error)
                gate.touch()
        result = await run.result()
    assert order == ["no answer within the task's timeout of 3 s"]
    assert result["second"].text == "done"
    assert result["second"].status is TaskStatus.COMPLETED


async def test_a_host_that_cannot_be_reached_is_named(world: HostFolder) -> None:
    world.set_away("m1")
    runner = ParallelRunner(world.hosts("m1").placed(functions.echo))
    result = await runner.run(DAG([Task("a", "x", retry=0)]))
    assert (result["a"].error_kind, result["a"].error) == (
        "transient",
        "no host can be used: m1: ssh: connect to host m1 port 22: No route to host",
    )


async def test_the_output_of_a_login_script_is_named() -> None:
    ssh = ["sh", "-c", "echo 'Welcome to m1.'; cat"]
    result = await ParallelRunner(SSHHosts(["m1"], ssh=ssh).placed(functions.echo)).run(DAG([Task("a", "x", retry=0)]))
    assert result["a"].error == (
        "no host can be used: m1: the output is not that of plait: 'Welcome to m1.'; login scripts of the host must "
        "print nothing"
    )


async def test_another_host_takes_over_for_one_that_cannot_be_reached(world: HostFolder) -> None:
    world.set_away("m1")
    result = await ParallelRunner(world.hosts("m1", "m2").placed(functions.where)).run(DAG([Task("a", "x")]))
    assert result["a"].text == "m2"


async def test_an_answer_is_taken_over_wherever_it_was_made(world: HostFolder) -> None:
    dag = DAG([Task("a", "x")])
    async with MemoryStore() as store:
        result = await ParallelRunner(world.hosts("m1").placed(functions.where), store=store).run(dag, "first")
        assert result["a"].text == "m1"
        for number, backend in enumerate((world.hosts("m2").placed(functions.where), functions.where)):
            result = await ParallelRunner(backend, store=store).run(dag, f"later-{number}", like="first")
            assert result["a"].text == "m1"
        other = world.hosts("m1").placed(functions.echo)
        result = await ParallelRunner(other, store=store).run(dag, "other", like="first")
        assert result["a"].text == "re: x"


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (unnamed(), "cannot be imported by a host"),
        (FunctionBackend(unnamed()), "cannot be imported by a host"),
        (object(), r"hosts\.placed\(\"module:function\"\)"),
    ],
)
def test_a_backend_that_no_host_could_make_is_refused(world: HostFolder, backend: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        world.hosts("m1").placed(backend)


async def test_a_module_that_a_host_lacks_is_named(world: HostFolder) -> None:
    result = await ParallelRunner(world.hosts("m1").placed("no_such_module:make")).run(DAG([Task("a", "x")]))
    assert result["a"].error_kind == "unavailable"
    assert (result["a"].error or "").startswith("m1: this host has no no_such_module:make")


@pytest.mark.parametrize("name", ["", ".m1", "a b", "-oProxyCommand=x"])
def test_a_host_needs_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="host"):
        SSHHosts([name])


def test_a_host_belongs_to_one_group(world: HostFolder) -> None:
    backends = {"a": world.hosts("m1").placed(functions.echo), "b": world.hosts("m2", "m1").placed(functions.echo)}
    with pytest.raises(ValueError, match="host 'm1' is in two groups of hosts"):
        ParallelRunner(backends=backends)


async def test_an_at_most_once_task_that_waits_for_a_slot_has_not_begun(world: HostFolder, tmp_path: Path) -> None:
    hosts = world.hosts("m1", slots=1)
    dag = DAG(Task(name, str(tmp_path / "never"), at_most_once=True) for name in ("a", "b"))
    async with ParallelRunner(hosts.placed(functions.until_file)).start(dag) as run:
        async for event in run.events():
            if isinstance(event, events.TaskPlaced):
                while not (tmp_path / "never.begun").exists():  # noqa: ASYNC110 - it is the host's doing
                    await anyio.sleep(0.01)
                run.stop()
        result = await run.result()
    assert {one.status for one in result.tasks.values()} == {TaskStatus.WAITING_INPUT, TaskStatus.PENDING}


async def test_commands_run_on_hosts_and_end_with_their_run(world: HostFolder, tmp_path: Path) -> None:
    """Result, failure, cancellation, and the folder of the host."""
    folder = tmp_path / "there"
    folder.mkdir()
    command = world.hosts("m1", "m2").placed(CommandBackend(cwd=folder))
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(backends={"command": command}, store=store)
        dag = DAG(
            [
                Task("here", run=["sh", "-c", "pwd; cat"], prompt="stdin"),
                Task("next", run=["wc", "-c"], prompt="{{ here.stdout }}", depends_on=["here"]),
                Task("data", run=["echo", '{"n": 1}'], output_schema={"type": "object"}),
                Task("bad", run=["sh", "-c", "echo wrong >&2; exit 3"]),
            ]
        )
        result = await runner.run(dag, "r")
        assert result["here"].data == {"code": 0, "stdout": f"{folder}\nstdin", "stderr": ""}
        assert result["next"].text.split() == [str(len(f"{folder}\nstdin"))]
        assert result["data"].data == {"code": 0, "stdout": '{"n": 1}\n', "stderr": "", "data": {"n": 1}}
        assert (result["bad"].error_kind, result["bad"].error) == (
            "command_failed",
            "sh ended with exit code 3: wrong",
        )
        places = {
            json.loads(one.detail).get("place") for one in await store.list_events("r") if one.kind == TaskPlaced.kind
        }
        assert places <= {"m1", "m2"}
        pids = folder / "pids"
        tree = Task("tree", run=["sh", "-c", "sleep 600 & echo $! > pids.new; mv pids.new pids; wait"])
        async with runner.start(DAG([tree])) as run:
            await until(pids.exists)
            run.cancel()
            assert (await run.result()).status is RunStatus.CANCELLED
    await until(lambda: start_time(int(pids.read_text())) is None)


_ALONE = "mkdir busy && touch began && until [ -e go ]; do sleep 0.05; done; rmdir busy"
"""A command that fails if another one is at work in its folder."""


@pytest.mark.parametrize("dies", [False, True])
async def test_two_runs_that_write_in_one_folder_of_a_host_wait_for_each_other(
    world: HostFolder, tmp_path: Path, dies: bool
) -> None:
    """`dies`: the host process is killed. The command that it began works on, and has the folder."""
    folder = tmp_path / "there"
    folder.mkdir()
    dag, said = DAG([Task("a", run=["sh", "-c", _ALONE], retry=0)]), list[str]()
    command = {"command": world.hosts("m1").placed(CommandBackend(cwd=folder))}
    runners = [ParallelRunner(backends=command, store=MemoryStore()) for _ in range(2)]
    async with runners[0].start(dag, "first") as first:
        await until((folder / "began").exists)
        async with runners[1].start(dag, "second") as second:
            async for event in second.events():
                if isinstance(event, events.TaskOutput) and "nothing else writes" in event.text:
                    said.append(event.text)
                    if dies and len(said) == 1:
                        world.kill("m1")
                    else:
                        (folder / "go").touch()
            assert (await second.result()).status is RunStatus.COMPLETED
        assert (await first.result()).status is RunStatus.COMPLETED
    assert said == [f"waits until nothing else writes in {folder}"] * (1 + dies)


@pytest.mark.parametrize("shared", [False, True])
async def test_tasks_of_one_run_are_alone_in_a_folder_of_a_host_unless_they_share_it(
    world: HostFolder, tmp_path: Path, shared: bool
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    meets = "touch $0; until [ -e a ] && [ -e b ]; do sleep 0.05; done"
    script, waits = meets if shared else _ALONE, list[str]()
    dag = DAG(Task(name, run=["sh", "-c", script, name], shared=shared, retry=0) for name in ("a", "b"))
    runner = ParallelRunner(backends={"command": world.hosts("m1").placed(CommandBackend(cwd=folder))})
    async with runner.start(dag) as run:
        async for event in run.events():
            if isinstance(event, events.TaskOutput | events.TaskFailed):
                waits.append(event.kind)
                (folder / "go").touch()
        assert (await run.result()).status is RunStatus.COMPLETED
    assert waits == ([] if shared else ["task_output"])
