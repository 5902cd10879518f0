"""`Task(files=...)`: texts in the prompt, images and PDFs in the request, paths for agents, and the digests kept."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends import AnthropicBackend, LoadBalancedBackend, LocalBackend, OpenAIBackend
from plait.errors import DAGError
from plait.persistence import SQLiteStore
from plait.runner.domain.policy import Decision, RecordedRun
from plait.workflows import Policy
from tests.support.agents.homes import Home
from tests.support.growth import plan, spec, talker
from tests.support.wire import ChatCompletions, Messages, Script, events, serve

OPENAI, ANTHROPIC = ChatCompletions(), Messages()
PNG, PDF = b"\x89PNG\r\n\x1a\n.....", b"%PDF-1.7 ....."


def made(folder: Path) -> list[str]:
    (folder / "notes.md").write_text("\ufeffOne.\n")
    (folder / "chart.png").write_bytes(PNG)
    (folder / "Report.PDF").write_bytes(PDF)
    return [str(folder / name) for name in ("notes.md", "chart.png", "Report.PDF")]


def write(path: str, text: str) -> None:
    Path(path).write_text(text)


def openai(server: Script) -> OpenAIBackend:
    return OpenAIBackend("m", base_url=f"{server.url}/v1")


def anthropic(server: Script) -> AnthropicBackend:
    return AnthropicBackend("m", base_url=server.url)


def balanced(server: Script) -> LoadBalancedBackend:
    return LoadBalancedBackend([openai(server)])


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


PROMPT = '<file name="notes.md">\nOne.\n\n</file>\n\nSum up.'
PARTS: dict[Any, list[dict[str, Any]]] = {
    openai: [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(PNG)}"}},
        {
            "type": "file",
            "file": {"filename": "Report.PDF", "file_data": f"data:application/pdf;base64,{encoded(PDF)}"},
        },
    ],
    anthropic: [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(PNG)}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": encoded(PDF)},
            "title": "Report.PDF",
        },
    ],
}
PARTS[balanced] = PARTS[openai]
WIRES = [(openai, OPENAI), (anthropic, ANTHROPIC), (balanced, OPENAI)]


@pytest.mark.parametrize(("make", "wire"), WIRES)
async def test_texts_stand_before_the_prompt_and_the_rest_is_sent_as_the_api_takes_it(
    tmp_path: Path, make: Any, wire: Any
) -> None:
    async with serve(events(wire.parts("x"))) as server, SQLiteStore(tmp_path / "runs.db") as store:
        result = await ParallelRunner(make(server), store=store).run(DAG([Task("a", "Sum up.", files=made(tmp_path))]))
        said = await store.list_messages(result.run_id, "a")
    (message,) = server.bodies[0]["messages"]
    assert message == {"role": "user", "content": [*PARTS[make], {"type": "text", "text": PROMPT}]}
    assert [one.content for one in said] == [PROMPT, "x"]


@pytest.mark.parametrize(("make", "wire"), WIRES)
async def test_a_conversation_that_goes_on_still_has_its_images(tmp_path: Path, make: Any, wire: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    texts = ["no JSON", '{"n": 1}', "second", "third"]
    async with serve(*(events(wire.parts(text)) for text in texts)) as server, SQLiteStore(tmp_path / "r.db") as store:
        tasks = [
            Task("a", "One.", files=made(tmp_path), output_schema=schema),
            Task("b", "Two.", continues="a"),
        ]
        runner = ParallelRunner(make(server), store=store)
        result = await runner.run(DAG(tasks))
        await runner.runs.continue_task(result.run_id, "b", "Three.")
    sent = [body["messages"] for body in server.bodies]
    holders = [[len(one["content"]) - 1 for one in turns if isinstance(one["content"], list)] for turns in sent]
    assert holders == [[2]] * 4
    assert [next(i for i, one in enumerate(turns) if isinstance(one["content"], list)) for turns in sent] == [
        0,
        0,
        4,
        6,
    ]


async def test_a_function_gets_the_texts(tmp_path: Path) -> None:
    seen: list[str] = []

    async def read(prompt: str) -> str:
        seen.append(prompt)
        return "x"

    await ParallelRunner(read).run(DAG([Task("a", "Sum up.", files=made(tmp_path)[0])]))
    assert seen == [PROMPT]


async def test_an_agent_gets_the_paths_of_all_files(tmp_path: Path, home: Home) -> None:
    files = made(tmp_path)
    result = await ParallelRunner(home.claude()).run(DAG([Task("a", "Sum up.", files=files)]))
    assert result.status is RunStatus.COMPLETED
    assert home.prompts == ["Sum up.\n\nRead these files:\n" + "\n".join(f"- {path}" for path in files)]


async def test_a_file_that_has_changed_is_not_read_by_a_later_attempt(tmp_path: Path) -> None:
    calls: list[str] = []

    async def fails(prompt: str) -> str:
        calls.append(prompt)
        if len(calls) == 1:
            raise ValueError("no")
        return "x"

    path = made(tmp_path)[0]
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(fails, store=store)
        first = await runner.run(DAG([Task("a", "Sum up.", files=[path])]), "r")
        assert first.status is RunStatus.FAILED
        write(path, "Two.\n")
        changed = await runner.resume("r", retry_failed=True)
        assert changed["a"].error_kind == "invalid_request"
        assert changed["a"].error == (
            f"the file {path} has changed since the run was made; put it back, or start a new run"
        )
        write(path, "\ufeffOne.\n")
        assert (await runner.resume("r", retry_failed=True))["a"].text == "x"
        (record,) = await store.list_tasks("r")
        ((stored, digest),) = json.loads(record.spec)["files"]
        assert (stored, len(digest)) == (path, 64)
    assert calls == [PROMPT, PROMPT]


async def test_the_contents_are_part_of_the_key_of_an_answer(tmp_path: Path) -> None:
    calls: list[str] = []

    async def say(prompt: str) -> str:
        calls.append(prompt)
        return "x"

    path = Path(made(tmp_path)[0])
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(say, store=store)
        await runner.run(DAG([Task("a", "a", files=[str(path)])]), "first")
        again = await runner.run(DAG([Task("a", "a", files=[str(path)])]), like="first")
        assert len(calls) == 1
        said = await store.list_messages(again.run_id, "a")
        assert [one.content for one in said] == [PROMPT.replace("Sum up.", "a"), "x"]
        write(str(path), "Two.")
        await runner.run(DAG([Task("a", "a", files=[str(path)])]), like="first")
        assert len(calls) == 2
        await runner.run(DAG([Task("a", "a")]), like="first")
        assert len(calls) == 3


async def _say(_prompt: str) -> str:
    raise AssertionError("nothing may be called")


async def test_an_answer_is_taken_over_with_the_text_of_the_file_by_the_cache_and_by_a_fork(tmp_path: Path) -> None:
    async def say(_prompt: str) -> str:
        return "x"

    path = made(tmp_path)[0]
    dag = DAG([Task("a", "Sum up.", files=[path], cache=True), Task("b", "b", continues="a")])
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(say, store=store)
        await runner.run(dag, "first")
        await runner.run(dag, "cached")
        write(path, "Two.")
        async with runner.runs.start_fork(await runner.runs.fork("cached", "b")) as run:
            fork = await run.result()
        for run_id in ("cached", fork.run_id):
            assert (await store.list_messages(run_id, "a"))[0].content == PROMPT
            assert (await store.list_attempts(run_id))[0].backend.startswith("reused from")


@pytest.mark.parametrize("backend", [_say, LocalBackend()])
async def test_an_image_is_refused_before_the_run_where_the_backend_takes_texts_alone(
    tmp_path: Path, backend: Any
) -> None:
    dag = DAG([Task("a", "a", files=made(tmp_path))])
    with pytest.raises(DAGError) as caught:
        await ParallelRunner(backend).run(dag)
    assert [problem.message for problem in caught.value.problems] == [
        "backend 'default' takes text files only, not chart.png (image/png); leave the file out",
        "backend 'default' takes text files only, not Report.PDF (application/pdf); leave the file out",
    ]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("gone.md", None, "there is no file {}; check the path"),
        (
            "data.bin",
            b"\xff\xfe\x00",
            "the file {} is none of text in UTF-8, an image (.png, .jpg, .gif, .webp) or a PDF",
        ),
        ("zero.txt", b"a\x00b", "the file {} is none of text in UTF-8"),
        ("large.png", b"x" * (20 * 2**20 + 1), "the file {} has more than 20 MiB; make it smaller"),
    ],
)
async def test_a_file_that_cannot_be_used_is_refused_before_the_run(
    tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    async with SQLiteStore(tmp_path / "runs.db") as store:
        with pytest.raises(DAGError) as caught:
            await ParallelRunner(_say, store=store).run(DAG([Task("a", "a", files=[str(tmp_path / name)])]))
        assert message.format(tmp_path / name) in str(caught.value)
        assert not await store.list_runs()


@pytest.mark.parametrize("files", [[3], [""], ["a"] * 101])
def test_a_wrong_list_of_files_is_refused_by_the_graph(files: Any) -> None:
    with pytest.raises(DAGError, match="files"):
        DAG([Task("a", "a", files=files)])


async def test_a_task_that_a_model_adds_has_no_files() -> None:
    backend = talker({"plan": plan(spec("a", files=[os.devnull])), "These": plan(spec("a"))})
    result = await ParallelRunner(backend).run(DAG([Task("plan", "plan", adds_tasks=True)]))
    assert result.status is RunStatus.COMPLETED
    told = next(prompt for prompt in backend.prompts if prompt.startswith("These tasks cannot be added"))
    assert "an added task has no 'files' of its own; leave 'files' out" in told


class Adds:
    """A policy that adds a task with a file."""

    kind = "adds"

    def settings(self) -> dict[str, Any]:
        return {}

    def backends(self) -> tuple[None]:
        return (None,)

    def decide(self, run: RecordedRun) -> Decision:
        return Decision((Task("b", "b", files=[os.devnull]),)) if run.ended == "a" else Decision(())


async def test_a_policy_adds_no_files() -> None:
    async def say(_prompt: str) -> str:
        return "x"

    policy: Policy = Adds()
    result = await ParallelRunner(say).run(DAG([Task("a", "a")]), policy=policy)
    assert result.status is RunStatus.FAILED
    assert "a task added during the run has no files; leave `files` out" in (result.error or "")
