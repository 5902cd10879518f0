"""Commands as real processes: what they get, what becomes of their output and exit code, and that none is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait.backends import CommandBackend, ConversationRequest, Files, Output, Reply
from plait.backends.command_backend import MOST_STDOUT
from plait.backends.process import child_process
from plait.backends.process.child_manifest import ChildManifest, write_manifest
from plait.backends.process.files_and_locks import private_folder
from plait.backends.process.process_table import start_time
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.task import SUCCESS, command_text
from tests.support.polling import until


async def run(words: list[str], folder: Path, stdin: str = "", **options: Any) -> Reply:
    """Run the command with its files in `folder`; `options` are those of backend and request, and `codes`."""
    codes = options.pop("codes", SUCCESS)
    asked = {name: options.pop(name) for name in ("output_schema", "on_output") if name in options}
    request = ConversationRequest(files=Files(folder / "turn" / "1", folder / "sessions"), **asked)
    backend = CommandBackend(cwd=options.pop("cwd", folder), **options)
    async with backend.open(request) as conversation:
        return await conversation.send(command_text(words, stdin, codes))


async def failure(words: list[str], folder: Path, **options: Any) -> BackendError:
    with pytest.raises(BackendError) as caught:
        await run(words, folder, **options)
    return caught.value


async def test_each_word_arrives_as_it_is_and_the_prompt_is_the_input(tmp_path: Path) -> None:
    show = "import json, sys; print(json.dumps(sys.argv[1:])); sys.stderr.write(sys.stdin.read())"
    words = ["a b", "", "$(touch x)", "'\"", "* ;|&", "two\nlines", "ä", "--"]
    reply = await run([sys.executable, "-c", show, *words], tmp_path, "one\ntwo")
    assert isinstance(reply.data, dict)
    assert (reply.data["code"], reply.data["stderr"]) == (0, "one\ntwo")
    assert reply.text == reply.data["stdout"]
    assert json.loads(reply.text) == words
    assert not (tmp_path / "x").exists()


async def test_a_working_directory_that_was_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(BackendUnavailable, match="has been removed; name another folder for command as cwd"):
        await run(["true"], tmp_path, cwd="below")


async def test_a_command_without_output_completes(tmp_path: Path) -> None:
    assert (await run(["true"], tmp_path)).data == {"code": 0, "stdout": "", "stderr": ""}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo out; echo why >&2; exit 3", "sh ended with exit code 3: why"),
        ("echo only out; exit 1", "sh ended with exit code 1: only out"),
        ("exit 2", "sh ended with exit code 2"),
        ("kill -SEGV $$", "sh ended with exit code 139"),
    ],
)
async def test_another_exit_code_than_0_is_a_failure(tmp_path: Path, script: str, said: str) -> None:
    error = await failure(["sh", "-c", script], tmp_path)
    assert error.kind is ErrorKind.COMMAND_FAILED
    assert error.message.startswith(said)


async def test_a_failed_command_keeps_its_output(tmp_path: Path) -> None:
    error = await failure(["sh", "-c", "echo out; echo err >&2; exit 1"], tmp_path)
    assert [message.content for message in error.messages][1:] == ["out\nerr\n"]


@pytest.mark.parametrize("word", ["exit", "no-such-program", "./nothing", "eval"])
async def test_a_missing_program_is_said_and_a_word_of_the_shell_is_none(tmp_path: Path, word: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"there is no program '{word}' here"):
        await run([word, "3"], tmp_path)


async def test_a_program_is_found_from_the_folder_of_work(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "hi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\npwd\n")
    program.chmod(0o755)
    assert (await run(["bin/hi"], tmp_path)).text == f"{tmp_path}\n"


async def test_only_named_variables_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN", "1")
    monkeypatch.setenv("SHOWN", "2")
    assert (await run(["sh", "-c", 'echo "$HIDDEN $SHOWN"'], tmp_path, pass_env=["SHOWN"])).text == " 2\n"


async def test_of_a_large_output_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    reply = await run(["sh", "-c", f"echo begin; yes {'y' * 99} | head -c 3000000; echo end"], tmp_path)
    assert reply.text.startswith("begin\nyyy") and reply.text.endswith("yyy\nend\n")
    assert "\n[1,951,434 bytes of 3,000,010 left out]\n" in reply.text
    assert len(reply.text) < MOST_STDOUT + 100


async def test_json_in_standard_output_becomes_data(tmp_path: Path) -> None:
    schema = {"type": "object", "required": ["x"]}
    reply = await run(["echo", '{"x": [1]}'], tmp_path, output_schema=schema)
    assert isinstance(reply.data, dict)
    assert reply.data["data"] == {"x": [1]}
    error = await failure(["echo", "no"], tmp_path / "2", cwd=tmp_path, output_schema=schema)
    assert error.kind is ErrorKind.INVALID_OUTPUT


async def test_output_is_passed_on_line_by_line_while_the_command_runs(tmp_path: Path) -> None:
    seen: list[str] = []

    def on_output(output: Output) -> None:
        seen.append(output.text)
        if len(seen) == 2:  # both streams have been seen, and the command still waits
            (tmp_path / "go").touch()

    script = "echo out; echo err >&2; while [ ! -e go ]; do sleep 0.01; done; echo more"
    reply = await run(["sh", "-c", script], tmp_path, on_output=on_output)
    assert (sorted(seen[:2]), seen[2:]) == (["err\n", "out\n"], ["more\n"])
    assert reply.text == "out\nmore\n"


async def test_cancelling_ends_the_whole_tree(tmp_path: Path) -> None:
    script = "trap '' TERM; (trap '' TERM; sh -c 'echo $$ > inner.new; mv inner.new inner; exec sleep 60') & wait"
    async with anyio.create_task_group() as group:
        group.start_soon(run, ["sh", "-c", script], tmp_path)
        await until((tmp_path / "inner").exists)
        group.cancel_scope.cancel()
    assert start_time(int((tmp_path / "inner").read_text())) is None


async def test_what_a_command_leaves_running_is_ended(tmp_path: Path) -> None:
    script = "import os, subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    reply = await run([sys.executable, "-c", script], tmp_path)
    assert start_time(int(reply.text)) is None


async def test_a_cancelled_command_may_say_goodbye_and_has_no_exit_code(tmp_path: Path) -> None:
    script = "trap 'echo > goodbye; exit 0' TERM; echo > begun; while :; do sleep 0.01; done"
    async with anyio.create_task_group() as group:
        group.start_soon(run, ["sh", "-c", script], tmp_path)
        await until((tmp_path / "begun").exists)
        group.cancel_scope.cancel()
    assert (tmp_path / "goodbye").exists()
    turn = Files(tmp_path / "turn" / "1", tmp_path / "sessions")
    detached = CommandBackend().inspect(turn)
    assert detached is not None and detached.state == "dead"


@pytest.mark.parametrize("which", ["$$", "$PPID"], ids=["program", "shell"])
async def test_a_command_killed_from_outside_has_crashed(tmp_path: Path, which: str) -> None:
    def on_output(output: Output) -> None:
        if output.text[:-1].isdecimal():
            os.kill(int(output.text), signal.SIGKILL)

    error = await failure(["sh", "-c", f"echo {which}; exec sleep 60"], tmp_path, on_output=on_output)
    assert error.kind is ErrorKind.CRASHED
    said = {"$$": "sh ended with exit code 137, as if ended by SIGKILL from outside", "$PPID": "the command was ended"}
    assert error.message.startswith(said[which]) and "status" not in error.message


@pytest.mark.parametrize("code", [137, 143])
async def test_a_code_like_that_of_a_signal_completes_a_task_that_names_it(tmp_path: Path, code: int) -> None:
    words = ["sh", "-c", f"exit {code}"]
    for number, codes in enumerate(("any", (0, code))):
        reply = await run(words, tmp_path / str(number), cwd=tmp_path, codes=codes)
        assert isinstance(reply.data, dict) and reply.data["code"] == code
    error = await failure(words, tmp_path / "2", cwd=tmp_path, codes=(0, 1))
    assert (error.kind, error.message.rpartition("; ")[2]) == (
        ErrorKind.CRASHED,
        "a task takes that code if its `codes` name it",
    )


@pytest.mark.parametrize(("code", "state"), [("0", "ended"), ("1", "ended"), ("137", "dead"), ("143", "dead")])
async def test_of_a_dead_runner_s_command_the_code_of_a_kill_is_no_result(
    tmp_path: Path, code: str, state: str
) -> None:
    """The watchdog may have killed the program before the shell."""
    files = Files(tmp_path / "turn" / "1", tmp_path / "sessions")
    folder = files.turn / "1"
    private_folder(folder)
    write_manifest(folder, ChildManifest("f" * 16, "another boot", 1, "1", {"kind": "command"}))
    (folder / "code").write_text(code)
    detached = CommandBackend().inspect(files)
    assert detached is not None and detached.state == state


@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid")
async def test_a_command_may_signal_its_own_group(tmp_path: Path) -> None:
    script = "trap 'trap \"\" TERM; kill 0' EXIT; sleep 60 & echo done; exit {}"
    assert (await run(["sh", "-c", script.format(0)], tmp_path / "1", cwd=tmp_path)).text == "done\n"
    error = await failure(["sh", "-c", script.format(3)], tmp_path / "2", cwd=tmp_path)
    assert (error.kind, error.message) == (ErrorKind.COMMAND_FAILED, "sh ended with exit code 3: done")
    reply = await run(["sh", "-c", "trap 'kill 0' EXIT; exit 0"], tmp_path / "3", cwd=tmp_path, codes="any")
    assert isinstance(reply.data, dict) and reply.data["code"] == 143, "as in a shell of one's own"


async def test_too_much_output_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MOST_OUTPUT", 2**16)
    error = await failure(["sh", "-c", "yes | head -c 100000; exec sleep 60"], tmp_path)
    assert (error.kind, error.message) == (ErrorKind.INVALID_OUTPUT, "more than 0 GiB of output")


async def test_the_slots_of_checks_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[anyio.CapacityLimiter]()

    def make(tokens: float) -> anyio.CapacityLimiter:
        made.append(limiter(tokens))
        return made[-1]

    limiter = anyio.CapacityLimiter
    monkeypatch.setattr(anyio, "CapacityLimiter", make)
    backend = CommandBackend(checks=3)
    for _ in range(2):
        async with backend.check_slot():
            assert [one.borrowed_tokens for one in made] == [1]
    assert made[0].total_tokens == 3


async def test_a_server_runs_what_is_allowed_and_nothing_else(tmp_path: Path) -> None:
    allowed: dict[str, Any] = {"allows": [["echo", "yes"]], "only_allowed": True}
    assert (await run(["echo", "yes", "indeed"], tmp_path, **allowed)).text == "yes indeed\n"
    error = await failure(["echo", "no"], tmp_path / "2", cwd=tmp_path, **allowed)
    assert error.kind is ErrorKind.INVALID_REQUEST


async def test_without_files_a_command_runs_as_well() -> None:
    async with CommandBackend().open(ConversationRequest()) as conversation:
        assert (await conversation.send(command_text(["echo", "hi"], ""))).text == "hi\n"
