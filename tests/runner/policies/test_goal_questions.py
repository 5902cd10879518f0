"""Workers of an orchestrator that ask: it answers them, or a person does."""

from __future__ import annotations

from plait import OpenQuestion, Orchestrator, RunStatus
from plait.backends import ask
from plait.persistence import MemoryStore

asked: list[str] = []


async def planner(prompt: str) -> object:
    if prompt.startswith("You plan"):
        return {"tasks": [{"id": "paint", "prompt": "Paint the door"}]}
    return "The door is painted" if "in red" in prompt else "No answer"


async def executor(_prompt: str) -> str:
    return f"painted in {await ask('Which colour?')}"


async def reflector(_prompt: str) -> object:
    return {"done": True}


TEAM = {"planner": planner, "executor": executor, "reflector": reflector}


async def test_the_orchestrator_answers_its_workers() -> None:
    async def on_question(question: OpenQuestion) -> str:
        asked.append(question.text)
        return "red"

    result = await Orchestrator("A painted door", backends=TEAM, on_question=on_question).run()
    assert (result.status, result.answer) == (RunStatus.COMPLETED, "The door is painted")
    assert asked == ["Which colour?"]


async def test_a_person_answers_when_the_process_has_gone() -> None:
    store = MemoryStore()
    first = await Orchestrator("A painted door", backends=TEAM, store=store, run_id="door").run()
    assert (first.status, first.answer) == (RunStatus.WAITING_INPUT, "")
    (task_id,) = [task.task_id for task in await store.list_tasks("door") if task.question == "Which colour?"]
    second = await Orchestrator.resume("door", store=store, backends=TEAM, answers={task_id: "red"})
    assert (await second.run()).answer == "The door is painted"
