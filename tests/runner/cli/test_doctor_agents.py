"""`plait doctor` on coding agents: executables that only print a version, a HOME and a PATH of their own."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import psutil
import pytest

from plait.backends import AcpBackend
from plait.backends.agents.agent_catalog import AGENTS, CatalogEntry, agent, look_for_agents
from plait.backends.agents.cli_agent import AgentBackend
from plait.backends.process.available_memory import available_memory
from plait.backends.process.child_process import child_environment
from plait.backends.process.process_table import start_time
from plait.runner.cli import check_commands
from tests.real_agents.install import known
from tests.support.agents.homes import make_home, until
from tests.support.processes.command import PLAIT, environment, plait_here
from tests.support.processes.warm import Warm

SECRET = "sk-very-secret-0123456789"


def put(folder: Path, program: str, script: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / program
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def examined(folder: Path, **variables: str) -> dict[str, Any]:
    """What `plait doctor --json` says in `folder`, with nothing but its own `bin` on PATH, and its own HOME."""
    known_keys = {name: "" for one in AGENTS for name in (*one.login.keys, *one.login.elsewhere, one.login.folder[0])}
    given = {**known_keys, "PATH": str(folder / "bin"), "HOME": str(folder), **variables}
    done = plait_here(folder, "doctor", "--json", **given)
    assert (done.code, done.err) == (0, "")
    assert SECRET not in done.out
    return done.value


def told(value: dict[str, Any], name: str) -> tuple[str, str, str]:
    [one] = [one for one in value["checks"] if one["check"] == name]
    return one["verdict"], one["found"], one["advice"]


def test_agents_that_are_not_there_are_told_with_the_way_to_get_them(tmp_path: Path) -> None:
    value = examined(tmp_path)
    for name in ("claude-code", "codex"):
        one = agent(name)
        assert one is not None
        assert told(value, name) == ("ok", "not installed", one.install)
    # Of the many that speak ACP only those that are there.
    assert not {"gemini", "goose", "opencode", "qwen"} & {one["check"] for one in value["checks"]}
    assert [(one["name"], one["path"], one["logged_in"]) for one in value["agents"]] == [
        (one.name, None, None) for one in AGENTS
    ]


@pytest.mark.parametrize(
    ("says", "verdict", "found", "advice"),
    [
        ("2.1.330 (Claude Code)", "ok", "2.1.330 (tested)", ""),
        ("2.1.197 (Claude Code)", "ok", "2.1.197 (tested)", ""),
        ("2.2.0 (Claude Code)", "ok", "2.2.0 (newer than tested: 2.1.197 and 2.1.330)", ""),
        ("2.1.200", "warning", "2.1.200 (tested: 2.1.197 and 2.1.330)", "npm install"),
        ("1.0.128", "warning", "1.0.128 (tested: 2.1.197 and 2.1.330)", "npm install"),
        ("I am 7", "warning", "reports no version", "`claude --version` has to work"),
        ("this needs node 22.1.0'; exit 1; echo '", "warning", "reports no version", "`claude --version`"),
    ],
)
def test_versions(tmp_path: Path, says: str, verdict: str, found: str, advice: str) -> None:
    put(tmp_path, "claude", f"echo '{says}'")
    value = examined(tmp_path, ANTHROPIC_API_KEY=SECRET)
    seen = told(value, "claude-code")
    assert seen[0] == verdict
    assert seen[1].startswith(f"{found}, {tmp_path}/bin/claude, key in ANTHROPIC_API_KEY, ")
    assert seen[2].startswith(advice) and bool(seen[2]) == bool(advice)


@pytest.mark.parametrize(
    ("name", "variables", "file", "found"),
    [
        ("claude", {}, ".claude/.credentials.json", "logged in"),
        ("claude", {"CLAUDE_CONFIG_DIR": "elsewhere"}, "elsewhere/.credentials.json", "logged in"),
        ("claude", {"CLAUDE_CONFIG_DIR": "elsewhere"}, ".claude/.credentials.json", "not logged in"),
        ("claude", {"ANTHROPIC_API_KEY": SECRET}, ".claude/.credentials.json", "key in ANTHROPIC_API_KEY"),
        (
            "claude",
            {"CLAUDE_CODE_USE_BEDROCK": "1"},
            "x",
            "login unknown (CLAUDE_CODE_USE_BEDROCK)",
        ),
        ("codex", {}, ".codex/auth.json", "logged in"),
        ("codex", {"CODEX_API_KEY": SECRET}, "x", "key in CODEX_API_KEY"),
        ("codex", {}, "x", "not logged in"),
        ("gemini", {}, ".gemini/oauth_creds.json", "logged in"),
        ("gemini", {"GEMINI_API_KEY": SECRET}, "x", "key in GEMINI_API_KEY"),
        ("goose", {}, "x", "login unknown"),
        ("opencode", {}, ".local/share/opencode/auth.json", "logged in"),
        ("qwen", {}, ".qwen/oauth_creds.json", "logged in"),
        ("codex-acp", {}, ".codex/auth.json", "logged in"),
    ],
)
def test_a_login_is_seen_and_never_read(
    tmp_path: Path, name: str, variables: dict[str, str], file: str, found: str
) -> None:
    put(tmp_path, name, "echo 1.2.3")
    (tmp_path / file).mkdir(parents=True)  # whoever would read it would get an error
    value = examined(
        tmp_path, **{key: text.replace("elsewhere", str(tmp_path / text)) for key, text in variables.items()}
    )
    called = "claude-code" if name == "claude" else name
    assert told(value, called)[1].split(", ")[2] == found
    [one] = [one for one in value["agents"] if one["name"] == called]
    assert one["logged_in"] is {"not logged": False, "login unkn": None}.get(found[:10], True)
    if found == "not logged in":
        assert one["logged_in_by"] is None
        assert told(value, called)[0] == "warning"
        assert "login`, or set " in told(value, called)[2]


def test_agents_are_asked_quietly_and_see_no_key(tmp_path: Path) -> None:
    put(tmp_path, "claude", f"export > {tmp_path}/seen; echo 2.1.330")
    examined(tmp_path, ANTHROPIC_API_KEY=SECRET, DATABASE_PASSWORD=SECRET)
    seen = (tmp_path / "seen").read_text()
    assert SECRET not in seen
    for name in ("DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"):
        assert f"{name}=" in seen
    assert f"TMPDIR='{tmp_path}" not in seen
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bin", "seen"]


async def test_one_that_does_not_answer_is_ended_and_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = "trap '' TERM\necho 2.1.330\nsetsid sleep 60 &\necho $$ $! > PIDS\nsleep 60"
    put(tmp_path, "claude", stubborn.replace("PIDS", str(tmp_path / "pids")))
    put(tmp_path, "codex", "echo codex-cli 0.169.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    found = {one.agent.name: one for one in await look_for_agents(1)}
    assert found["claude-code"].version is None
    assert found["codex"].version == "0.169.0"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(start_time(pid) for pid in pids)


def test_how_many_fit_into_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_commands, "available_memory", lambda: 20 * GIB)
    put(tmp_path, "codex", "echo codex-cli 0.169.0")
    value = examined(tmp_path, CODEX_API_KEY=SECRET)
    [one] = [one for one in value["agents"] if one["name"] == "codex"]
    assert one["fit_into_memory"] == 20 * GIB // (43 << 20)
    assert told(value, "codex")[1].endswith(f", {one['fit_into_memory']:,} at once fit into memory")
    assert told(value, "memory")[1].endswith(" free")


GIB = 1 << 30


def put_all(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "proc", folder / "cgroup"


@pytest.mark.parametrize(
    ("machine", "files", "free"),
    [
        (None, {}, None),
        (4 * GIB, {}, 4 * GIB),
        # The group around ours has 2 GiB, of which 1.5 are used, 0.25 of these by files that nobody uses.
        (
            4 * GIB,
            {
                "proc/self/cgroup": "1:name=systemd:/x\n0::/a/b\n",
                "cgroup/a/b/memory.max": "max\n",
                "cgroup/a/b/memory.current": "1\n",
                "cgroup/a/memory.max": f"{2 * GIB}\n",
                "cgroup/a/memory.current": f"{GIB * 3 // 2}\n",
                "cgroup/a/memory.stat": f"active_file 7\ninactive_file {GIB // 4}\n",
            },
            GIB * 3 // 4,
        ),
        # A container: its path is that of the host, its group is at the top.
        (
            4 * GIB,
            {
                "proc/self/cgroup": "4:memory:/docker/x\n",
                "cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
                "cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
            },
            0,
        ),
        (None, {"proc/self/cgroup": ""}, None),
    ],
)
def test_free_memory_is_what_machine_and_control_groups_leave(
    tmp_path: Path, machine: int | None, files: dict[str, str], free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def virtual_memory() -> SimpleNamespace:
        if machine is None:
            raise FileNotFoundError("/proc/meminfo")
        return SimpleNamespace(available=machine)

    monkeypatch.setattr(psutil, "virtual_memory", virtual_memory)
    assert available_memory(*put_all(tmp_path, files)) == free


PLAN = """
name: agents
backends: {coder: {kind: claude-code, command: ./claude}}
defaults: {backend: coder}
tasks:
  - {id: one, prompt: "One. [[until go]]"}
  - {id: two, prompt: "Two. [[until go]]"}
