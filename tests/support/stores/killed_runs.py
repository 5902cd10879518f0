"""One database with runs of every kind, as left by a process that was killed: `python -m ...killed_runs PATH`.

`done` is finished and has parts, inputs, a result in a blob and a structured result. `asks` waits for a person, who
answered an earlier question. `noted` has an answer that waits in the inbox. `team` is an orchestrator in the middle.
`cut` is in the middle, with retries, sessions, a conversation that continues, and an attempt under way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio

from plait.backends import BackendError, ErrorKind
from plait.backends.protocol import ConversationRequest, Reply
from plait.dialogue import Question
from plait.persistence import SQLiteStore
from plait.runner import DAG, ParallelRunner, Retry, Task
from plait.runner.engine.inbox import AnswerNote, answer_note
from plait.runner.orchestrator import Orchestrator
from tests.support.fakes import Talker
from tests.support.team import GOAL, Team

RUNS = ("done", "asks", "noted", "team", "cut")
RESUMED = ("asks", "noted", "team", "cut")
"""The runs with work left."""
BIG = "a large answer, " * 5000
_ITEMS = ["rivers", "hills", "seas"]


def answer(prompt: str, _request: ConversationRequest) -> str | Reply | Exception:
    """Answer as a model that always says the same to the same prompt."""
    if prompt.startswith("List"):
        return Reply("three chapters", data=list(_ITEMS))
    if prompt.startswith("Tell all"):
        return BIG
    if prompt.startswith("Choose"):
        return Reply("which account?", question=Question("From which account?"), session_id="session-of-choice")
    return f"re: {prompt}"


class Model(Talker):
    """`answer`, with every prompt kept. Fails the first attempt at prompts with "twice", and hangs at "HANG"."""

    def __init__(self, *, hangs: bool = False) -> None:
        super().__init__(self._answered)
        self._hangs = hangs
        self._failed: set[str] = set()

    def _answered(self, prompt: str, request: ConversationRequest) -> str | Reply | Exception:
        if "twice" in prompt and prompt not in self._failed and self._hangs:
            self._failed.add(prompt)
            return BackendError(ErrorKind.OVERLOADED, "the model is busy", retry_after=0.001)
        if "HANG" in prompt and self._hangs:
            os.kill(os.getpid(), signal.SIGKILL)
        if request.answer is not None:
            return f"re: {prompt}"
        return answer(prompt, request)


def done_dag() -> DAG:
    tasks = [
        Task("outline", "List the chapters of {{ topic }}.", output_schema={"type": "array"}, metadata={"by": "ann"}),
        Task("chapter", "Write about {{ item }}.", for_each="outline"),
        Task("whole", "Join {{ chapter }}.", depends_on=("chapter",)),
        Task("all", "Tell all about {{ topic }}."),
    ]
    return DAG(tasks, name="a book", inputs={"topic": "Transfer 100 EUR"})


def cut_dag() -> DAG:
    again = Retry(attempts=3, base_delay=0.001)
    tasks = [
        Task("one", "Transfer 100 EUR to {{ payee }}.", retry=again),
        Task("two", "Say twice: {{ one }}", depends_on=("one",), retry=again),
        Task("talk", "And then?", continues="two", depends_on=("two",)),
        Task("hang", "HANG after {{ two }}", depends_on=("talk",)),
        Task("last", "Transfer 300 EUR after {{ hang }} and {{ free }}", depends_on=("hang", "free")),
        Task("free", "Write 500 EUR {{ talk }}", depends_on=("hang",), timeout=60.0),
        Task("side", "Look aside {{ payee }}", depends_on=("hang",), failure_mode="soft"),
    ]
    return DAG(tasks, name="payments", inputs={"payee": "Bob in Bonn"})


def asking_dag() -> DAG:
    tasks = [Task("choose", "Choose how to pay 700 EUR"), Task("pay", "Pay by {{ choose }}", depends_on=("choose",))]
    return DAG(tasks, name="a payment")


async def fill(path: Path) -> None:
    """Write the runs, and die in the middle of the last."""
    async with SQLiteStore(path) as store:
        runner = ParallelRunner(Model(hangs=True), store=store, concurrency=2)
        await runner.run(done_dag(), "done")
        for run_id in ("asks", "noted"):
            await runner.run(asking_dag(), run_id)
        await runner.answer_question("asks", "choose", "from the savings account 12345")
        note = AnswerNote("choose", 1, "from the current account", "2026-11-24T10:00:00.000Z", "n1")
        await store.send("noted", answer_note(note))
        with anyio.CancelScope() as scope:
            team = Team(lambda call: scope.cancel() if call == "find d" else None)
            await Orchestrator(GOAL, backends=team.backends, store=store, run_id="team").run()
        # The lease of the killed runner has to hold until the last test has read the file.
        killed = ParallelRunner(Model(hangs=True), store=store, concurrency=2, lease=3600.0)
        await killed.run(cut_dag(), "cut")


def build(path: Path) -> None:
    """Make the database at `path`, with the log of the killed process beside the file."""
    ended = subprocess.run([sys.executable, "-m", __name__, str(path)], capture_output=True, text=True, check=False)
    if ended.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the process was to be killed, but ended with {ended.returncode}: {ended.stderr}")


if __name__ == "__main__":
    anyio.run(fill, Path(sys.argv[1]))
