"""`run(like=...)`: unchanged tasks take the answers of an earlier run, and only what changed is called."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from plait import DAG, OpenQuestion, ParallelRunner, RunStatus, Task, events
from plait.backends import PersonBackend, ask
from plait.errors import RunNotFound
from plait.persistence import MemoryStore, SQLiteStore, Store
from plait.persistence.store_records import TaskRecord
from tests.support.fakes import Calls
from tests.support.processes import warm
from tests.support.sizes import size

LIST = {"type": "array"}


async def again(store: Store | None, calls: Calls, before: DAG, after: DAG) -> dict[str, str]:
    """Run `before`, then `after` like the first run. Return the texts of the second run; `calls` has its calls."""
    runner = ParallelRunner(calls, store=store)
    await runner.run(before, "first")
    calls.take()
    result = await runner.run(after, "second", like="first")
    assert result.status is RunStatus.COMPLETED
    return dict(result.text)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    return MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "plait.db")


async def opened(store: object, calls: Calls, before: DAG, after: DAG) -> dict[str, str]:
    if isinstance(store, SQLiteStore):
        async with store:
            return await again(store, calls, before, after)
    assert isinstance(store, MemoryStore)
    return await again(store, calls, before, after)


def chain(first: str) -> DAG:
    return DAG([Task("a", first), Task("b", "b {{ a }}", ["a"]), Task("c", "c {{ b }}", ["b"]), Task("d", "d")])


async def test_an_unchanged_plan_calls_nothing(store: object) -> None:
    calls = Calls()
    texts = await opened(store, calls, chain("a"), chain("a"))
    assert calls.take() == []
    assert texts == {"a": "<a>", "b": "<b <a>>", "c": "<c <b <a>>>", "d": "<d>"}


async def test_a_changed_prompt_runs_with_everything_behind_it(store: object) -> None:
    calls = Calls()
    await opened(store, calls, chain("a"), chain("A"))
    assert calls.take() == ["A", "b <A>", "c <b <A>>"]


async def test_the_same_answer_again_cuts_off_everything_behind_it(store: object) -> None:
    calls = Calls(a="same", A="same")
    await opened(store, calls, chain("a"), chain("A"))
    assert calls.take() == ["A"]


async def test_parts_are_found_by_their_element_and_not_by_their_number(store: object) -> None:
    def dag(prompt: str) -> DAG:
        parts = Task("t", "do {{ item }}", ["l"], for_each="l")
        return DAG([Task("l", prompt, output_schema=LIST), parts, Task("end", "end {{ t }}", ["t"])])

    calls = Calls(one=["x", "y"], two=["new", "x", "y"])
    texts = await opened(store, calls, dag("one"), dag("two"))
    assert calls.take() == ["do new", 'end ["<do new>", "<do x>", "<do y>"]', "two"]
    assert texts["t.2"] == "<do x>"


async def test_a_conversation_is_part_of_the_key(store: object) -> None:
    def dag(first: str) -> DAG:
        return DAG([Task("a", first), Task("b", "go on", continues="a")])

    calls = Calls()
    await opened(store, calls, dag("a"), dag("A"))
    assert calls.take() == ["A", "go on"]


async def test_a_task_with_effects_and_a_planner_run_again(store: object) -> None:
    def dag() -> DAG:
        return DAG([Task("a", "a", at_most_once=True), Task("p", "p", adds_tasks=True), Task("b", "b")])

    calls = Calls(p=[{"id": "n", "prompt": "n"}])
    await opened(store, calls, dag(), dag())
    assert calls.take() == ["a", "p"]


async def test_an_answer_is_taken_over_without_a_slot() -> None:
    async def work(prompt: str) -> str:
        if prompt == "A":  # holds the only slot
            await others_are_done.wait()
        return prompt

    def dag(first: str) -> DAG:
        return DAG([Task("a", first), Task("b", "b"), Task("c", "c {{ b }}", ["b"])])

    others_are_done, done = anyio.Event(), list[str]()
    runner = ParallelRunner(work, store=MemoryStore(), concurrency=1)
    await runner.run(dag("a"), "first")
    with anyio.fail_after(30):
        async with runner.start(dag("A"), "second", like="first") as run:
            async for event in run.events():
                if isinstance(event, events.TaskCompleted):
                    done.append(event.task_id)
                    if len(done) == 2:
                        others_are_done.set()
    assert done == ["b", "c", "a"]


async def test_a_failed_task_runs_again() -> None:
    async def work(prompt: str) -> str:
        made.append(prompt)
        if prompt == "a" and len(made) <= 2:
            raise ValueError("no")
        return "x"

    made: list[str] = []
    runner = ParallelRunner(work, store=MemoryStore())
    dag = DAG([Task("a", "a", failure_mode="soft"), Task("b", "b")])
    await runner.run(dag, "first")
    made[:] = ["", ""]
    await runner.run(dag, "second", like="first")
    assert made[2:] == ["a"]


async def test_another_function_runs_again_and_an_answer_costs_nothing_and_names_its_run() -> None:
    async def one(prompt: str) -> str:
        return "one"

    async def two(prompt: str) -> str:
        return "two"

    kept, dag = MemoryStore(), DAG([Task("a", "a")])
    await ParallelRunner(one, store=kept).run(dag, "first")
    other = await ParallelRunner(two, store=kept).run(dag, "other", like="first")
    same = await ParallelRunner(one, store=kept).run(dag, "same", like="first")
    assert (other.text["a"], same.text["a"]) == ("two", "one")
    (attempt,) = await kept.list_attempts("same", "a")
    assert (attempt.backend, attempt.usage.input_tokens) == ("reused from first", 0)
    assert [one.content for one in await kept.list_messages("same", "a")] == ["a", "one"]


@pytest.mark.parametrize(
    ("edited", "expected"), [("\n\ndef f(prompt): return 'one'", "one"), ("def f(prompt): return 'two'", "two")]
)
async def test_a_function_whose_code_changed_runs_again(edited: str, expected: str) -> None:
    calls: list[str] = []

    def loaded(source: str) -> object:
        module: dict[str, object] = {"__name__": "tools", "calls": calls}
        exec(source.replace("return", "calls.append(prompt); return"), module)
        return module["f"]

    kept, dag = MemoryStore(), DAG([Task("a", "a")])
    await ParallelRunner(loaded("def f(prompt): return 'one'"), store=kept).run(dag, "first")  # type: ignore[arg-type]
    result = await ParallelRunner(loaded(edited), store=kept).run(dag, "second", like="first")  # type: ignore[arg-type]
    assert result.text["a"] == expected
    assert len(calls) == (1 if expected == "one" else 2)


async def test_a_run_like_an_unknown_run_is_refused_before_anything_is_stored() -> None:
    kept = MemoryStore()
    with pytest.raises(RunNotFound, match="'gone'"):
        await ParallelRunner(Calls(), store=kept).run(DAG([Task("a", "a")]), "new", like="gone")
    assert await kept.list_runs() == ()


_CUT = """
import asyncio, os, signal, sys
from plait import DAG, ParallelRunner, SQLiteStore, Task
from tests.support.fakes import QuickClock
from pathlib import Path

