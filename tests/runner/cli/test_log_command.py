"""`plait log`: what a run did, from its store and its agents' files. For following it see test_cli_log_follow.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.cli.test_terminal_output import CORPUS, MARKUP, assert_harmless
from tests.support.agents.homes import Home
from tests.support.agents.logs import make_log_home, outputs, plan, untimed
from tests.support.processes.command import PLAIT, Terminal, environment, plait_here
from tests.support.stores.database import edit

TASKS = """
  - {id: fix, prompt: "Mend it. [[tool]] [[say I found it.]]"}
  - {id: limited, prompt: "Go. [[error 429]]", retry: {attempts: 2, base_delay: 0}, depends_on: fix}
  - {id: bad, prompt: "Go. [[error 400]]", failure_mode: skip, depends_on: limited}
  - {id: echo, backend: echo, prompt: "two\\nlines", depends_on: bad}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return make_log_home(tmp_path, monkeypatch)


def test_a_run_reads_as_a_story_with_what_its_agents_did_between_its_events(home: Home) -> None:
    folder = plan(home, TASKS)
    run_id = plait_here(folder, "run", "plan.yaml", "--json").value["run_id"]
    done = plait_here(folder, "log", "last")
    assert (done.code, done.err) == (0, "")
    assert re.match(r"-- \d{4}-\d\d-\d\d --\n\d\d:\d\d:\d\d  run ", done.out)
    calls = home.calls
    patterns = [
        rf"run {run_id} created, 4 tasks",
        rf"run {run_id} started",
        r"fix           started \(coder\)",
        rf"fix           session {calls[0]['session']}",
        r"fix           > Bash: make test",
        r"fix           \| I found it\.",
        r"fix           completed [\d.]+s 20\+14 tokens \$0\.0020",
        r"limited       started \(coder\)",
        r"limited       session [\w-]+",
        r"limited       continues in [\d.]+s: rate_limited: Claude Code: API Error: 429 no \([\d.]+s.*\)",
        r"limited       started \(coder, attempt 2, continues its conversation\)",
        r"limited       \| answer 2 to: You were interrupted .*",
        r"limited       completed [\d.]+s 10\+7 tokens \$0\.0010",
        r"bad           started \(coder\)",
        r"bad           session [\w-]+",
        r"bad           user\| Go\. \[\[error 400\]\]",  # what was said in an attempt without any output
        r"bad           skipped [\d.]+s.* invalid_request: Claude Code: API Error: 400 no",
        r"echo          started \(echo\)",
        r"echo          user\| two",
        r"echo          user\| lines",
        r"echo          assistant\| re: two",
        r"echo          assistant\| lines",
        r"echo          completed [\d.]+s",
        rf"run {run_id} completed",
    ]
    told = untimed(done.out)
    assert len(told) == len(patterns), done.out
    for line, pattern in zip(told, patterns, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"


def test_only_the_last_lines_are_printed(home: Home) -> None:
    folder = plan(home, TASKS)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    for options in ([], ["--json"], ["-f"]):
        whole = plait_here(folder, "log", "last", *options).out.splitlines()
        assert len(whole) > 20
        for number in (0, 1, 20, 1000, 10**20):
            done = plait_here(folder, "log", "last", *options, "-n", str(number))
            assert (done.code, done.out.splitlines()) == (0, whole[max(len(whole) - number, 0) :])
    done = plait_here(folder, "log", "last", "-n", "-1")
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_of_one_task_only_its_own_is_told(home: Home) -> None:
    folder = plan(home, TASKS)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    told = untimed(plait_here(folder, "log", "last", "fix").out)
    assert [line.split()[0] for line in told] == ["started", "session", ">", "|", "completed"]
    for words in (["last", "nope"], ["nope"]):
        done = plait_here(folder, "log", *words)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)


def test_as_json_each_line_is_an_object(home: Home) -> None:
    folder = plan(home, TASKS)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    entries = [json.loads(line) for line in plait_here(folder, "log", "last", "--json").out.splitlines()]
    assert all(set(one) == {"seq", "at", "kind", "task_id", "attempt", "detail"} for one in entries)
    events = [one for one in entries if one["seq"] is not None]
    assert [one["seq"] for one in events] == sorted({one["seq"] for one in events})
    assert (events[0]["kind"], events[-1]["kind"]) == ("run_created", "run_completed")
    seen = [(one["task_id"], one["detail"]) for one in entries if one["kind"] == "output"]
    assert seen[0] == ("fix", {"output": "tool", "text": "Bash: make test", "input_tokens": 10, "output_tokens": 7})
    assert "".join(one["text"] for task, one in seen if task == "fix" and one["output"] == "text") == "I found it."
    ended = next(one["detail"] for one in events if one["kind"] == "task_completed")
    assert (ended["cost_usd"], ended["input_tokens"]) == (0.002, 20)
    said = [one["detail"] for one in entries if one["kind"] == "message" and one["task_id"] == "echo"]
    assert said == [{"role": "user", "content": "two\nlines"}, {"role": "assistant", "content": "re: two\nlines"}]


