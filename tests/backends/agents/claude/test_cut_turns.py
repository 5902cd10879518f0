"""What the files of a turn of Claude Code tell that was cut before the model had said anything."""

from __future__ import annotations

import json

import pytest

from plait.backends.agents.claude.questions import ANSWER, write_answer
from plait.backends.agents.session_files import digest
from plait.backends.process.manifest import ChildManifest, write_manifest
from tests.support.agents.homes import Home


@pytest.mark.parametrize("taken", [False, True])
def test_an_answer_is_in_the_session_once_its_hook_has_taken_it(home: Home, taken: bool) -> None:
    folder = home.files(2).turn / "1"
    folder.mkdir(parents=True)
    write_manifest(
        folder,
        ChildManifest(
            "0123456789abcdef", "another boot", 1, "1", {"kind": "claude-code", "goes_on": "no", "said": digest("")}
        ),
    )
    (folder / "stdout").write_text(json.dumps({"type": "system", "subtype": "init", "session_id": "s"}) + "\n")
    write_answer(folder, "allow")
    if taken:
        (folder / ANSWER).unlink()
    session = home.path / ".claude" / "projects" / "here" / "s.jsonl"
    session.parent.mkdir(parents=True)
    result = {"type": "tool_result", "tool_use_id": "earlier", "content": "done"}
    session.write_text(json.dumps({"type": "user", "message": {"role": "user", "content": [result]}}) + "\n")
    left = home.claude(ask_for=("Bash",)).inspect(home.files(2))
    assert left is not None
    assert (left.state, left.session_id) == ("dead", "s" if taken else None)
