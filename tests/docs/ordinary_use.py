"""What people write down with types of their own: both checkers take it. Looked at by `shown_code`, never run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from plait import DAG, OpenQuestion, ParallelRunner, Retry, Runs, Step, Task, Workflow
from plait.backends import Backend, JsonInput, OpenAIBackend, ask
from plait.errors import ErrorKind
from plait.workflows import Decision, FollowUp

SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["good", "bad"]}, "score": {"type": "integer"}},
    "required": ["label"],
}
names: list[str] = ["x", "y"]
per_person: dict[str, str] = {"a": "b"}
rows: list[dict[str, str]] = [per_person]
aliases: dict[str, list[str]] = {"docs": names}
settings: dict[str, list[str]] = {"tags": names}
by_team: dict[str, list[Task]] = {}
named: dict[str, OpenAIBackend] = {"x": OpenAIBackend()}

tasks = [
    Task("schema", "schema", output_schema=SCHEMA, metadata=per_person),
    Task("one", "one", item=per_person),
    Task("many", "many", item=rows, aliases=aliases),
    Task("made", "made", item=[{"a": number} for number in range(3)]),
    Task("some", "some", retry=Retry(on={ErrorKind.RATE_LIMITED})),
    Task("frozen", "frozen", retry=Retry(on=frozenset({ErrorKind.RATE_LIMITED}))),
]
dag = DAG((task for team in by_team.values() for task in team), inputs=settings)
workflow = Workflow([Step("review", output_schema=SCHEMA)])
follow_up = FollowUp("reviewer", output_schema=SCHEMA, failure_mode="soft")
decision = Decision(state=per_person)
value: JsonInput = rows


async def shout(prompt: str) -> list[str]:
    answer = await ask(prompt, schema=SCHEMA, default=names)
    return [str(answer)]


async def choose(question: OpenQuestion) -> list[str]:
    return [question.text]


def runners(one: Backend | Callable[[str], str], two: Callable[[str], Awaitable[str]]) -> list[ParallelRunner]:
    return [ParallelRunner(one), ParallelRunner(two, on_question=choose), ParallelRunner(shout, backends=named)]


async def use(runner: ParallelRunner, service: Runs, answers: dict[str, str]) -> None:
    await runner.run(workflow.dag(settings), settings=settings)
    await runner.runs.create(dag, key="a", settings=settings)
    await runner.resume("r", answers=answers)
    await runner.runs.answer("r", "t", names)
    await service.start("r", settings)
    await service.answer("r", "t", rows)
