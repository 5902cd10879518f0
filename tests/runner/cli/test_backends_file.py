"""`plait resume --backends FILE`: a stored run goes on with another server, model or kind of backend."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio.to_thread
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.persistence import SQLiteStore
from tests.support.plans.logged import calls, make
from tests.support.processes.command import Done, plait, plait_here
from tests.support.wire import ChatCompletions, events, plain, serve

WIRE = ChatCompletions()
PLAN = """
backends:
  far: {{kind: openai, model: old, base_url: "{url}/v1", api_key_env: FAR_KEY}}
tasks:
  - {{id: a, prompt: one, retry: {{attempts: 1}}}}
  - {{id: b, prompt: "two {{{{ a }}}}", depends_on: a, retry: {{attempts: 1}}}}
"""
OTHER = 'backends: {{far: {{kind: openai, model: new, base_url: "{url}/v1"}}, more: {{kind: local}}}}\n'


async def command(folder: Path, *words: str, **extra: str) -> Done:
    return await anyio.to_thread.run_sync(partial(plait, folder, *words, **extra))


async def test_another_server_and_model_for_what_is_left(tmp_path: Path) -> None:
    answered = events(WIRE.parts("first"))
    gone = plain(401, {"error": {"message": "closed"}})
    async with serve(answered, gone) as old, serve(events(WIRE.parts("second"))) as new:
        (tmp_path / "plan.yaml").write_text(PLAN.format(url=old.url))
        (tmp_path / "other.yaml").write_text(OTHER.format(url=new.url))
        assert (await command(tmp_path, "run", "plan.yaml", FAR_KEY="k1", OPENAI_API_KEY="k2")).code == 1
        again = partial(command, tmp_path, "resume", "last", "--retry-failed", OPENAI_API_KEY="k2")
        dry = await again("--dry-run", "--backends", "other.yaml")
        assert (dry.code, "using far from other.yaml for this resume" in dry.err) == (0, True)
        done = await again("--backends", "other.yaml")
        assert (done.code, done.out) == (0, "second\n")
        assert "using far from other.yaml for this resume\n" in done.err
        assert [body["model"] for body in old.bodies] == ["old", "old"]
        assert [body["model"] for body in new.bodies] == ["new"]
        assert [one.headers["authorization"] for one in new.requests] == ["Bearer k2"]
        assert new.bodies[0]["messages"][-1]["content"] == "two first"
        said = await command(tmp_path, "continue", "last", "b", "more", "--backends", "other.yaml", OPENAI_API_KEY="k2")
        assert (said.code, said.out) == (0, "second\n")
        assert [one["content"] for one in new.bodies[1]["messages"]] == ["two first", "second", "more"]
        await command(tmp_path, "continue", "last", "b", "more", FAR_KEY="k1")
        assert len(old.bodies) == 3, "it was for that time alone"


def test_a_function_of_another_folder_in_place_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.format(url="http://127.0.0.1:9"))
    make(tmp_path / "there", "  - {id: x, prompt: x}\n", far="say")
    assert plait_here(tmp_path, "run", "plan.yaml", FAR_KEY="k").code == 1
    done = plait_here(tmp_path, "resume", "last", "--retry-failed", "--backends", "there/plan.yaml")
    assert (done.code, done.out) == (0, "re: two re: one\n")
    assert calls(tmp_path) == ["one", "two re: one"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "backends: {fra: {kind: local}, x: {kind: local}}",
            "other.yaml names fra, x under `backends:`, and run {run} has far: give a replacement the name",
        ),
        ("tasks: []", "other.yaml names no backends"),
        ("backends: {far: {kind: openai, modle: m}}", "other.yaml: backends.far"),
        (None, "other.yaml cannot be read (No such file or directory); check the path"),
    ],
)
@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_file_that_does_not_fit(tmp_path: Path, text: str | None, said: str, words: tuple[str, ...]) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.format(url="http://127.0.0.1:9"))
    assert plait_here(tmp_path, "run", "plan.yaml", FAR_KEY="k").code == 1
    run = plait_here(tmp_path, "runs", "--json").value[0]["run_id"]
    if text is not None:
        (tmp_path / "other.yaml").write_text(text)
    refused = plait_here(tmp_path, "resume", "last", "--retry-failed", *words, "--backends", "other.yaml", FAR_KEY="k")
    assert (refused.code, said.format(run=run) in refused.err) == (2, True), refused.err
    assert len(refused.err.splitlines()) < 12


async def made_by_a_program(folder: Path) -> None:
    """A failed run in the store of the command there: one task names its backend, the one behind it none."""

    async def far(prompt: str) -> str:
        raise RuntimeError("closed")

    (folder / ".plait").mkdir()
    async with SQLiteStore(folder / ".plait" / "plait.db") as store:
        runner = ParallelRunner(far, backends={"far": far}, store=store)
        dag = DAG([Task("a", prompt="one", backend="far"), Task("b", prompt="two {{ a }}", depends_on=["a"])])
        assert (await runner.run(dag, "r1")).status is RunStatus.FAILED


async def test_a_run_of_a_program_goes_on_by_the_command_with_backends_from_a_file(tmp_path: Path) -> None:
    await made_by_a_program(tmp_path)
    async with serve(events(WIRE.parts("first")), events(WIRE.parts("second"))) as new:
        server = f'{{kind: openai, model: new, base_url: "{new.url}/v1"}}'
        (tmp_path / "other.yaml").write_text(f"backends: {{far: {server}, default: {server}}}\n")
        again = partial(command, tmp_path, "resume", "r1", "--retry-failed", "--backends", "other.yaml")
        dry = await again("--dry-run")
        assert (dry.code, "a: " in dry.out) == (0, True), dry.err
        done = await again()
        assert (done.code, done.out) == (0, "second\n"), done.err
        assert [body["messages"][-1]["content"] for body in new.bodies] == ["one", "two first"]
        said = await command(tmp_path, "continue", "r1", "b", "more", "--backends", "other.yaml")
        assert (said.code, said.out) == (0, "second\n"), said.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "or name a plan file that names them by the same names: --backends FILE"),
        ("{default: {kind: local}}", "other.yaml names default under `backends:`, and run r1 needs 'far' as well"),
        (
            "{far: {kind: local}, x: {kind: local}}",
            "needs a backend for tasks that name none; name the default with `defaults:",
        ),
    ],
)
@pytest.mark.parametrize("words", [(), ("--dry-run",)])
async def test_a_file_that_is_not_enough_for_a_run_of_a_program(
    tmp_path: Path, text: str | None, said: str, words: tuple[str, ...]
) -> None:
    await made_by_a_program(tmp_path)
    (tmp_path / "other.yaml").write_text(f"backends: {text}")
    named = ("--backends", "other.yaml") if text is not None else ()
    refused = await command(tmp_path, "resume", "r1", "--retry-failed", *words, *named)
    assert (refused.code, said in refused.err) == (2, True), refused.err


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            "coder: {kind: codex, cwd: there, model: m}",
            "the values of cwd, model are not those of the plan file {plan}; ",
        ),
        ("other: {kind: codex}", "{plan} has no such backend; put it there, or name a file with --backends FILE"),
        (None, "the run has no plan file; put it there, or name a file with --backends FILE"),
    ],
)
def test_an_agent_that_is_not_as_in_the_plan_file_is_refused_with_what_differs(
    tmp_path: Path, now: str | None, said: str
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("backends: {coder: {kind: codex, cwd: .}}\ntasks: [{id: a, prompt: one}]\n")
    if now is None:
        submitted = plait(tmp_path, "run", "-", "--queue", stdin=plan)
        assert submitted.code == 0
        assert "workers take backend coder from a file only: start them with --backends FILE" in submitted.err
    else:
        submitted = plait_here(tmp_path, "run", "plan.yaml", "--queue")
        assert (submitted.code, submitted.err) == (0, "")
        plan.write_text(f"backends: {{{now}}}\ntasks: [{{id: a, prompt: one}}]\n")
    refused = plait_here(tmp_path, "resume", "last")
    assert (refused.code, said.format(plan=plan) in refused.err) == (2, True), refused.err
