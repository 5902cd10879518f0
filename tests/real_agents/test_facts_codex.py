"""What the adapter of Codex relies on, asked of the command itself."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.real_agents.calls import answer, codex, codex_argv, completed, new_id, start_codex, thread
from tests.real_agents.install import known
from tests.real_agents.world import Turn, World, codex_config, marked, until, waiting_tool

pytestmark = pytest.mark.clis("codex")
NEVER = "[[until /nowhere/to/be/seen]]"


def total(turn: Turn) -> list[int]:
    counted = completed(turn)["usage"]
    return [counted["input_tokens"], counted["output_tokens"], counted["cached_input_tokens"]]


def failure(turn: Turn) -> str:
    (failed,) = turn.of("turn.failed")
    assert turn.status == 1 and turn.of("turn.completed") == []
    return str(failed["error"]["message"])


def killed_while(world: World, word: str, prompt: str, *words: str, requests: int = 1) -> Turn:
    running = start_codex(world, prompt, *words)
    world.stub.wait_for(word, requests)
    return running.kill()


def test_version(world: World):
    """`codex --version` says the version that was tested."""
    cli = known()["codex"]
    assert cli.version in world.run([str(cli.path(world.cache)), "--version"]).stdout


def test_a_turn(world: World):
    """The thread's id is the first line, before the model is asked; then agent_message items and turn.completed."""
    running = start_codex(world, f"XA {NEVER}")
    world.stub.wait_for("XA")
    assert running.kill().events[0]["type"] == "thread.started"
    turn = codex(world, "one [[say the answer]]")
    assert turn.events[0]["type"] == "thread.started" and turn.events[-1]["type"] == "turn.completed"
    assert (answer(turn), turn.status) == ("the answer", 0)
    assert total(turn) == [14, 7, 5]


def test_long_prompt(world: World):
    """300 kB of prompt come by standard input, every byte of them."""
    turn = codex(world, f"[[say got it]] {'long ' * 60_000}XEND")
    assert answer(turn) == "got it"
    assert world.asked("XEND")[-1].prompts[-1].endswith("long XEND")


def test_resume_and_counters(world: World):
    """resume shows each earlier turn once, under the same id; usage is the thread's so far, this turn included."""
    first = codex(world, "XR1")
    second = codex(world, "XR2", "resume", thread(first))
    assert (thread(second), total(first), total(second)) == (thread(first), [14, 7, 5], [30, 14, 10])
    assert [said for _, said in world.asked("XR1")[-1].said] == ["XR1", answer(first), "XR2"]


def test_resume_elsewhere(world: World):
    """resume finds the thread from another working folder."""
    first = codex(world, "XE1")
    elsewhere = world.root / "elsewhere"
    elsewhere.mkdir()
    assert completed(codex(world, "XE2", "resume", thread(first), folder=elsewhere))
    assert world.asked("XE1")[-1].prompts == ["XE1", "XE2"]


def test_unknown_thread(world: World):
    """resume of an unknown UUID: exit 1, no event, "no rollout found" on stderr."""
    turn = codex(world, "x", "resume", new_id())
    assert (turn.status, turn.events) == (1, []) and "no rollout found for thread id" in turn.stderr


def test_name_that_is_no_id(world: World):
    """resume of a word that is no UUID starts a new thread as if nothing were wrong."""
    turn = codex(world, "x", "resume", "no-such-name")
    assert completed(turn) and thread(turn) != "no-such-name"


def test_fork(world: World):
    """fork makes a thread of its own that starts at the parent's total; the parent and its total stay as they are."""
    parent = codex(world, "XF1")
    fork = codex(world, "XF2", "fork", thread(parent))
    assert thread(fork) != thread(parent)
    assert (total(parent), total(fork)) == ([14, 7, 5], [30, 14, 10])
    later = codex(world, "XF3", "resume", thread(parent))
    assert (total(later), world.asked("XF3")[-1].prompts) == ([30, 14, 10], ["XF1", "XF3"])
    assert total(codex(world, "XF4", "resume", thread(fork))) == [48, 21, 15]
    assert world.asked("XF4")[-1].prompts == ["XF1", "XF2", "XF4"]


def test_killed_turn(world: World):
    """After SIGKILL the model sees the killed prompt once, with no answer, then the new prompt."""
    killed = killed_while(world, "XK1", f"XK1 {NEVER}")
    codex(world, "XK2", "resume", thread(killed))
    assert world.asked("XK2")[-1].said == [("user", f"XK1 {NEVER}"), ("user", "XK2")]


def test_killed_turn_is_in_the_total(world: World):
    """What a killed turn's answered requests cost is in the thread's total of the next turn that completes."""
    killed = killed_while(world, "XV1", f"XV1 [[tool echo hi]] {NEVER}", requests=2)
    after = total(codex(world, "XV2", "resume", thread(killed)))
    counted = [one.usage["input"] for one in world.asked("XV1") if one.usage]
    assert len(counted) == 2 and after[0] == sum(counted)


def test_failed_turn_is_in_the_total(world: World):
    """A turn that fails says no usage; what its answered requests cost is in the total of the next turn."""
    failed = codex(world, "XW1 [[tool echo hi]] [[error 500]]")
    assert failure(failed)
    after = total(codex(world, "XW2", "resume", thread(failed)))
    assert after[0] == sum(one.usage["input"] for one in world.asked("XW1") if one.usage)


