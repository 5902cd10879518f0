"""What a turn had cost when it was cancelled is not forgotten; of one that was stopped, who goes on with it tells."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Self

import anyio

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends import ConversationRequest, Output, Reply, Usage
from plait.persistence import Store

SO_FAR, THEN, WHOLE = Usage(40, 3), Usage(100, 7, 0.25), Usage(120, 9, 0.5)
PAIR = DAG([Task("a", prompt="quick"), Task("b", prompt="slow"), Task("c", prompt="c", depends_on=["b"])])


class Agent:
    """Says now and then what its turn has cost so far, as agents do; a slow one never answers."""

    def __init__(self) -> None:
        self.at_work = anyio.Event()
        self.is_slow = True

    def new_session_id(self) -> None:
        return None

    def open(self, request: ConversationRequest) -> AgentTurn:
        return AgentTurn(self, request)


class AgentTurn:
    session_id = None

    def __init__(self, agent: Agent, request: ConversationRequest) -> None:
        self._agent, self._opening = agent, request

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def send(self, prompt: str) -> Reply:
        for usage in (SO_FAR, THEN):
            self._opening.on_output(Output("tool", "ls", usage))
        self._opening.on_output(Output("text", "says nothing of it"))
        if prompt == "slow" and self._agent.is_slow:
            self._agent.at_work.set()
            await anyio.sleep_forever()
        return Reply(prompt, usage=WHOLE)


async def ended(store: Store, agent: Agent, how: str) -> Usage:
    async with ParallelRunner(agent, store=store, cancel_grace=0.1).start(PAIR, "r") as run:
        await agent.at_work.wait()
        await anyio.wait_all_tasks_blocked()
        getattr(run, how)()
        return (await run.result()).usage


async def test_a_cancelled_turn_has_cost_what_it_had_said(store: Store) -> None:
    assert await ended(store, Agent(), "cancel") == WHOLE + THEN
    tasks = {task.task_id: task for task in await store.list_tasks("r")}
    assert [replace(tasks[name].usage, model=None) for name in "bc"] == [Usage(100, 7, 0.25), Usage()]
    (attempt,) = await store.list_attempts("r", "b")
    assert (attempt.status, attempt.usage.input_tokens, attempt.usage.cost_usd) == ("cancelled", 100, 0.25)
    record = await store.get_run("r")
    assert record is not None
    assert record.usage == Usage(220, 16, 0.75)


async def test_a_stopped_turn_is_not_counted_twice(store: Store) -> None:
    """An agent that goes on with a session counts what was cut."""
    agent = Agent()
    assert await ended(store, agent, "stop") == WHOLE
    agent.is_slow = False
    result = await ParallelRunner(agent, store=store).resume("r")
    assert (result.status, result.usage) == (RunStatus.COMPLETED, WHOLE + WHOLE + WHOLE)


async def test_an_earlier_attempts_word_is_not_the_last_ones(store: Store) -> None:
    class Failing(AgentTurn):
        async def send(self, prompt: str) -> Reply:
            if not failed:
                failed.append(prompt)
                self._opening.on_output(Output("tool", "ls", THEN))
                raise ConnectionError
            self._agent.at_work.set()
            return await anyio.sleep_forever()

    class Once(Agent):
        def open(self, request: ConversationRequest) -> AgentTurn:
            return Failing(self, request)

    failed: list[str] = []
    assert await ended(store, Once(), "cancel") == THEN
    attempts = [attempt for name in "ab" for attempt in await store.list_attempts("r", name)]
    assert sorted(attempt.usage.input_tokens for attempt in attempts) == [0, 100]


async def test_a_turn_that_timed_out_has_cost_what_it_had_said(store: Store) -> None:
    dag = DAG([Task("b", prompt="slow", timeout=0.5, retry=0)])
    result = await ParallelRunner(Agent(), store=store).run(dag, "r")
    assert (result["b"].error_kind, result.usage) == ("timeout", THEN)
    (attempt,) = await store.list_attempts("r", "b")
    assert (attempt.usage.input_tokens, attempt.usage.cost_usd) == (100, 0.25)
