"""Turns with an agent that speaks ACP that are cut, cancelled, or come to a bad end, shown on a fake one."""

from __future__ import annotations

import random

import anyio
import pytest

from plait import DAG, MemoryStore, ParallelRunner, RunStatus, Task, TaskStatus
from plait.backends import AcpBackend, Output
from plait.errors import BackendUnavailable, ErrorKind
from tests.support.agents.homes import Home, fails, send, until
from tests.support.sizes import size


async def test_a_cut_turn_is_gone_on_with_and_its_prompt_not_sent_twice(home: Home) -> None:
    backend = home.acp()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: send(backend, "Work. [[tool]] [[until /dev/null/never]]", files=home.files(1)))
        await until(lambda: len(home.calls) == 1)
        group.cancel_scope.cancel()
    left = backend.inspect(home.files(1))
    assert left is not None
    assert left.session_id == home.calls[0]["session"]
    await send(
        backend, "Go on.", session_id=left.session_id, resume=True, resumes_interrupted=True, files=home.files(2)
    )
    said = [text for _, text in home.calls[-1]["said"]]
    assert said == ["Work. [[tool]] [[until /dev/null/never]]", "make test", "Go on."]


async def test_who_is_to_go_on_in_a_session_without_the_prompt_starts_over(home: Home) -> None:
    backend = home.acp()
    other = await send(backend, "Something else.", files=home.files(1, "other"))
    await fails(backend, "Work. [[die]]", files=home.files(1))
    error = await fails(
        backend, "Go on.", session_id=other.session_id, resume=True, resumes_interrupted=True, files=home.files(2)
    )
    assert error.kind is ErrorKind.SESSION_LOST
    assert len(home.calls) == 2


async def test_two_writers_of_one_session_go_one_after_the_other(home: Home) -> None:
    backend = home.acp()
    first = await send(backend, "First.", files=home.files(1))
    waits: list[Output] = []

    def note(output: Output) -> None:
        waits.append(output)
        (home.path / "go").touch()

    going_on = {"session_id": first.session_id, "resume": True}
    async with anyio.create_task_group() as group:
        prompt = f"Long. [[until {home.path / 'go'}]]"
        group.start_soon(lambda: send(backend, prompt, files=home.files(2, "a"), **going_on))
        await until(lambda: len(home.calls) == 2)
        await send(backend, "Short.", files=home.files(3, "b"), on_output=note, **going_on)
    assert waits[0].kind == "waiting"
    assert [text for role, text in home.calls[-1]["said"] if role == "user"] == ["First.", prompt, "Short."]


@pytest.mark.parametrize("deaf", [(), ("--deaf",)])
async def test_the_agent_of_a_cancelled_run_is_told_so_long_before_the_grace_time_ends(
    home: Home, deaf: tuple[str, ...]
) -> None:
    runner = ParallelRunner(home.acp(*deaf), store=MemoryStore(), cancel_grace=600)
    async with runner.start(DAG([Task("a", prompt="Work. [[child]] [[until /dev/null/never]]")])) as run:
        await until(lambda: len(home.calls) == 1)
        run.cancel()
        with anyio.fail_after(60):
            result = await run.result()
    assert (result.status, result["a"].status) == (RunStatus.CANCELLED, TaskStatus.CANCELLED)
    assert home.noted("heard")[-1]["method"] == "session/cancel"
    assert home.processes == []


@pytest.mark.parametrize("deaf", [(), ("--deaf",)])
async def test_a_cancelled_turn_is_told_so_and_leaves_nothing_behind(home: Home, deaf: tuple[str, ...]) -> None:
    backend = home.acp(*deaf, *(["--immortal"] if deaf else []))
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: send(backend, "Work. [[child]] [[until /dev/null/never]]", files=home.files()))
        await until(lambda: len(home.calls) == 1)
        group.cancel_scope.cancel()
    assert home.noted("heard")[-1]["method"] == "session/cancel"
    assert home.processes == []


async def test_a_turn_takes_no_longer_than_it_may(home: Home) -> None:
    error = await fails(home.acp(turn_timeout=3.0), "Work. [[until /dev/null/never]]", files=home.files())
    assert (error.kind, error.continues_session) == (ErrorKind.TIMEOUT, True)
    error = await fails(home.acp(idle_timeout=0.7), "Work. [[until /dev/null/never]]", files=home.files(2))
    assert error.kind is ErrorKind.TIMEOUT
    assert home.processes == []


async def test_an_agent_that_dies_has_crashed(home: Home) -> None:
    error = await fails(home.acp(), "[[die]]")
    assert (error.kind, error.continues_session) == (ErrorKind.CRASHED, True)
    assert "SIGKILL" in error.message


async def test_an_agent_that_cannot_be_started(home: Home) -> None:
    with pytest.raises(BackendUnavailable, match="nonsense"):
        await send(AcpBackend(command=["/nowhere/nonsense"]), "One.")
    broken = home.path / "broken"
    broken.write_text("#!/nowhere/interpreter\n")
    broken.chmod(0o755)
    error = await fails(AcpBackend(command=[str(broken)], cwd=home.path), "One.")
    assert error.kind is ErrorKind.CRASHED
    assert "cannot start" in error.message


@pytest.mark.parametrize("seed", range(size(1, 3)))
async def test_cancelled_at_any_moment_nothing_is_left(home: Home, seed: int) -> None:
    rng = random.Random(seed)
    words = rng.choice(["", "[[child]] [[tool]]", "[[ask rm x]]", "[[huge 100000]]"])
    options = {"permissions": rng.choice(["deny", "ask"])}
    for number in range(4):
        with anyio.move_on_after(rng.uniform(0, 0.5)):
            await send(home.acp(**options), f"Work. {words} [[until /dev/null/never]]", files=home.files(number + 1))
    assert home.processes == []
    assert not [
        line for line in home.noted("calls") if line["said"][0][1] != f"Work. {words} [[until /dev/null/never]]"
    ]
