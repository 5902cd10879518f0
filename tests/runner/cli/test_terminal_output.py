"""What models write never acts on a terminal. A real pseudo-terminal sees every byte."""

from __future__ import annotations

import io
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runner.cli.terminal_output import (
    as_line,
    columns,
    command,
    print_field,
    print_section,
    visible,
    without_controls,
)
from plait.runner.views.event_sentences import age, seconds
from tests.support.linear import check_linear
from tests.support.processes.command import Terminal, plait

# Each as a terminal must never get it. The words behind the controls make every one findable.
ATTACKS = {
    "window title": "\x1b]0;OWNED\x07",
    "clipboard": "\x1b]52;c;T1dORUQ=\x1b\\",
    "link": "\x1b]8;;http://127.0.0.1/OWNED\x1b\\click\x1b]8;;\x1b\\",
    "colour": "\x1b[31mRED",
    "clear screen": "\x1b[2JCLEAR",
    "device control": "\x1bP+q544e\x1b\\",
    "report": "\x1b[6nREPORT",
    "C1 CSI": "\x9b31mCSI",
    "C1 OSC": "\x9d0;OSC\x9c",
    "backspace": "safe\x08\x08\x08\x08evil",
    "carriage return": "safe\revil",
    "bell": "\x07BELL",
    "delete": "\x7fDEL",
    "shift out": "\x0eSO",
    "form feed": "\x0cFF",
    "right to left": "\u202eRLO",
    "isolate": "\u2066LRI",
    "arabic letter mark": "\u061cALM",
    "zero width": "\u200bZWSP",
    "joiner": "\u200dZWJ",
    "byte order mark": "\ufeffBOM",
    "line separator": "\u2028LS",
    "tag": "\U000e0041TAG",
    "soft hyphen": "\xadSHY",
}
CORPUS = "".join(ATTACKS.values())
MARKUP = "[bold red]MARKUP[/bold red] [link=http://127.0.0.1]x[/link] :smile:"

FUNCTIONS = f"""
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from plait.backends import Message, Output, Reply

EVIL = {CORPUS + MARKUP!r}


class Streaming:
    def __init__(self, request):
        self.request, self.session_id = request, EVIL

    async def send(self, prompt):
        for kind in ("tool", "waiting", "notice"):
            self.request.on_output(Output(kind, EVIL))
        for piece in EVIL:
            self.request.on_output(Output("text", piece))
        self.request.on_session(EVIL)
        with anyio.fail_after(60):
            while not Path("go").exists():
                await anyio.sleep(0.01)
        return Reply(EVIL, session_id=EVIL)


class Evil:
    def new_session_id(self):
        return None

    @asynccontextmanager
    async def open(self, request):
        yield Streaming(request)


evil = Evil()


async def fails(prompt):
    raise ValueError(EVIL)
"""
PLAN = r"""
name: "evil \e]0;OWNED\a \u202eRLO [bold]MARKUP[/bold]"
defaults: {retry: {attempts: 2, base_delay: 0, on: [unexpected]}}
backends:
  evil: {kind: function, call: "functions.py:evil"}
  fails: {kind: function, call: "functions.py:fails"}
tasks:
  - {id: says, prompt: "go on", backend: evil}
  - {id: fails, prompt: "{{ says }}", backend: fails, depends_on: says}
  - {id: ends, prompt: "{{ says }}", backend: evil, depends_on: says}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evil")
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "plan.yaml").write_text(PLAN)
    return folder


def assert_harmless(seen: bytes) -> None:
    leaked = [name for name, attack in ATTACKS.items() if attack.encode() in seen]
    assert not leaked, seen


@pytest.mark.parametrize("words", [[], ["-v"]])
def test_nothing_that_a_model_writes_acts_on_the_terminal_while_it_runs(folder: Path, words: list[str]) -> None:
    (folder / "go").unlink(missing_ok=True)
    with Terminal(folder, "run", "plan.yaml", *words) as terminal:
        terminal.until("MARKUP[/bold red]")  # the last words of the answer under way, as they are
        (folder / "go").touch()
        assert terminal.wait() == 1
    assert_harmless(terminal.seen)
    for trace in (b"\\x1b]0;OWNED\\x07", b"\\u202eRLO", b"\\x9b31mCSI", b"[bold red]MARKUP[/bold red]", b":smile:"):
        assert trace in terminal.seen
    assert b"\x1b[?25h" in terminal.seen  # the cursor is back


@pytest.mark.parametrize("words", [["runs"], ["show", "last"], ["show", "last", "says"], ["log", "last"]])
def test_nothing_stored_acts_on_the_terminal_when_it_is_shown(folder: Path, words: list[str]) -> None:
    with Terminal(folder, *words) as terminal:
        assert terminal.wait() == 0
    assert_harmless(terminal.seen)


def test_json_and_pictures_carry_no_control_either(folder: Path) -> None:
    shown = plait(folder, "show", "last", "says", "--json")
    assert shown.value["text"] == CORPUS + MARKUP  # exact, and still plain ASCII on the wire
    assert shown.out.isascii()
    assert not any(unicodedata.category(char) == "Cc" for char in shown.out if char != "\n")
    assert plait(folder, "graph", "last", "-o", "run.html").code == 0
    assert_harmless((folder / "run.html").read_bytes())


@pytest.mark.slow
@given(st.text())
def test_visible_text_holds_no_control_and_no_bidi_control(text: str) -> None:
    shown = visible(text)
    assert not any(unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"} and char not in "\n\t" for char in shown)
    reordering = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not any(unicodedata.bidirectional(char) in reordering for char in shown)
    assert not any(unicodedata.category(char) == "Cc" and char not in "\n\t" for char in without_controls(text))


@given(st.text())
def test_one_line_is_one_line_of_at_most_its_width(text: str) -> None:
    assert len(as_line(text).splitlines()) <= 1
    assert len(as_line(text, 10)) <= 10


def test_ordinary_text_stays_as_it_is() -> None:
    ordinary = "Größe 東京 אבג 🎉\n\tindented [brackets] \\x1b"
    assert visible(ordinary) == without_controls(ordinary) == ordinary
    assert visible("a\r\nb") == "a\nb"
    assert without_controls("👩\u200d🔬 \u200fא") == "👩\u200d🔬 \u200fא"


def test_numbers_read_well() -> None:
    assert [seconds(value) for value in (None, 0.031, 1.24, 59.96, 125, 11220)] == [
        "",
        "0.03s",
        "1.2s",
        "1m00s",
        "2m05s",
        "3h07m",
    ]
    assert [age(value) for value in (-1, 5, 90, 7200, 200_000)] == ["0s", "5s", "1m", "2h", "2d"]
    assert columns([("a", "1"), ("東京", "22")], frozenset({1})) == [["a   ", " 1"], ["東京", "22"]]
    assert command("plait", "show", "it's", "\x1b") == "plait show 'it'\"'\"'s' '\\x1b'"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


# A blank, each kind of line end, and what begins or ends a control sequence, of seven or of eight bits.
@pytest.mark.parametrize(
    "unit",
    [*"\0\n\x1b \x90\x9b\x9c", "a ", " \n", "\x1b[", "\x1b]"],
)
def test_the_time_grows_with_the_text_alone(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    monkeypatch.setattr(sys, "stdout", Screen())
    for show in (visible, without_controls, as_line):
        check_linear(show, unit)
    check_linear(lambda text: print_field("error", text), unit)
    check_linear(lambda text: print_section("result", text), unit)
