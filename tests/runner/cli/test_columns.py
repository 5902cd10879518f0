"""Tables and prose on a real terminal of 80 columns: no line wraps, no word breaks; only a terminal has colours."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from plait.runner.cli.terminal_output import cells
from tests.support.processes.command import Terminal, plait_here

FUNCTIONS = """
from contextlib import asynccontextmanager
from plait.backends import Question, Reply, Usage
from plait.errors import BackendError, ErrorKind

class Talk:
    session_id = None
    async def send(self, prompt):
        if "fail" in prompt:
            raise BackendError(ErrorKind.REFUSED, "the provider refuses this prompt, as it refuses all the others")
        question = Question("Which of the two shall be sent to the customers, the longer or the shorter one?")
        usage = Usage(1_234_567, 654_321, 12.3456, model="a-model-with-a-rather-long-name-2026-11")
        return Reply(prompt, usage=usage, question=question if "ask" in prompt else None)

class Backend:
    def new_session_id(self):
        return None
    @asynccontextmanager
    async def open(self, request):
        yield Talk()

work = Backend()
"""
LONG = "the-reviews-of-all-customers-that-fail-in-the-end"
KOREAN = "모든 고객 리뷰를 읽고 " * 8
PLAN = {
    "name": "the reviews of all customers of the year and what they say about the new product",
    "inputs": {"numbers": list(range(14))},
    "backends": {"a-backend-with-a-long-name": {"kind": "function", "call": "functions.py:work"}},
    "tasks": [
        {"id": LONG, "prompt": "fail, with " + "some more words " * 9, "failure_mode": "soft"},
        {"id": "part", "prompt": "{{ item }}", "for_each": "numbers"},
        {"id": "korean", "prompt": KOREAN},
        {"id": "asks-a-person", "prompt": "ask", "depends_on": [LONG, "korean"]},
        {"id": "waits-for-the-person", "prompt": "x", "depends_on": ["asks-a-person"]},
    ],
}
COMMANDS = [
    "runs",
    "runs --long",
    "show last",
    "show last --task part.*",
    f"show last {LONG}",
    "show last korean",
    "show last asks-a-person",
    "diff last FIRST",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns")
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    assert plait_here(folder, "run", "plan.json", "-q").code == 4
    changed = json.dumps(PLAN).replace("some more words", "other words still").replace("product", "thing")
    (folder / "plan.json").write_text(changed)
    assert plait_here(folder, "run", "plan.json", "-q").code == 4
    return folder


def on_terminal(folder: Path, *words: str, code: int = 0) -> list[str]:
    """The lines of the command on a terminal of 80 columns, without colours."""
    with Terminal(folder, *words, columns=80) as terminal:
        assert terminal.wait() == code
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.seen.decode()).replace("\r", "").splitlines()


@pytest.mark.parametrize("line", COMMANDS)
def test_no_line_wraps_and_no_word_is_broken(folder: Path, line: str) -> None:
    first = plait_here(folder, "runs", "--json").value[1]["run_id"]
    words = line.replace("FIRST", first).split()
    lines = on_terminal(folder, *words)
    too_long = [line for line in lines if cells(line) > 80 and not line.startswith("answer ")]
    assert not too_long
    whole = re.sub(r"\d+s\b", "", plait_here(folder, *words).out).split()
    cut = {word for line in lines if line.endswith("…") for word in line.split()}
    lines = [re.sub(r"\d+s\b", "", line) for line in lines]  # the ages of the runs
    assert {word for line in lines for word in line.split()} - cut <= set(whole)
    if not cut:
        assert sorted(" ".join(lines).split()) == sorted(whole)


def test_numbers_of_a_long_list_are_below_their_heads(folder: Path) -> None:
    head, more_heads, run, more, *_ = on_terminal(folder, "runs", "--long")
    assert head.split() == ["RUN", "NAME", "STATUS", "TASKS", "COST"]
    assert more_heads.split() == ["TOKENS", "SIZE", "AGE", "OWNER"]
    assert run.index("waiting_input") == head.index("STATUS")
    assert more.index("kB") + 2 == more_heads.index("SIZE") + 4
    assert (more_heads[0], more[0]) == (" ", " ")


def test_hosts_fit_too(folder: Path) -> None:
    hosts = {
        "fleet": {"kind": "ssh", "ssh": ["/bin/false"], "hosts": ["build-machine-of-the-second-floor.example.org"]}
    }
    (folder / "hosts.json").write_text(json.dumps(hosts))
    lines = on_terminal(folder, "doctor", "--hosts", "hosts.json", code=3)
    assert max(map(cells, lines)) <= 80
    assert lines[1:] == [
        "  state",
        "fleet  build-machine-of-the-second-floor.example.org      4",
        "  away: /bin/false exited with 1",
    ]


@pytest.mark.parametrize("words", [["runs"], ["runs", "--long"], ["show", "last"], ["show", "last", LONG]])
def test_only_a_terminal_has_colours(folder: Path, words: list[str]) -> None:
    with Terminal(folder, *words, columns=80) as terminal:
        assert terminal.wait() == 0
    assert b"\x1b[" in terminal.seen
    assert "\x1b" not in plait_here(folder, *words, FORCE_COLOR="1").out
    with Terminal(folder, *words, columns=80, NO_COLOR="1") as terminal:
        assert terminal.wait() == 0
    assert b"\x1b[" not in terminal.seen