def test_one_writer(world: World):
    """A second process on a thread is refused: exit 1, "already has an active writer"."""
    first = thread(codex(world, "XO1"))
    running = start_codex(world, f"XO2 {NEVER}", "resume", first)
    world.stub.wait_for("XO2")
    second = codex(world, "XO3", "resume", first)
    running.kill()
    assert second.status == 1 and "already has an active writer" in second.stderr + second.stdout


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, '"message": "stub error 400"'),
        (401, "unexpected status 401 Unauthorized: stub error 401"),
        (429, "exceeded retry limit, last status: 429 Too Many Requests"),
        (500, "We’re currently experiencing high demand"),  # noqa: RUF001 - its very words
        (529, "unexpected status 529 <unknown status code>: stub error 529"),
    ],
)
def test_refused_by_the_model(world: World, status: int, text: str):
    """With no retries in the provider's table an error of the API is one request, turn.failed with known words."""
    turn = codex(world, f"XQ{status} [[error {status}]]")
    assert text in failure(turn)
    assert len(world.asked(f"XQ{status}")) == 1 and turn.seconds < 60


def test_no_connection(world: World):
    """Nobody at the address, with unbounded_connection_retries off: turn.failed at once."""
    (world.home / ".codex" / "config.toml").write_text(codex_config("http://127.0.0.1:9"))
    turn = codex(world, "x")
    assert "error sending request" in failure(turn) and turn.seconds < 60


def test_switches_on_the_command_line(world: World):
    """-c and --disable do what the config file does: the provider, no retries, no plugins, no analytics."""
    (world.home / ".codex" / "config.toml").unlink()
    table = f'{{name="stub",base_url="{world.stub.url}/v1",env_key="STUB_KEY",wire_api="responses",'
    retries = "request_max_retries=0,stream_max_retries=0}"
    switches = ["--disable", "plugins", "--disable", "unbounded_connection_retries", "-c", "analytics.enabled=false"]
    provider = ["-c", "model_provider=stub", "-c", f"model_providers.stub={table}{retries}", "-m", "stub-model"]
    assert "529" in failure(codex(world, "XS [[error 529]]", *switches, *provider))
    assert len(world.asked("XS")) == 1


def test_outlives_its_parent(world: World):
    """With its output in a file it goes on to the end when the process that started it is killed."""
    go, place = world.root / "go", world.root / "orphan"
    (world.root / "prompt").write_text(f"XP [[until {go}]] [[say still here]]")
    shell = f"{' '.join(codex_argv(world))} < {world.root}/prompt > {place} & wait"
    running = world.start(["sh", "-c", shell])
    world.stub.wait_for("XP")
    os.kill(running.process.pid, signal.SIGKILL)
    assert running.process.wait() == -signal.SIGKILL
    go.touch()
    until(lambda: "turn.completed" in place.read_text(), "turn.completed in the file")
    assert "still here" in place.read_text()


def test_marker(world: World):
    """A variable of its environment is in that of the shell tool's processes, also inside its sandbox."""
    for mode in ("danger-full-access", "workspace-write"):
        with waiting_tool(world) as (tool, here):
            running = start_codex(world, f"XM {tool}", "-s", mode, PLAIT_TURN=f"marker-{mode}")
            until(here.exists, f"the tool at work with {mode}")
            assert len(marked(f"PLAIT_TURN=marker-{mode}")) >= 2
            running.kill()
        until(lambda mode=mode: not marked(f"PLAIT_TURN=marker-{mode}"), "the end of the tool")
        here.unlink()
        (world.folder / "go").unlink()


def test_structured_answer(world: World):
    """--output-schema asks the model for that schema, strictly; its answer is not checked."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    (world.root / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    turn = codex(world, "XJ [[say no json]]", "--output-schema", str(world.root / "schema.json"))
    asked = world.asked("XJ")[-1].schema
    assert (asked["type"], asked["strict"], asked["schema"]["required"]) == ("json_schema", True, ["a"])
    assert answer(turn) == "no json"


def test_system_prompt(world: World):
    """model_instructions_file replaces the instructions, developer_instructions are added to them."""
    (world.root / "prompt").write_text("You are a lighthouse.")
    codex(world, "XI1", "-c", f'model_instructions_file="{world.root}/prompt"')
    codex(world, "XI2", "-c", 'developer_instructions="You are a lighthouse."')
    replaced, added = (world.asked(word)[-1].system for word in ("XI1", "XI2"))
    assert "You are a lighthouse." in replaced and "You are a lighthouse." in added
    assert len(added) > len(replaced) + 2000


def test_sandbox_is_not_remembered(world: World):
    """A resumed thread is read-only again; `-c sandbox_mode` on the resume makes it write."""
    wrote = world.folder / "wrote"
    first = codex(world, f"XB1 [[tool touch {wrote}]]", "-s", "workspace-write")
    assert wrote.exists()
    wrote.unlink()
    codex(world, f"XB2 [[tool touch {wrote}]]", "resume", thread(first))
    assert not wrote.exists()
    codex(world, f"XB3 [[tool touch {wrote}]]", "resume", "-c", 'sandbox_mode="workspace-write"', thread(first))
    assert wrote.exists()
