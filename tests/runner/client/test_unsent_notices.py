"""What other processes send of the notices that a run has left, and what they do not trust."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from plait import RunStatus, SQLiteStore
from plait.errors import InvalidRequest
from plait.persistence import Store
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.client.unsent_notices import UnsentNotices
from plait.runner.engine.notices import FIRST_WAIT_S
from plait.runner.plan_run import Plan
from tests.runner.engine.test_notices import Later
from tests.support.receiver import Receiver, receiving


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with receiving() as found:
        yield found


async def run_plan(folder: Path, notify: str, store: Store, run_id: str = "r") -> Path:
    """Run a plan in which nothing is left to do but to tell of it, and return its file."""
    path = folder / "plan.yaml"
    path.write_text(f"notify:\n{notify}\ntasks:\n- id: a\n  run: [echo, hello]\n")
    result = await Plan.load(path).run(store=store, run_id=run_id)
    assert result.status is RunStatus.COMPLETED
    return path


async def test_what_a_run_left_is_sent_once_it_is_due(
    store: Store, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    receiver.status = 503
    await run_plan(tmp_path, "- url_env: HOOK", store)
    await run_plan(tmp_path, "- url_env: HOOK\n  on: [failed]", store, "quiet")
    clock = Later()
    unsent = UnsentNotices(store, clock=clock)
    receiver.status = 200
    due = await unsent.send()
    assert due is not None
    assert receiver.notices == []
    clock.ahead = FIRST_WAIT_S + 1
    assert await unsent.send() is None
    assert receiver.told == [("r", "done")]
    clock.ahead += 100_000
    assert await unsent.send() is None
    assert await UnsentNotices(store, clock=clock).send() is None
    assert (len(receiver.notices), receiver.notices[0]["id"]) == (1, receiver.refused[0]["id"])


@pytest.mark.parametrize("changed", [False, True])
async def test_a_command_runs_only_as_the_plan_file_has_it_now(store: Store, tmp_path: Path, changed: bool) -> None:
    out = tmp_path / "out"
    tell = tmp_path / "tell"
    tell.write_text("#!/bin/sh\nexit 1\n")
    tell.chmod(0o700)
    path = await run_plan(tmp_path, f"- run: [{tell}]", store)
    tell.write_text(f"#!/bin/sh\ncat > {out}\n")
    if changed:
        path.write_text(path.read_text().replace(str(tell), f"{tell}, other"))
    clock = Later()
    clock.ahead = FIRST_WAIT_S + 1
    await UnsentNotices(store, FileOptions(plans=(tmp_path,)), clock).send()
    assert out.exists() is not changed


async def test_a_plan_file_that_others_may_change_is_not_trusted(
    store: Store, receiver: Receiver, tmp_path: Path
) -> None:
    receiver.status = 503
    path = await run_plan(tmp_path, f"- url: {receiver.url}", store)
    receiver.status = 200
    clock = Later()
    clock.ahead = FIRST_WAIT_S + 1
    path.chmod(0o666)
    assert await UnsentNotices(store, clock=clock).send() is None
    assert receiver.notices == []
    assert await UnsentNotices(store, FileOptions(plans=(tmp_path,)), clock).send() is None
    assert receiver.told == [("r", "done")]


async def test_a_variable_that_is_not_set_here_leaves_the_notice_to_others(
    store: Store, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await run_plan(tmp_path, "- url_env: HOOK", store)
    assert await UnsentNotices(store).send() is None
    assert "no value in HOOK" in caplog.text
    assert await store.list_notes("r") == ()
    monkeypatch.setenv("HOOK", receiver.url)
    assert await UnsentNotices(store).send() is None
    assert receiver.told == [("r", "done")]


async def test_a_resume_takes_the_targets_of_the_plan_file(receiver: Receiver, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        f"notify:\n- url: {receiver.url}\nbackends:\n  me: {{kind: person}}\ntasks:\n- id: a\n  prompt: Where to?\n"
    )

    async with SQLiteStore(tmp_path / "runs.db") as store:
        result = await Plan.load(path).run(store=store, run_id="r")
        assert result.status is RunStatus.WAITING_INPUT
        async with TrustedBackends(store).runs() as runs:
            await runs.answer("r", "a", "Rome", wait=0)
            async with runs.open(await runs.read("r")) as (run, _), run:
                pass
    assert receiver.told == [("r", "question"), ("r", "done")]


async def test_the_users_own_file_is_for_the_runs_of_plans_without_targets(
    store: Store, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as other:
        (tmp_path / "mine.yaml").write_text(f"notify:\n- url: {receiver.url}\n")
        monkeypatch.setenv("PLAIT_CONFIG", str(tmp_path / "mine.yaml"))
        plan = tmp_path / "without.yaml"
        plan.write_text("tasks:\n- id: a\n  run: [echo, hello]\n")
        receiver.status = 503
        await Plan.load(plan).run(store=store, run_id="r1")
        receiver.status = 200
        await run_plan(tmp_path, f"- url: {other.url}", store, "r2")
        assert (await Plan.load(plan).run()).status is RunStatus.COMPLETED, "without a store there is nothing to tell"
        clock = Later()
        clock.ahead = FIRST_WAIT_S + 1
        assert await UnsentNotices(store, clock=clock).send() is None
        assert (receiver.told, other.told) == ([("r1", "done")], [("r2", "done")])
        monkeypatch.setenv("PLAIT_CONFIG", str(tmp_path / "gone.yaml"))
        with pytest.raises(InvalidRequest, match=r"gone\.yaml cannot be read"):
            await Plan.load(plan).run(store=store)