"""


def test_agents_whose_plait_was_killed_are_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path, monkeypatch)
    (tmp_path / "plan.yaml").write_text(PLAN)

    def children() -> list[tuple[str, str, str]]:
        done = plait_here(tmp_path, "doctor", "--json")
        found = [one for one in json.loads(done.out)["checks"] if one["check"] == "children"]
        return [(one["verdict"], one["found"], one["advice"]) for one in found]

    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=tmp_path, env=environment()) as running:
        try:
            anyio.run(until, lambda: len(home.calls) == 2)
            assert children() == [("ok", "none left behind", "")]
        finally:
            running.kill()
    pids = {call["said"][0][1][:3].lower(): call["pid"] for call in home.calls}
    [run] = plait_here(tmp_path, "runs", "--json").value
    shown = ", ".join(f"{task} (claude-code, process {pids[task]})" for task in ("one", "two"))
    found = f"2 agents of run {run['run_id']} still running after the end of the plait process: {shown}"
    assert children() == [("warning", found, f"plait resume {run['run_id']} takes over their work")]
    for path in (tmp_path / ".plait").glob("plait.db*"):
        if path.is_file():
            path.unlink()
    assert children() == [("warning", found, f"kill {pids['one']} {pids['two']}")]
    (tmp_path / "go").touch()
    anyio.run(until, lambda: not any(start_time(pid) for pid in pids.values()))
    assert children() == [("ok", "none left behind", "")]


def test_an_agent_has_the_variables_by_which_it_counts_as_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in AGENTS:
        backend = _backend_of(one)
        judged_by = {one.login.folder[0], *one.login.keys, *one.login.elsewhere}
        for name in judged_by:
            monkeypatch.setenv(name, "x")
        assert judged_by <= child_environment(backend.passes).keys(), one.name


def _backend_of(one: CatalogEntry) -> AgentBackend:
    if not one.backend:
        return AcpBackend(command=[one.program, *one.arguments])
    module, _, name = one.backend.partition(":")
    backend: AgentBackend = getattr(import_module(f"plait.backends.agents.{module}"), name)()
    return backend


def test_the_table_of_agents_is_true() -> None:
    assert len({one.name for one in AGENTS}) == len(AGENTS)
    for one in AGENTS:
        backend = _backend_of(one)
        assert (backend.called, backend.entry) == (one.program, one)
        if one.backend:
            assert backend.kind == one.name
    installed = {cli.command: cli.version for cli in known().values()}
    for one in AGENTS:
        assert installed[one.program] in one.tested
