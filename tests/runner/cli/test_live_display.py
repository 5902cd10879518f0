"""What a person sees of agents at work while a run goes on: a line for each on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait import DAG, Task, TaskStatus
from plait.backends import Reply
from plait.events import HostAway, TaskCancelled, TaskCompleted, TaskOutput, TaskRetried, TaskStarted
from plait.runner.cli.run_report import Progress
from plait.runner.cli.terminal_output import as_line, last_cells
from plait.runner.state.run_state import RunState
from plait.runner.views.event_sentences import event_line
from plait.usage import NO_USAGE, Usage
from tests.support.processes.command import Terminal, plait

AT = "2026-11-21T23:00:00.000Z"
FUNCTIONS = """
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from plait.backends import Output, Reply, Usage


class Working:
    def __init__(self, request):
        self.request, self.session_id = request, None

    async def send(self, prompt):
        for line in prompt.splitlines():
            kind, _, text = line.partition(" ")
            self.request.on_output(Output(kind, text, Usage(1200, 34, 0.5)))
        Path(self.request.idempotency_key.replace(":", "-")).touch()
        with anyio.fail_after(60):
            while not Path("go").exists():
                await anyio.sleep(0.01)
        return Reply("done", usage=Usage(2000, 50, 0.75))


class Agent:
    def new_session_id(self):
        return None

    @asynccontextmanager
    async def open(self, request):
        yield Working(request)


agent = Agent()
"""
HEAD = """
name: agents
backends: {coder: {kind: function, call: "functions.py:agent"}}
defaults: {backend: coder}
tasks:
"""
TASKS = """
  - {id: tests, prompt: "text I look around.\\ntool Bash: npm test"}
  - {id: limited, prompt: "tool Read: a.py\\nwaiting rate limit, 2.3 s, try 1 of 2"}
  - {id: writes, prompt: "tool Read: b.py\\ntext It was the \\ntext parser."}
  - {id: told, prompt: "notice asking once more"}
  - {id: later, prompt: "x", depends_on: tests}
"""


def make(folder: Path, tasks: str) -> Path:
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "plan.yaml").write_text(HEAD + tasks)
    return folder


def plain(seen: bytes) -> str:
    """What was written, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())


def frames(seen: bytes) -> list[str]:
    """The pictures that were drawn one over the other: each begins by going back over the one before."""
    return re.split(r"\r(?:\x1b\[2K(?:\x1b\[1A)?)+", plain(seen))


def test_each_agent_at_work_has_a_line_with_what_it_does_now(tmp_path: Path) -> None:
    make(tmp_path, TASKS)
    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("asking once more")
        for words in ("Bash: npm test", "waits: rate limit", "parser."):
            terminal.until(words)
        (tmp_path / "go").touch()
        assert terminal.wait() == 0
    picture = next(one for one in frames(terminal.seen) if all(word in one for word in ("npm test", "parser", "once")))
    lines = {line.split()[1]: line.rstrip() for line in picture.splitlines() if line.startswith("  ▸")}
    facts = r"[\d.]+s  coder  1,200\+34  \$0\.5000"
    assert re.fullmatch(rf"  ▸ tests    {facts}  Bash: npm test", lines["tests"])
    assert re.fullmatch(rf"  ▸ limited  {facts}  waits: rate limit, 2\.3 s, try 1 of 2", lines["limited"])
    assert re.fullmatch(rf"  ▸ writes   {facts}  It was the parser\.", lines["writes"])
    assert re.fullmatch(rf"  ▸ told     {facts}  asking once more", lines["told"])
    assert re.search(r"0/5  4 running · 4,800\+136 tokens · \$2\.00", picture)
    assert "I look around" not in lines["tests"]


@pytest.mark.parametrize("kind", ["xterm-256color", "dumb"])
def test_a_run_outlives_its_terminal(tmp_path: Path, kind: str) -> None:
    make(tmp_path, TASKS)
    with Terminal(tmp_path, "run", "plan.yaml", TERM=kind) as terminal:
        terminal.until("told")
        terminal.go_away()
        (tmp_path / "go").touch()
        assert terminal.wait() == 0
    assert plait(tmp_path, "show", "last", "--json").value["status"] == "completed"


def test_more_agents_than_lines_leave_room_for_the_rest(tmp_path: Path) -> None:
    agents = "".join(f'  - {{id: "a{i:02}", prompt: "tool Bash: step {i}"}}\n' for i in range(40))
    waiting = "".join(f'  - {{id: "w{i}", prompt: "x", depends_on: a00}}\n' for i in range(9))
    make(tmp_path, agents + waiting)
    with Terminal(tmp_path, "run", "plan.yaml", "-j", "40") as terminal:
        terminal.until("and 18 more")
        (tmp_path / "go").touch()
        assert terminal.wait() == 0
    full = [one for one in frames(terminal.seen) if "and 18 more" in one and "completed" not in one]
    # 30 lines: a blank one, the header, 22 at work, "and 18 more", 4 that wait, and the one that the cursor is in.
    assert full[-1].count("▸") == 22
    assert full[-1].count("waits for a00") == 4
    assert all(len(one.splitlines()) <= 29 for one in full)