async def say(prompt):
    with open("log", "a") as file:
        file.write(prompt + "\\n")
    return f"<{prompt}>"

def dag(d):
    after = Task("e", "e {{ d }} {{ b }}", ["d", "b"])
    return DAG([Task("a", "a"), Task("b", "b {{ a }}", ["a"]), Task("d", d), after])

async def main():
    async with SQLiteStore("plait.db") as store:
        runner = ParallelRunner(say, store=store, clock=QuickClock())
        if sys.argv[1] == "first":
            await runner.run(dag("d"), "first")
        elif sys.argv[1] == "second":
            await runner.run(dag("D"), "second", like="first")
        else:
            print((await runner.resume("second")).status.value)

if len(sys.argv) > 2:
    from plait import failpoints
    left = int(sys.argv[3])

    def die(name):
        global left
        left -= name == sys.argv[2]
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.on_reach = die
asyncio.run(main())
"""


def _go(folder: Path, *words: str) -> int:
    program = "import runpy; runpy.run_path('cut.py', run_name='__main__')"
    return warm.run([sys.executable, "-c", program, *words], cwd=folder, timeout=60).returncode


@pytest.mark.parametrize("place", ["txn.before_commit", "txn.after_commit", "events.published", "attempt.after_call"])
def test_a_run_killed_at_a_boundary_goes_on_without_calling_a_reused_task(tmp_path: Path, place: str) -> None:
    (tmp_path / "cut.py").write_text(_CUT)
    assert _go(tmp_path, "first") == 0
    cuts = 0
    for number in range(1, 6):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path, folder, ignore=lambda _, names: [name for name in names if name.isdigit()])
        (folder / "log").write_text("")
        if _go(folder, "second", place, str(number)) == 0:
            break  # the run has fewer boundaries
        cuts += 1
        if _go(folder, "resume") != 0:
            assert _go(folder, "second") == 0  # nothing was stored
        made = (folder / "log").read_text().splitlines()
        assert set(made) == {"D", "e <D> <b <a>>"}
        assert len(made) <= 3  # at most one call more for one kill
    assert cuts >= 2


def asking(first: str = "a") -> DAG:
    """A plan with a task that a person does, a function that asks a person, and tasks behind both."""
    return DAG(
        [
            Task("a", first),
            Task("sign", "Sign {{ a }}?", ["a"], "person"),
            Task("ask", "ask {{ a }}", ["a"], "ask"),
            Task("talk", "go on", continues="ask"),
            Task("end", "{{ sign }} {{ talk }}", ["sign", "talk"]),
        ]
    )


class Person:
    """Answers each question with the number of questions so far, and records the questions."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, question: OpenQuestion) -> str:
        self.asked.append(question.text)
        return str(len(self.asked))


