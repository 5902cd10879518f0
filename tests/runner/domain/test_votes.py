"""`repeat` and `vote` of a task: samples that are ordinary tasks, and one answer of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest

from plait import DAG, Best, ParallelRunner, RunStatus, Task
from plait.errors import DAGError, PlaitError, PlanError
from plait.persistence import MemoryStore
from plait.runner.plan.plan_file import parse_plan
from tests.support.tool_calls import saying
from tests.support.wire import serve


class Samples:
    """A backend that answers in turn, fails for `!`, and answers a judge with the number of the text `chosen`."""

    def __init__(self, *answers: object, chosen: str = "") -> None:
        self.answers = list(answers)
        self.chosen = chosen
        self.made: list[str] = []

    async def __call__(self, prompt: str) -> object:
        self.made.append(prompt)
        if "\n1. " in prompt:
            return {"best": next(n for n in range(1, 9) if f"{n}. {self.chosen}" in prompt), "reason": "so"}
        if not prompt.startswith("say"):
            return f"<{prompt}>"
        if (answer := self.answers.pop(0)) == "!":
            raise PlaitError("no")
        return answer


def vote(samples: int, how: object = None, **options: object) -> list[Task]:
    pick = Task("pick", "say", repeat=samples, vote=how, **options)  # type: ignore[arg-type]
    return [pick, Task("then", "then {{ pick }}", ["pick"])]


@pytest.mark.parametrize(
    ("answers", "how", "value", "said"),
    [
        ("abb", "majority", "b", "2 of 3 answers are that of pick.2"),
        (["a", " b", "b\n"], "majority", " b", "2 of 3 answers are that of pick.2"),
        (
            "abc",
            "majority",
            "a",
            "1 of 3 answers are that of pick.1; 2 other answers had as many, and the first counts",
        ),
        (
            "baab",
            "majority",
            "b",
            "2 of 4 answers are that of pick.1; 1 other answer had as many, and the first counts",
        ),
        ([{"n": 1, "m": 2}, {"n": 3}, {"m": 2, "n": 1}], "majority", {"n": 1, "m": 2}, "2 of 3 answers"),
        ("ab", None, ["a", "b"], "the answers of 2 samples"),
        ("abc", Best("Which is best?"), "c", "pick.3 is the best for pick.judge"),
    ],
)
async def test_votes(answers: list[object], how: object, value: object, said: str) -> None:
    backend, store = Samples(*answers, chosen="c"), MemoryStore()
    result = await ParallelRunner(backend, store=store, concurrency=1).run(DAG(vote(len(answers), how)), "r")
    assert (result.status, result["pick"].value) == (RunStatus.COMPLETED, value)
    assert backend.made.count("say") == len(answers)
    assert backend.made[-1].startswith("then ")
    (message,) = await store.list_messages("r", "pick")
    assert message.content.startswith(f"vote: {said}")
    stored = next(one.data for one in await store.list_tasks("r") if one.task_id == "pick")
    assert (None if stored is None else json.loads(stored)) == result["pick"].data
    (attempt,) = await store.list_attempts("r", "pick")
    assert (attempt.backend, attempt.status) == ("vote", "completed")


@pytest.mark.parametrize(
    ("mode", "answers", "status", "pick"),
    [
        ("hard", "a!a", "failed", "pending"),
        ("skip", "a!a", "completed", "completed"),
        ("soft", "a!a", "failed", "completed"),
        ("skip", "!!!", "completed", "skipped"),
        ("soft", "!!!", "failed", "failed"),
    ],
)
async def test_a_failed_sample_means_what_failure_mode_says(mode: str, answers: str, status: str, pick: str) -> None:
    tasks = vote(3, "majority", failure_mode=mode, retry=0)
    result = await ParallelRunner(Samples(*answers)).run(DAG(tasks))
    assert (result.status, result["pick"].status) == (status, pick)


async def test_a_resume_repeats_the_failed_sample_alone() -> None:
    store, backend = MemoryStore(), Samples("a", "!", "b", "b")
    runner = ParallelRunner(backend, store=store, concurrency=1)
    assert (await runner.run(DAG(vote(3, "majority", retry=0)), "r")).status is RunStatus.FAILED
    result = await runner.resume("r", retry_failed=True)
    assert (result.status, result.text["pick"]) == (RunStatus.COMPLETED, "b")
    assert backend.made.count("say") == 4


@pytest.mark.parametrize("reuse", [{"like": "r"}, {}])
async def test_samples_keep_their_own_answers_when_they_are_taken_over(reuse: dict[str, str]) -> None:
    from plait import OpenAIBackend

    texts = ["one", "two", "three"]
    async with serve(*map(saying, texts)) as server:
        runner = ParallelRunner(OpenAIBackend(base_url=f"{server.url}/v1", model="m"), store=MemoryStore())
        pick = DAG([Task("pick", "say", repeat=3, cache=not reuse)])
        await runner.run(pick, "r")
        again = await runner.run(pick, "again", **reuse)  # type: ignore[arg-type]
    assert len(server.bodies) == 3
    values = again["pick"].value
    assert isinstance(values, list)
    assert Counter(map(str, values)) == Counter(texts)


async def test_samples_of_a_function_receive_values() -> None:
    async def pick(words: list[str]) -> str:
        return words[0]

    async def words() -> list[str]:
        return ["a", "b"]

    backends = {"pick": pick, "words": words}
    tasks = [Task("words", backend="words"), Task("one", "", ["words"], backend="pick", repeat=2, vote="majority")]
    result = await ParallelRunner(backends=backends).run(DAG(tasks))
    assert (result["one.2"].text, result["one"].text) == ("a", "a")


async def test_a_preview_of_a_run_with_votes_says_what_runs() -> None:
    store, backend = MemoryStore(), Samples("a", "b", chosen="b")
    runner = ParallelRunner(backend, store=store, concurrency=1)
    await runner.run(DAG(vote(2, Best("best?"))), "r")
    preview = await runner.runs.preview_like(DAG(vote(2, Best("best?"))), "r")
    assert [step.task_id for step in preview.tasks] == ["pick.1", "pick.2", "pick.judge", "then"]


def test_a_plan_repeats_each_part_and_names_a_judge() -> None:
    plan = parse_plan(
        "inputs: {words: [x, y]}\nbackends: {a: {kind: claude-code}, b: {kind: claude-code}}\ndefaults: {backend: a}\n"
        "tasks:\n"
        "  - {id: pick, for_each: words, prompt: 'say {{ item }}', repeat: 2, vote: {best: which?, backend: b}}\n"
        "  - {id: end, depends_on: pick, prompt: '{{ pick }}'}\n"
    )
    ids = [f"pick.{part}{end}" for part in (1, 2) for end in (".1", ".2", ".judge", "")]
    assert [task.id for task in plan.dag] == [*ids, "end"]
    assert plan.dag["pick.2.judge"].backend == "b"
    assert plan.dag["end"].upstream == ("pick.1", "pick.2")


async def test_a_loop_repeats_its_samples_in_each_round() -> None:
    plan = parse_plan(
        "backends: {b: {kind: claude-code}}\n"
        "tasks: [{id: fix, loop: {until: '{{ pick }} == 1', max: 2, tasks: "
        "[{id: pick, backend: b, prompt: say, repeat: 2, vote: majority}]}}]"
    )
    backend = Samples("a", "b", "1", "1")
    result = await ParallelRunner(backends={"b": backend}, concurrency=1).run(plan.dag)
    assert result.text["fix.2.pick"] == "1"
    assert [name for name in result.tasks if name.endswith(".2")] == ["fix.1.pick.2", "fix.2.pick.2"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("vote: majority", "tasks[1].vote: a vote decides between samples; write `repeat` beside it"),
        ("repeat: 2, vote: most", "must be all, majority, or a mapping such as {best: PROMPT}, not 'most'"),
        ("repeat: 2, vote: {backend: b}", "must be all, majority, or a mapping with `best`"),
        ("repeat: 2, vote: {best: x, backend: c}", "tasks[1].vote.backend: unknown backend 'c'"),
        ("repeat: 2, vote: {best: '{{ nobody }}'}", "uses {{ nobody }}, which is neither a task nor an input"),
        ("repeat: 101", "repeat: must be at most 100, not 101"),
        ("repeat: 2, for_each: a", "a task with for_each over the list of a task cannot have repeat as well"),
        ("repeat: 2, output: tasks", "a task with adds_tasks cannot have repeat as well"),
    ],
)
def test_mistakes(keys: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(
            f"backends: {{b: {{kind: claude-code}}}}\ntasks: [{{id: a, prompt: p}}, {{id: t, prompt: p, {keys}}}]"
        )
    assert message in str(caught.value)


def test_what_has_no_samples_or_no_conversation() -> None:
    make: Callable[..., DAG] = lambda *tasks: DAG(tasks)  # noqa: E731
    with pytest.raises(DAGError, match="continue one of its samples"):
        make(Task("pick", "say", repeat=2), Task("then", "x", continues="pick"))
    make(Task("pick", "say", repeat=2), Task("then", "x", continues="pick.1"))
    with pytest.raises(ValueError, match="says what makes an answer good"):
        Best(" ")