def test_without_their_files_the_messages_of_agents_are_told(home: Home) -> None:
    folder = plan(home, '  - {id: fix, prompt: "Mend it. [[say I found it.]]"}\n')
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    shutil.rmtree(folder / ".plait" / "plait.db.files")
    told = untimed(plait_here(folder, "log", "last", "fix").out)
    assert told[2:4] == ["user| Mend it. [[say I found it.]]", "assistant| I found it."]


def test_what_a_person_went_on_with_stands_where_it_was_said(home: Home) -> None:
    folder = plan(
        home,
        """
  - {id: fix, prompt: "Mend it. [[say I found it.]]"}
  - {id: bad, prompt: "Go. [[error 400]]", depends_on: fix}
""",
    )
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 1
    for words in ("And? [[say Two.]]", "More. [[say Three.]]"):
        assert plait_here(folder, "continue", "last", "fix", words).code == 0
    assert plait_here(folder, "resume", "last", "--retry-failed", "-q").code == 1
    assert plait_here(folder, "continue", "last", "fix", "Late. [[say Four.]]").code == 0
    turns = [
        r"fix +user\| And\? \[\[say Two\.\]\]", r"fix +assistant\| Two\.",
        r"fix +user\| More\. \[\[say Three\.\]\]", r"fix +assistant\| Three\.",
        r"fix +user\| Late\. \[\[say Four\.\]\]", r"fix +assistant\| Four\.",
    ]  # fmt: skip
    told = untimed(plait_here(folder, "log", "last").out)
    failed, _ = (at for at, line in enumerate(told) if line.endswith(" failed"))
    for line, pattern in zip((*told[failed + 1 : failed + 5], *told[-2:]), turns, strict=True):
        assert re.fullmatch(pattern, line), told
    of_task = plait_here(folder, "log", "last", "fix").out
    assert [line for line in of_task.splitlines() if re.match(r"\d\d:\d\d:\d\d  (user|assistant)\|", line)] == (
        of_task.splitlines()[-6:]
    )
    said = [json.loads(line) for line in plait_here(folder, "log", "last", "--json").out.splitlines()]
    assert sum(one["kind"] == "message" and one["attempt"] == 0 and one["at"] is not None for one in said) == 6
    assert not any("say Two" in line for line in plait_here(folder, "log", "last", "bad").out.splitlines())


def test_damaged_messages_are_named_and_not_left_out(home: Home) -> None:
    folder = plan(
        home,
        """
  - {id: fix, prompt: "Mend it. [[say I found it.]]"}
  - {id: echo, backend: echo, prompt: "two", depends_on: fix}
""",
    )
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    assert plait_here(folder, "continue", "last", "fix", "And? [[say Two.]]").code == 0
    whole = untimed(plait_here(folder, "log", "last").out)
    edit(folder / ".plait" / "plait.db", "UPDATE attempts SET text = 'no' WHERE prompt = 'two'")
    edit(folder / ".plait" / "plait.db", "UPDATE messages SET content = 'no' WHERE content = 'Two.'")
    told = untimed(plait_here(folder, "log", "last").out)
    expected = {
        "echo          assistant| re: two": "echo          damaged: a message (assistant) does not fit its checksum",
        "fix           assistant| Two.": "fix           damaged: a message (assistant) does not fit its checksum",
    }
    assert told == [expected.get(line, line) for line in whole] != whole
    entries = [json.loads(line) for line in plait_here(folder, "log", "last", "--json").out.splitlines()]
    said = [(one["task_id"], one["detail"]) for one in entries if one["detail"].get("damaged")]
    assert said == [(task, {"role": "assistant", "damaged": True}) for task in ("echo", "fix")]


def test_a_session_that_was_told_anew_is_noted(home: Home) -> None:
    tasks = '  - {id: one, prompt: "First."}\n  - {id: two, prompt: "Second.", continues: one, depends_on: break}\n'
    folder = plan(home, tasks + '  - {id: break, backend: rm, prompt: "x", depends_on: one}\n')
    (folder / "plan.yaml").write_text(
        (folder / "plan.yaml").read_text().replace("backends:", 'backends:\n  rm: {kind: function, call: "rm.py:rm"}')
    )
    (folder / "rm.py").write_text("import shutil\n\n\nasync def rm(_):\n    shutil.rmtree('sessions')\n    return ''\n")
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    told = untimed(plait_here(folder, "log", "last", "two").out)
    assert any(line.startswith("system| session ") and "history as text" in line for line in told)