def runner_with(person: Person, calls: Calls, store: Store) -> ParallelRunner:
    async def ask_first(prompt: str) -> str:
        return f"{prompt}: {await ask('Which?')}"

    return ParallelRunner(
        backends={"model": calls, "ask": ask_first, "person": PersonBackend()},
        default="model",
        store=store,
        on_question=person,
        concurrency=1,
    )


async def test_answers_of_persons_are_asked_again_unless_they_are_kept() -> None:
    person, calls, kept = Person(), Calls(), MemoryStore()
    runner = runner_with(person, calls, kept)
    first = await runner.run(asking(), "first")
    assert sorted(person.asked) == ["Sign <a>?", "Which?", "Which?"]
    person.asked.clear()
    await runner.run(asking(), "again", like="first")
    assert sorted(person.asked) == ["Sign <a>?", "Which?", "Which?"]
    person.asked.clear()
    calls.take()
    second = await runner.run(asking(), "kept", like="first", keep_answers=True)
    assert (person.asked, calls.take()) == ([], [])
    assert second.text == first.text
    backends = {one.task_id: one.backend for one in await kept.list_attempts("kept")}
    assert backends == {
        "a": "reused from first",
        "sign": "kept from first",
        "ask": "kept from first",
        "talk": "kept from first",
        "end": "reused from first",
    }


async def test_a_kept_answer_is_no_answer_to_be_taken_over_silently_later() -> None:
    person = Person()
    runner = runner_with(person, Calls(), MemoryStore())
    await runner.run(asking(), "first")
    await runner.run(asking(), "kept", like="first", keep_answers=True)
    async with runner.runs.start_fork(await runner.runs.fork("kept", "end")) as run:
        fork = await run.result()
    person.asked.clear()
    await runner.run(asking(), "further", like=fork.run_id, keep_answers=True)
    assert person.asked == []
    await runner.run(asking(), "end", like="further")
    assert sorted(person.asked) == ["Sign <a>?", "Which?", "Which?"]


async def test_a_changed_question_is_asked_also_if_answers_are_kept() -> None:
    person = Person()
    runner = runner_with(person, Calls(), MemoryStore())
    await runner.run(asking(), "first")
    person.asked.clear()
    await runner.run(asking("A"), "second", like="first", keep_answers=True)
    assert sorted(person.asked) == ["Sign <A>?", "Which?", "Which?"]


async def test_a_kept_answer_is_kept_after_a_resume() -> None:
    person, calls = Person(), Calls()
    runner = runner_with(person, calls, MemoryStore())
    await runner.run(asking(), "first")
    person.asked.clear()
    calls.answers["n"] = ValueError("no")
    later = [replace(task, depends_on=("n",)) if task.id == "a" else task for task in asking()]
    dag = DAG([Task("n", "n", retry=1), *later])
    assert (await runner.run(dag, "second", like="first", keep_answers=True)).status is RunStatus.FAILED
    del calls.answers["n"]
    assert (await runner.resume("second", retry_failed=True)).status is RunStatus.COMPLETED
    assert person.asked == []


