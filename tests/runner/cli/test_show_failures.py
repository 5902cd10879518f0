"""`plait show` of a failed attempt: the text that arrived, and the traceback of a function."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio.to_thread

from tests.support.processes.command import Done, plait, plait_here
from tests.support.wire import ChatCompletions, events, serve

WIRE = ChatCompletions()
PLAN = """
backends:
  far: {{kind: openai, model: m, base_url: "{url}/v1", max_tokens: 7}}
tasks:
  - {{id: a, prompt: tell, output_schema: {{type: object}}}}
"""


FUNCTIONS = """
import asyncio


def broken(prompt):
    return look(prompt)


def look(prompt):
    return {}[prompt]


async def waiting(prompt):
    await asyncio.sleep(0)
    raise ConnectionError("down\\x1b[2J")
"""
HIDING = """
import os


def broken(prompt):
    try:
        raise ValueError(f"GET ?key={os.environ['MY_API_KEY']} failed")
    except ValueError as error:
        raise RuntimeError("the call failed") from error


def waiting(prompt):
    raise ConnectionError(os.environ["MY_API_KEY"])
"""
CALLS = """
backends:
  broken: {kind: function, call: "functions.py:broken"}
  waiting: {kind: function, call: "functions.py:waiting"}
tasks:
  - {id: a, prompt: one, backend: broken}
  - {id: b, prompt: two, backend: waiting, retry: {attempts: 2, base_delay: 0}}
"""


async def command(folder: Path, *words: str) -> Done:
    return await anyio.to_thread.run_sync(partial(plait, folder, *words))


async def test_a_truncated_answer_keeps_its_text_and_tokens(tmp_path: Path) -> None:
    misfit, cut = events(WIRE.parts("no object")), events(WIRE.parts('{"half": ', "an ans", reason="length"))
    async with serve(misfit, cut) as server:
        (tmp_path / "plan.yaml").write_text(PLAN.format(url=server.url))
        done = await command(tmp_path, "run", "plan.yaml")
        assert done.code == 1
        assert len(server.requests) == 2, "a truncated answer is not requested again"
        shown = (await command(tmp_path, "show", "last", "a")).out
    assert "truncated: the answer was cut after 7 tokens: the backend's `max_tokens: 7` is reached; raise it" in shown
    assert "\n-- user --\ntell\n\n-- assistant (attempt 1, failed) --\nno object\n" in shown
    assert '\n-- assistant (attempt 1, failed) --\n{"half": an ans\n' in shown
    assert "\ntokens    22+14\n" in shown


def test_the_traceback_of_a_function_is_stored_with_its_attempt(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "plan.yaml").write_text(CALLS)
    assert plait_here(tmp_path, "run", "plan.yaml").code == 1
    shown = plait_here(tmp_path, "show", "last", "a").out
    _, _, traceback = shown.partition("-- traceback (attempt 1) --\n")
    lines = traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.strip() for line in lines[1:-1] if "^" not in line] == [
        f'File "{tmp_path}/functions.py", line 6, in broken',
        "return look(prompt)",
        f'File "{tmp_path}/functions.py", line 10, in look',
        "return {}[prompt]",
    ]
    assert lines[-1] == "KeyError: 'one'"
    shown = plait_here(tmp_path, "show", "last", "b").out
    assert "-- traceback (attempt 1) --" in shown
    assert "-- traceback (attempt 2) --" in shown
    assert "\x1b" not in shown
    attempts = plait_here(tmp_path, "show", "last", "b", "--json").value["history"]
    assert ["in waiting" in attempt["traceback"] for attempt in attempts] == [True, True]


def test_no_secret_of_the_environment_reaches_the_store(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(HIDING)
    (tmp_path / "plan.yaml").write_text(CALLS)
    assert plait_here(tmp_path, "run", "plan.yaml", MY_API_KEY="sk-very-secret").code == 1
    shown = plait_here(tmp_path, "show", "last", "a").out
    assert "\nValueError: GET ?key=*** failed\n" in shown
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert any(b"GET ?key=*** failed" in content for content in files)
    assert not any(b"sk-very-secret" in content for content in files)
