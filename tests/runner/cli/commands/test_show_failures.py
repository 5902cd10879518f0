"""`plait show` of a failed attempt: the text that arrived, and the traceback of a function."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio.to_thread

from tests.support.processes.command import Done, plait
from tests.support.wire import ChatCompletions, events, serve

WIRE = ChatCompletions()
PLAN = """
backends:
  far: {{kind: openai, model: m, base_url: "{url}/v1", max_tokens: 7}}
tasks:
  - {{id: a, prompt: tell, output_schema: {{type: object}}}}
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