def event(kind: str, at: str, **more: object) -> str:
    message = {"id": at, "role": "assistant", "content": [{"type": "tool_use", "name": "Bash", "input": more}]}
    return json.dumps({"type": kind, "session_id": "s", "timestamp": at, "message": message}) + "\n"


def test_agents_that_tell_the_time_are_told_in_its_order(home: Home) -> None:
    folder = plan(home, '  - {id: a, prompt: "A."}\n  - {id: b, prompt: "B."}\n  - {id: c, prompt: "C."}\n')
    value = plait_here(folder, "run", "plan.yaml", "--json").value
    begun = plait_here(folder, "show", "last", "c", "--json").value["started_at"]
    steps = {"a": (1, 4), "b": (2, 5), "c": (3,)}
    for task, numbers in steps.items():
        path = folder / ".plait" / "plait.db.files" / value["run_id"] / task / "1" / "1" / "stdout"
        path.write_text("".join(event("assistant", f"{begun[:-1]}{n}Z", command=f"step {n}") for n in numbers))
    told = plait_here(folder, "log", "last").out
    assert re.findall(r"(\w) +> Bash: step (\d)", told) == [("a", "1"), ("b", "2"), ("c", "3"), ("a", "4"), ("b", "5")]
    assert re.search(r"^\d\d:\d\d:\d\d  a +> Bash: step 1$", told, re.MULTILINE)


@pytest.mark.parametrize("at", ["2026-99-99T99:99:99Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "\x1b[2J", ""])
def test_times_that_are_none_are_left_out(home: Home, at: str) -> None:
    folder = plan(home, '  - {id: a, prompt: "A."}\n')
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    outputs(folder)[0].write_text(event("assistant", at, command="make"))
    done = plait_here(folder, "log", "last", "a")
    assert (done.code, done.err) == (0, "")
    assert "\n          > Bash: make\n" in done.out


def test_nothing_that_an_agent_prints_acts_on_the_terminal_or_passes_for_a_line_of_ours(home: Home) -> None:
    folder = plan(home, '  - {id: a, prompt: "A."}\n')
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    evil = CORPUS + MARKUP
    forged = f"fine\n10:00:00  a             completed 1.0s\n{evil}"
    text = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": forged}}
    with outputs(folder)[0].open("a") as file:
        file.write(event("assistant", "", command=evil))
        file.write(json.dumps({"type": "stream_event", "session_id": "s", "event": text}) + "\n")
    with Terminal(folder, "log", "last") as terminal:
        assert terminal.wait() == 0
    assert_harmless(terminal.seen)
    assert_harmless(plait_here(folder, "log", "last", "a", "--json").out.encode())
    told = plait_here(folder, "log", "last").out
    assert "\\x1b]0;OWNED" in told
    line = next(line for line in told.splitlines() if "completed 1.0s" in line)
    assert line.startswith(" " * 10 + "a             | 10:00:00")


def test_what_nobody_understands_is_told_line_by_line(home: Home) -> None:
    folder = plan(home, '  - {id: a, prompt: "A."}\n')
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    [output] = outputs(folder)
    over = output.with_name("over.json")
    over.write_text(over.read_text().replace("claude-code", "somebody-else"))
    output.write_bytes(b'{"hello": 1}\nplain \xff\x1b[2J\nno end')
    told = untimed(plait_here(folder, "log", "last", "a").out)
    assert [line for line in told if line.startswith("|")] == ['| {"hello": 1}', "| plain \ufffd\\x1b[2J", "| no end"]


MEASURED = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
_, status, used = os.wait4(child.pid, 0)
child.returncode = os.waitstatus_to_exitcode(status)
print(used.ru_maxrss, file=sys.stderr)
sys.exit(child.returncode)
"""


@pytest.mark.slow
def test_large_files_take_little_memory(home: Home) -> None:
    folder = plan(home, '  - {id: a, prompt: "A."}\n')
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    line = json.dumps({"type": "user", "message": {"content": "x" * 500_000}}) + "\n"
    long = b"y" * (9 << 20) + b"\n"
    with outputs(folder)[0].open("ab") as file:
        for _ in range(300):
            file.write(line.encode())
        file.write(long)
        file.write(event("assistant", "", command="the end").encode())
    # Its parent is a small process: until a child has become another program, its parent's memory counts as its own.
    words = [sys.executable, "-c", MEASURED, *PLAIT, "log", "last"]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    assert "> Bash: the end" in done.stdout and "output lines skipped as too long: 1" in done.stdout
    assert int(done.stderr) < 150_000  # KiB; the file has 160 MB
