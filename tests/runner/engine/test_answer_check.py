"""`check` of a task: an answer that does not pass goes back into its conversation, with evidence of each turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from plait import DAG, Check, CommandBackend, FunctionBackend, OpenAIBackend, ParallelRunner, Retry, RunStatus, Task
from plait.backends import ask
from plait.backends.backend_protocol import Backend
from plait.errors import BackendError, BackendMissing, DAGError, ErrorKind
from plait.persistence import SQLiteStore
from plait.persistence.store_records import MessageRecord
from tests.support.agents.homes import Home, make_home
from tests.support.polling import until
from tests.support.tool_calls import saying
from tests.support.wire import Script, serve, silence

SCRIPT = 'echo . >> checked; echo "round $(wc -l < checked)"; [ $(wc -l < checked) -ge %d ]'


def passes(at: int, *named: str, tries: int = 3) -> Check:
    """A check that passes when it runs for the time `at`."""
    return Check(["sh", "-c", SCRIPT % at, "--", *named], tries)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "plait.db") as opened:
        yield opened


@pytest.fixture
async def server() -> AsyncGenerator[Script]:
    async with serve(saying("one"), saying("two"), saying("three")) as script:
        yield script


def model(server: Script) -> OpenAIBackend:
    return OpenAIBackend(base_url=f"{server.url}/v1", model="m")


async def run(backend: Backend, store: SQLiteStore, folder: Path, check: Check, **options: Any) -> Any:
    runner = ParallelRunner(backend, backends={"command": CommandBackend(cwd=folder)}, store=store)
    return await runner.run(DAG([Task("work", "do it", check=check, **options)]))


async def evidence(store: SQLiteStore, run_id: str) -> list[tuple[int, str]]:
    """The attempt and the end of the check, of each attempt's own evidence."""
    stored: list[MessageRecord] = list(await store.list_messages(run_id, "work"))
    last = {one.attempt: one for one in stored if one.role == "system"}
    return [(number, one.content.splitlines()[1]) for number, one in last.items()]


async def test_a_check_that_fails_twice_is_one_conversation_of_three_turns(
    server: Script, store: SQLiteStore, tmp_path: Path
) -> None:
    result = await run(model(server), store, tmp_path, passes(3))
    assert (result.status, result.text["work"], result["work"].attempts) == (RunStatus.COMPLETED, "three", 3)
    said = [[(one["role"], one["content"].splitlines()[0]) for one in body["messages"]] for body in server.bodies]
    failed = f"The check of the answer failed: sh -c '{SCRIPT % 3}' --: sh ended with exit code 1"
    assert said[0] == [("user", "do it")]
    assert said[1] == [*said[0], ("assistant", "one"), ("user", failed)]
    assert said[2] == [*said[1], ("assistant", "two"), ("user", failed)]
    assert [body["messages"][-1]["content"].splitlines()[1] for body in server.bodies[1:]] == ["round 1", "round 2"]
    ends = ["sh ended with exit code 1", "sh ended with exit code 1", "exit code 0"]
    assert await evidence(store, result.run_id) == [*enumerate(ends, 1)]
    assert result.usage.output_tokens == 21, "all three turns are paid for"