class CountedReads(MemoryStore):
    """A store that counts how often the tasks of a run are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = Counter[str]()

    async def list_tasks(self, run_id: str, only: str | range | None = None) -> tuple[TaskRecord, ...]:
        self.reads[run_id] += 1
        return await super().list_tasks(run_id, only)


@pytest.mark.parametrize("keep", [False, True])
async def test_a_run_takes_the_answers_that_its_preview_read(keep: bool) -> None:
    calls, store, dag = Calls(), CountedReads(), chain("a")
    runner = ParallelRunner(calls, store=store)
    await runner.run(chain("a"), "first")
    calls.take()
    store.reads.clear()
    preview = await runner.runs.preview_like(dag, "first", keep_answers=True)
    async with runner.start(dag, "second", like=preview, keep_answers=keep) as run:
        assert (await run.result()).status is RunStatus.COMPLETED
    assert calls.take() == []
    assert store.reads["first"] == 1


async def test_a_run_asks_again_although_its_preview_keeps_the_answers_of_persons() -> None:
    person, dag = Person(), asking()
    runner = runner_with(person, Calls(), MemoryStore())
    await runner.run(dag, "first")
    person.asked.clear()
    preview = await runner.runs.preview_like(dag, "first", keep_answers=True)
    async with runner.start(dag, "second", like=preview) as run:
        assert (await run.result()).status is RunStatus.COMPLETED
    assert sorted(person.asked) == ["Sign <a>?", "Which?", "Which?"]


async def test_keep_answers_goes_with_like() -> None:
    with pytest.raises(ValueError, match="keep_answers"):
        await ParallelRunner(Calls()).run(DAG([Task("a", "a")]), keep_answers=True)


@pytest.mark.slow
async def test_a_long_conversation_is_taken_over() -> None:
    talk = [Task(f"t{n}", f"{n}", continues=f"t{n - 1}") for n in range(1, size(1100, 2000))]
    dag = DAG([Task("t0", "0"), *talk])
    calls = Calls()
    await again(MemoryStore(), calls, dag, dag)
    assert calls.take() == []


async def test_a_deleted_parent_is_missed_by_no_run_that_took_its_answers_over(tmp_path: Path) -> None:
    calls = Calls()
    async with SQLiteStore(tmp_path / "plait.db") as store:
        runner = ParallelRunner(calls, store=store)
        await runner.run(chain("a"), "first")
        await runner.run(chain("a"), "second", like="first")
        calls.take()
        await store.purge(["first"])
        preview = await runner.runs.preview_like(chain("a"), "second")
        assert {step.action for step in preview.tasks} == {"reuse"}
        third = await runner.run(chain("a"), "third", like="second")
        assert (third.text["c"], calls.take()) == ("<c <b <a>>>", [])
        with pytest.raises(RunNotFound, match="'first'"):
            await runner.run(chain("a"), like="first")


async def test_a_run_whose_parent_is_deleted_before_the_resume_calls_the_remaining_tasks(tmp_path: Path) -> None:
    calls = Calls(n=ValueError("no"))
    async with SQLiteStore(tmp_path / "plait.db") as store:
        runner = ParallelRunner(calls, store=store)
        await runner.run(chain("a"), "first")
        gated = [replace(task, depends_on=("a", "n")) if task.id == "b" else task for task in chain("a")]
        failed = await runner.run(DAG([Task("n", "n"), *gated]), "second", like="first")
        assert failed.status is RunStatus.FAILED
        await store.purge(["first"])
        del calls.answers["n"]
        calls.take()
        assert (await runner.resume("second", retry_failed=True)).status is RunStatus.COMPLETED
        assert calls.take() == ["b <a>", "c <b <a>>", "n"]


async def test_what_changed_is_called_before_the_rest_is_stored_and_what_reads_the_rest_after_it() -> None:
    store, stored_at = MemoryStore(), dict[str, list[str]]()

    async def backend(prompt: str) -> str:
        stored_at[prompt] = [task.task_id for task in await store.list_tasks("second") if task.status == "completed"]
        return "<answer>"

    many = [Task(f"t{number}", f"{number}") for number in range(250)]
    last = [Task("changed", "old"), Task("reads", "old {{ t0 }}", ["t0"])]
    new = [replace(task, prompt=task.prompt.replace("old", "new")) for task in last]
    runner = ParallelRunner(backend, store=store, concurrency=1)
    await runner.run(DAG([*many, *last]), "first")
    stored_at.clear()
    result = await runner.run(DAG([*many, *new]), "second", like="first")
    assert result.status is RunStatus.COMPLETED
    assert len(stored_at["new"]) < len(many)
    assert "t0" in stored_at["new <answer>"]
    assert list(stored_at) == ["new", "new <answer>"]