@pytest.mark.parametrize("more", [[], ["-v"]])
def test_plain_lines_tell_of_tools_and_waits_where_that_is_asked_for(tmp_path: Path, more: list[str]) -> None:
    make(tmp_path, TASKS)
    (tmp_path / "go").touch()
    done = plait(tmp_path, "run", "plan.yaml", *more)
    assert done.code == 0
    told = [line.split(" ", 1)[1] for line in done.err.splitlines() if re.match(r"\d\d:", line)]
    words = {"tests Bash: npm test", "limited waits: rate limit, 2.3 s, try 1 of 2", "told asking once more"}
    assert words & set(told) == (words if more else set())
    assert not any("parser" in line for line in told)


def test_tools_and_waits_stay_above_the_picture_where_that_is_asked_for(tmp_path: Path) -> None:
    make(tmp_path, TASKS)
    (tmp_path / "go").touch()
    with Terminal(tmp_path, "run", "plan.yaml", "-v") as terminal:
        assert terminal.wait() == 0
    assert re.search(r"^limited Read: a\.py\r?$", plain(terminal.seen), re.MULTILINE)


def one_task() -> Progress:
    return Progress(RunState(DAG([Task("a", "p")])), lambda: 0.0)


def output(kind: str, text: str, usage: Usage = NO_USAGE) -> TaskOutput:
    return TaskOutput(AT, "a", 1, kind, text, usage)  # type: ignore[arg-type]


def test_what_is_written_starts_anew_after_a_tool_and_only_its_end_is_kept() -> None:
    progress = one_task()
    progress.handle(TaskStarted(AT, "a", 1, "coder"))
    one = progress.running["a"]
    for piece in ("I ", "look"):
        progress.handle(output("text", piece))
    assert (one.kind, one.now) == ("text", "I look")
    progress.handle(output("tool", "Bash: ls"))
    assert (one.kind, one.now) == ("tool", "Bash: ls")
    progress.handle(output("text", "It is"))
    progress.handle(output("text", " there"))
    assert (one.kind, one.now) == ("text", "It is there")
    progress.handle(output("text", "x" * 100_000 + "end"))
    assert one.now.endswith("xend") and len(one.now) <= 400


def test_what_is_used_counts_what_is_under_way_and_what_was_cut() -> None:
    progress = one_task()
    progress.handle(TaskStarted(AT, "a", 1, "coder"))
    progress.handle(output("tool", "x", Usage(10, 1, 0.5)))
    progress.handle(output("text", "y"))  # which says nothing of it
    assert progress.usage == Usage(10, 1, 0.5)
    progress.handle(TaskRetried(AT, "a", 1, "rate_limited", "slow down", 0.0, 1.0, Usage(12, 2, 0.75)))
    progress.handle(TaskStarted(AT, "a", 2, "coder"))
    assert progress.usage == Usage(12, 2, 0.75)
    progress.handle(TaskCompleted(AT, "a", 2, "done", usage=Usage(1, 1, 0.25)))
    assert progress.usage == Usage(13, 3, 1.0)
    cut = one_task()
    cut.handle(TaskStarted(AT, "a", 1, "coder"))
    cut.handle(output("tool", "x", Usage(10, 1)))
    cut.handle(TaskCancelled(AT, "a", 1))
    assert cut.usage == Usage(10, 1)


def test_lines_of_outputs_are_safe_and_short() -> None:
    line = event_line(output("tool", "Bash: \x1b[2Jrm\n-rf " + "x" * 1000))
    assert as_line(line).startswith(r"a Bash: \x1b[2Jrm -rf xxx")
    assert len(event_line(output("notice", "x" * 1000))) <= 302
    assert event_line(output("text", "a word")) == ""


def test_the_end_of_a_line_fits_however_wide_its_characters_are() -> None:
    assert last_cells("all of it", 9) == "all of it"
    assert last_cells("all of it", 5) == "…f it"
    assert last_cells("東京タワー", 6) == "…ワー"
    assert last_cells("東京", 1) == "…"


def test_a_host_that_is_found_to_be_away_as_the_run_is_stopped_is_left_like_the_others() -> None:
    progress = one_task()
    progress.handle(HostAway(AT, "m1", AT, "timed out", ("a",)))
    progress.leave()
    progress.handle(HostAway(AT, "m2", AT, "timed out", ("b",)))
    for host in ("m1", "m2"):
        progress.handle(HostAway(AT, host, None, "timed out", ()))
    assert progress.left == {"m1": ("a",), "m2": ("b",)}


def test_added_tasks_are_counted_and_wait_for_what_they_depend_on() -> None:
    state = RunState(DAG([Task("plan", "p")]))
    progress = Progress(state, lambda: 0.0)
    progress.handle(state.start(0, AT, "default"))
    progress.handle(state.complete(0, AT, Reply("x"), None))
    added = state.add_tasks([Task("a", "p"), Task("b", "p", ["a"])], None, AT)
    progress.handle(added)
    progress.handle(state.start(1, AT, "default"))
    assert (progress.counts[TaskStatus.COMPLETED], len(progress.dag)) == (1, 3)
    assert progress.counts[TaskStatus.PENDING] == 1
    assert list(progress.running) == ["a"]
    assert [(one, reason.tasks) for one, reason in progress.waiting_tasks(5, 0.0)] == [("b", ("a",))]
    assert event_line(added) == "2 tasks added: a, b"