async def test_an_agent_goes_on_in_its_session(
    store: SQLiteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home: Home = make_home(tmp_path / "home", monkeypatch)
    result = await run(home.claude(), store, tmp_path, passes(3))
    assert (result.status, len(home.prompts)) == (RunStatus.COMPLETED, 3)
    assert len({call["session"] for call in home.calls}) == 1
    assert [role for role, _ in home.calls[-1]["said"]] == ["user", "assistant"] * 2 + ["user"]
    assert [number for number, _ in await evidence(store, result.run_id)] == [1, 2, 3]


async def test_after_the_last_try_the_task_fails(server: Script, store: SQLiteStore, tmp_path: Path) -> None:
    result = await run(model(server), store, tmp_path, passes(9, tries=2))
    assert (result.status, result["work"].error_kind, len(server.bodies)) == (RunStatus.FAILED, "check_failed", 2)
    assert "round 2" in result["work"].error
    assert [number for number, _ in await evidence(store, result.run_id)] == [1, 2]


async def test_an_agent_that_edits_what_checks_it_is_told(server: Script, store: SQLiteStore, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("assert False")

    async def editor(prompt: str) -> str:
        (tmp_path / "tests" / "test_it.py").write_text("assert True")
        return prompt

    result = await run(FunctionBackend(editor), store, tmp_path, passes(2, "tests"))
    assert "files that the check names were changed in this turn: tests" in result.text["work"]
    stored = [one.content for one in await store.list_messages(result.run_id, "work") if one.attempt == 1]
    assert "\ntests sha256:" in stored[-1] and ", changed in this turn: was sha256:" in stored[-1]


async def test_a_resume_goes_on_at_the_right_turn(store: SQLiteStore, tmp_path: Path) -> None:
    """The process ends while the second answer is awaited."""
    backends = {"command": CommandBackend(cwd=tmp_path)}
    async with serve(saying("one"), silence, saying("two"), saying("three")) as server:
        runner = ParallelRunner(model(server), backends=backends, store=store)
        async with runner.start(DAG([Task("work", "do it", check=passes(3))])) as first:
            await until(lambda: len(server.bodies) == 2)
            first.stop()
        result = await runner.resume(first.run_id)
    assert (result.status, result.text["work"]) == (RunStatus.COMPLETED, "three")
    said = [[one["content"].splitlines()[0] for one in body["messages"]] for body in server.bodies]
    assert said[2] == said[1], "the correction is sent again, behind the same messages"
    assert [len(texts) for texts in said] == [1, 3, 3, 5]
    assert (tmp_path / "checked").read_text() == ".\n" * 3, "no answer is checked twice"
    assert [number for number, _ in await evidence(store, result.run_id)] == [1, 3, 4]


async def test_values_reach_a_check_and_a_missing_program_is_no_failed_check(
    server: Script, store: SQLiteStore, tmp_path: Path
) -> None:
    check = Check(["sh", "-c", 'echo "$1" > named', "--", "{{ item }}"])
    assert (await run(model(server), store, tmp_path, check, item="a b")).status is RunStatus.COMPLETED
    assert (tmp_path / "named").read_text() == "a b\n"
    result = await run(model(server), store, tmp_path, Check(["no-such-program"]))
    assert result["work"].error_kind == "unavailable"


async def test_what_is_refused_is_said(server: Script, tmp_path: Path) -> None:
    with pytest.raises(BackendMissing, match="needed by the check of task 'work'"):
        await ParallelRunner(model(server)).run(DAG([Task("work", "x", check=Check(["true"]))]))
    with pytest.raises(DAGError, match="a command passes by its exit code"):
        DAG([Task("work", run=["true"], check=Check(["true"]))])
    with pytest.raises(DAGError, match="a value could be read as an option"):
        DAG([Task("a", "x"), Task("work", "x", depends_on=["a"], check=Check(["cat", "{{ a }}"]))])
    with pytest.raises(ValueError, match="at least 1 try"):
        Check(["true"], tries=0)


class Turns:
    """A function that answers one text after the other, and records the prompts."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []

    async def __call__(self, prompt: str) -> Any:
        self.prompts.append(prompt)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


REFUSED, PASSED = {"ok": False, "reason": "too long"}, {"ok": True, "reason": "short"}


@pytest.mark.parametrize(
    ("check", "first", "second", "reason"),
    [
        (
            Check(output_schema={"type": "object", "required": ["n"]}),
            "{}",
            '{"n": 1}',
            "output_schema: the answer does",
        ),
        (Check(passes="{{ answer | length }} < 4"), "long", "few", "{{ answer | length }} < 4: is false"),
        (Check(passes="{{ answer.n }} == 1"), "no object", {"n": 1}, "{{ answer.n }} == 1: cannot be evaluated"),
        (Check(passes="{{ answer }} in {{ item }}"), "a", "b", "is false"),
        (Check(["grep", "-q", "b"]), "a", "b", "grep -q b: grep ended with exit code 1"),
    ],
)
async def test_each_way_to_check_goes_back_into_the_conversation(
    store: SQLiteStore, tmp_path: Path, check: Check, first: object, second: object, reason: str
) -> None:
    turns = Turns(first, second)
    result = await run(FunctionBackend(turns), store, tmp_path, check, item=["b"])
    assert (result.status, result["work"].value) == (RunStatus.COMPLETED, {"n": 1} if "n" in str(second) else second)
    assert turns.prompts[1].startswith("The check of the answer failed: ")
    assert reason in turns.prompts[1]
    assert [number for number, _ in await evidence(store, result.run_id)] == [1, 2]


async def test_a_judge_says_why_and_costs_what_it_costs(server: Script, store: SQLiteStore) -> None:
    judge = Turns(REFUSED, ConnectionError("gone"), PASSED)
    runner = ParallelRunner(model(server), backends={"strict": FunctionBackend(judge)}, store=store)
    check = Check(judge="Is {{ answer }} a {{ item }}?", backend="strict")
    retry = Retry(3, base_delay=0.0)
    result = await runner.run(DAG([Task("work", "do it", item="haiku", check=check, retry=retry)]))
    assert (result.status, result.text["work"]) == (RunStatus.COMPLETED, "two")
    assert judge.prompts == ["Is one a haiku?", "Is two a haiku?", "Is two a haiku?"], "no answer is paid twice"
    said = server.bodies[1]["messages"][-1]["content"]
    assert said.startswith("The check of the answer failed: judge strict: refused\ntoo long\n")
    assert await evidence(store, result.run_id) == [(1, "refused"), (2, "passed")]


async def test_a_judge_of_the_same_backend_is_paid_with_the_attempt(store: SQLiteStore) -> None:
    async with serve(saying("one"), saying('{"ok": true, "reason": "fine"}')) as server:
        runner = ParallelRunner(model(server), store=store)
        result = await runner.run(DAG([Task("work", "do it", check=Check(judge="Fine? {{ answer }}"))]))
    assert (result.text["work"], result["work"].usage.output_tokens) == ("one", 14)


async def test_a_judge_without_a_verdict_fails_the_task_and_leaves_the_answer_in_the_attempt(
    store: SQLiteStore,
) -> None:
    judge = Turns(BackendError(ErrorKind.AUTH, "no key"))
    runner = ParallelRunner(Turns("one"), backends={"strict": FunctionBackend(judge)}, store=store)
    check = Check(judge="Fine? {{ answer }}", backend="strict")
    result = await runner.run(DAG([Task("work", "do it", check=check)]))
    assert result["work"].error == "the judge 'strict' gave no verdict (auth): no key"
    assert [one.content for one in await store.list_messages(result.run_id, "work")] == ["do it", "one"]


async def test_a_judge_that_asks_a_person_fails_the_task() -> None:
    async def judge(_prompt: str) -> str:
        return str(await ask("Is it fine?"))

    runner = ParallelRunner(Turns("one"), backends={"strict": judge})
    check = Check(judge="Fine? {{ answer }}", backend="strict")
    result = await runner.run(DAG([Task("work", "do it", check=check)]))
    assert result["work"].error == "the judge 'strict' gave no verdict (unexpected): a judge cannot ask a person"


async def test_an_answer_is_taken_over_only_under_the_same_check(store: SQLiteStore) -> None:
    async with serve(saying("one"), saying("two")) as server:
        runner = ParallelRunner(model(server), store=store)
        texts: list[str] = []
        for run_id, condition in (("r", "true"), ("same", "true"), ("other", "not false")):
            dag = DAG([Task("work", "do it", check=Check(passes=condition))])
            texts.append((await runner.run(dag, run_id, like=None if run_id == "r" else "r")).text["work"])
    assert texts == ["one", "one", "two"]


@pytest.mark.parametrize("checks", [1, 2])
async def test_checks_have_slots_of_their_own(store: SQLiteStore, tmp_path: Path, checks: int) -> None:
    """Each check says how many run beside it, from files that stand while they run."""
    script = 'touch "on.$1"; sleep 0.2; ls on.* | wc -l >> seen; rm "on.$1"'
    backends = {"command": CommandBackend(cwd=tmp_path, checks=checks)}
    runner = ParallelRunner(Turns(*"abcd"), backends=backends, store=store)
    check = Check(["sh", "-c", script, "--", "{{ item }}"])
    tasks = [Task(name, name, check=check, item=name) for name in "abcd"]
    assert (await runner.run(DAG(tasks))).status is RunStatus.COMPLETED
    assert max(map(int, (tmp_path / "seen").read_text().split())) <= checks


def test_mistakes_of_checks() -> None:
    for check, message in (
        (Check(passes="{{ answer.n }} =="), "unexpected"),
        (Check(judge="{{ other }}"), "the check uses {{ other }}, which is neither a task nor an input"),
        (Check(output_schema={"type": "nothing"}), "nothing"),
        (Check(["cat", "--", "{{ answer }}"]), "neither a task nor an input"),
    ):
        with pytest.raises(DAGError) as caught:
            DAG([Task("work", "x", check=check)])
        assert message in str(caught.value)
    with pytest.raises(ValueError, match="name one"):
        Check()
    with pytest.raises(ValueError, match="that of its judge"):
        Check(["true"], backend="x")
    with pytest.raises(DAGError, match="has an output_schema already"):
        DAG([Task("work", "x", output_schema={"type": "object"}, check=Check(output_schema={"type": "object"}))])
