"""`plait continue`: a person goes on with a stored conversation."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes.command import plait_here

TALKER = """
from plait.backends import Message, Reply, Usage

class Talk:
    def __init__(self, opening):
        self.session_id = opening.session_id

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def send(self, prompt):
        return Reply(f"re: {prompt}", session_id=self.session_id, usage=Usage(2, 3))

class Talker:
    def new_session_id(self):
        return "s1"

    def open(self, opening):
        return Talk(opening)

talker = Talker()
"""


def test_continue_says_something_in_a_stored_conversation(tmp_path: Path) -> None:
    (tmp_path / "talking.py").write_text(TALKER)
    (tmp_path / "plan.yaml").write_text(
        'backends: {t: {kind: function, call: "talking.py:talker"}}\ntasks:\n  - {id: a, prompt: one}\n'
    )
    done = plait_here(tmp_path, "run", "plan.yaml")
    assert done.code == 0
    assert "continue" in done.err
    said = plait_here(tmp_path, "continue", "last", "a", "and then?")
    assert (said.code, said.out, said.err) == (0, "re: and then?\n", "")
    told = plait_here(tmp_path, "continue", "last", "a", "more", "--json").value
    assert (told["task_id"], told["text"]) == ("a", "re: more")
    shown = plait_here(tmp_path, "show", "last", "a")
    assert "-- user (a person, after the run) --\nand then?\n" in shown.out
    assert "\ntokens    2+3\n          and 4+6 in turns after the run" in shown.out
    assert plait_here(tmp_path, "show", "last", "a", "--json").value["text"] == "re: one"
    for words, message in ((["last", "z", "hi"], "has no task 'z'"), (["last", "a", " "], "the message is empty")):
        refused = plait_here(tmp_path, "continue", *words)
        assert refused.code == 2
        assert message in refused.err
