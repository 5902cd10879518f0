"""Follow-ups by role: what comes after a task of a role, when, and how often."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from plait import DAG, FailureMode, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait.errors import DAGError, PromptError
from plait.persistence import MemoryStore
from plait.runner.policies import policy_of
from plait.workflows import FollowUp, FollowUps
from tests.support.growing import Grown, grow


def coder(name: str, **options: object) -> Task:
    return replace(Task(name, "Write it.", metadata={"role": "coder"}), **options)  # type: ignore[arg-type]


def answers(*failing: str) -> Callable[[Task, str], str | Exception]:
    return lambda task, _: RuntimeError("no luck") if task.id in failing else f"<{task.id}>"


REVIEWER = FollowUp("reviewer", "R {{ work }}", failure_mode=FailureMode.SOFT)
CHAIN = FollowUps({"coder": [REVIEWER, FollowUp("tester", "T {{ work }}{{ reviewer }}")]})


def test_a_reviewer_and_a_tester_follow_a_coder_and_nobody_else() -> None:
    run = grow(CHAIN, DAG([coder("build"), Task("other", "Say hello.")]), answers())
    assert sorted(run.ran) == ["build", "build.reviewer", "build.tester", "other"]
    assert [prompt for prompt in run.prompts if prompt[0] in "RT"] == ["R <build>", "T <build><build.reviewer>"]
    assert run.status is RunStatus.COMPLETED
    tester = run.dag["build.tester"]
    assert list(tester.depends_on) == ["build", "build.reviewer"]
    assert tester.metadata == {"role": "tester", "follows": "build"}


def test_the_failure_mode_of_each_decides_what_its_failure_does() -> None:
    run = grow(CHAIN, DAG([coder("build")]), answers("build.reviewer"))
    assert run.prompts[-1] == "T <build>"
    assert run.status is RunStatus.FAILED
    hard = FollowUps({"coder": [FollowUp("reviewer"), FollowUp("tester")]})
    run = grow(hard, DAG([coder("build")]), answers("build.reviewer"))
    assert run.result("build.tester").status is TaskStatus.PENDING
    skip = FollowUps({"coder": [FollowUp("reviewer", failure_mode=FailureMode.SKIP), FollowUp("tester")]})
    assert grow(skip, DAG([coder("build")]), answers("build.reviewer")).status is RunStatus.COMPLETED


@pytest.mark.parametrize("mode", FailureMode)
def test_nothing_follows_what_failed(mode: FailureMode) -> None:
    run = grow(CHAIN, DAG([coder("build", failure_mode=mode)]), answers("build"))
    assert run.ran == ["build"]


def test_what_depends_on_the_coder_does_not_wait_for_the_follow_ups() -> None:
    run = grow(CHAIN, DAG([coder("build"), Task("ship", "Ship {{ build }}.", ["build"])]), answers("build.reviewer"))
    assert run.ran == ["build", "ship", "build.reviewer", "build.tester"]


def test_follow_ups_are_followed_where_their_role_says_so() -> None:
    chains = {"coder": [FollowUp("reviewer")], "reviewer": [FollowUp("judge", "{{ work }}?")]}
    run = grow(FollowUps(chains), DAG([coder("a"), coder("b")]), answers())
    assert sorted(run.ran) == ["a", "a.reviewer", "a.reviewer.judge", "b", "b.reviewer", "b.reviewer.judge"]
    assert "<b.reviewer>?" in run.prompts


def test_unconfigured_it_is_a_reviewer_and_a_tester_after_a_coder() -> None:
    run = grow(FollowUps(), DAG([coder("build")]), answers())
    assert run.ran == ["build", "build.reviewer", "build.tester"]
    assert all(prompt.endswith("\n\n<build>") for prompt in run.prompts[1:])


@pytest.mark.parametrize("taken", [(), ("build.reviewer", "build.reviewer.2", "build.tester")])
def test_a_task_done_a_second_time_is_not_followed_a_second_time(taken: Sequence[str]) -> None:
    run = Grown(DAG([coder("build"), *(Task(name, "x") for name in taken)]))
    for expected in (2, 0):
        run.run_one(run.dag["build"], answers())
        decision = CHAIN.decide(run.view("build"))
        assert len(decision.add) == expected
        run.apply(decision)


class Unseen(list[Task]):
    """Tasks that can be looked up, and not looked through."""

    def __iter__(self) -> Iterator[Task]:
        raise AssertionError("looked through all tasks")


def test_how_long_it_takes_does_not_depend_on_how_many_tasks_there_are() -> None:
    run = Grown(DAG([coder("build"), coder("other"), Task("build.tester", "build.tester")]))
    run.run_one(run.dag["build"], answers())
    for expected in (["build.reviewer", "build.tester.2"], []):
        view = replace(run.view("build"), tasks=Unseen(run.dag.tasks), position=run.dag.position)
        decision = CHAIN.decide(view)
        assert [task.id for task in decision.add] == expected
        run.apply(decision)


def test_ids_that_are_taken_or_too_long_give_way() -> None:
    long = "x" * 64
    dag = DAG(
        [
            coder("build"),
            Task("build.reviewer", "build.reviewer"),
            Task("build.reviewer.2", "build.reviewer.2"),
            coder(long),
            coder(long[1:] + "y"),
        ]
    )
    run = grow(CHAIN, dag, answers())
    assert list(run.dag["build.tester"].depends_on) == ["build", "build.reviewer.3"]
    followed = [task for task in run.dag if task.metadata.get("follows")]
    assert len(followed) == 6
    assert len({task.id for task in run.dag}) == len(dag) + 6
    assert run.status is RunStatus.COMPLETED
    again = grow(CHAIN, dag, answers())
    assert [task.id for task in again.dag] == [task.id for task in run.dag]


def test_it_is_asked_about_ends_and_not_about_rest() -> None:
    run = Grown(DAG([coder("build")]))
    assert CHAIN.decide(run.view()).add == ()


def test_the_settings_make_the_same_policy_again() -> None:
    full = FollowUp("judge", "p", "deep", FailureMode.SOFT, {"type": "object"}, Retry(attempts=2), 5.0)
    policy = FollowUps({"coder": [FollowUp("reviewer"), full], "writer": [FollowUp("tester")]})
    settings = json.loads(json.dumps(policy.settings()))
    again = policy_of(policy.kind, settings)
    assert isinstance(again, FollowUps)
    assert again.chains() == policy.chains()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FollowUp("critic"), "role 'critic' needs a prompt; only reviewer, tester"),
        (lambda: FollowUp("work", "p"), "none of .*inputs, item, none, results, true, work"),
        (lambda: FollowUp("a b", "p"), "1 to 32 letters"),
        (lambda: FollowUps({"coder": []}), "the chain after 'coder' has no step; add at least one"),
        (
            lambda: FollowUps({"coder": [FollowUp("tester"), FollowUp("tester")]}),
            "'tester' is in this chain, after",
        ),
        (lambda: FollowUps({"tester": [FollowUp("tester")]}), "form a cycle: tester -> tester"),
        (
            lambda: FollowUps({role: [FollowUp(after, "p")] for role, after in ("ab", "ca", "bc")}),
            "form a cycle: (a -> b -> c -> a|b -> c -> a -> b|c -> a -> b -> c); remove",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_prompt_that_is_no_template_is_refused() -> None:
    with pytest.raises(PromptError):
        FollowUp("tester", "{{ work")


WRONG = FollowUps(
    {
        "coder": [FollowUp("reviewer", "{{ wrok }} {{ spec }} {{ topic }}"), FollowUp("tester", "{{ reviwer }}")],
        "reviewer": [FollowUp("judge", "{{ item }}")],
        "painter": [FollowUp("critic", "{{ spec }}{{ work }}{{ pallette }}")],
    }
)
SPEC = DAG([Task("spec", "Say what."), coder("build", depends_on=["spec"]), coder("more")], inputs={"topic": "tea"})
MISTAKES = [
    ("build.reviewer", "{{ wrok }}, which is neither a task nor an input; did you mean 'work'?"),
    ("build.tester", "{{ reviwer }}, which is neither a task nor an input; did you mean 'reviewer'?"),
    ("build.reviewer.judge", "{{ item }}"),
    ("more.reviewer", "{{ spec }}, but 'spec' is not upstream; let 'more' depend on it"),
    ("painter.critic", "{{ pallette }}, which is neither a task nor an input"),
]


@pytest.mark.parametrize("begin", ["run", "start", "create"])
async def test_wrong_names_in_prompts_are_mistakes_before_anything_runs(begin: str) -> None:
    ran: list[str] = []
    store = MemoryStore()
    runner = ParallelRunner(ran.append, store=store)
    with pytest.raises(DAGError) as caught:
        await getattr(runner.runs if begin == "create" else runner, begin)(SPEC, policy=WRONG)
    found = sorted((problem.task_id or "", problem.message) for problem in caught.value.problems)
    assert [task_id for task_id, _ in found] == sorted(task_id for task_id, _ in MISTAKES)
    for task_id, message in MISTAKES:
        assert message in dict(found)[task_id]
    assert (ran, await store.list_runs()) == ([], ())


async def test_the_right_names_in_prompts_are_none() -> None:
    prompt = "{{ work }} {{ spec }} {{ topic }} {{ inputs.topic }} {{ results.spec }}"
    chains = {role: [FollowUp("reviewer", prompt)] for role in ("coder", "painter")}
    runner = ParallelRunner(lambda prompt: prompt)
    dag = DAG([SPEC["spec"], SPEC["build"]], inputs=SPEC.inputs)
    result = await runner.run(dag, policy=FollowUps(chains))
    assert result.text["build.reviewer"] == "Write it. Say what. tea tea Say what."


def test_roles_that_no_task_has_may_be_called_like_anything_that_is_there() -> None:
    roles = ("painter", "a b", "a-b", "", "." * 99)
    policy = FollowUps({role: [FollowUp("critic", "{{ work }} {{ painter }} {{ a_b }}")] for role in roles})
    policy.check(DAG([Task("painter", "painter"), Task("a-b-", "a-b-")], inputs={"a_b": "x", "a-b": "y"}))
    with pytest.raises(DAGError, match="a_b }}, which is neither a task nor an input"):
        policy.check(DAG([Task("painter", "painter"), Task("a-b-", "a-b-")], inputs={"a-b": "y"}))
