"""kill -9 of the runner while 20 agents work: `python -m tests.real_agents.campaign --rounds 10 [--agent codex]`.

Each round runs a plan of independent turns on real agents, whose model (the stub) answers when it is told to. When all
are with the model, `plait run` is killed, and in some rounds some of the agents too. Then `plait resume` runs. By the
stub's own log: every prompt was sent once, the earlier turns stand in each conversation once and in order; by the table
of processes: nothing is left; by plait's record: every task has its answer, and cost what the stub has counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.real_agents.install import known
from tests.real_agents.stub import Request, running
from tests.real_agents.world import World, make_world, until

ROOT = Path(__file__).parents[2]
KINDS = {"claude-code": {"model": "claude-sonnet-4-5"}, "codex": {"pass_env": ["STUB_KEY"]}}
MARK = b"PLAIT_TURN_"


@dataclass(frozen=True)
class Round:
    """What is done after the runner was killed: `agents` of them are killed as well, and the model answers `before` the
    resume, or only when the resume is at work.
    """

    agents: int = 0
    before: bool = False


ROUNDS = (Round(), Round(before=True), Round(agents=5), Round(agents=20), Round(agents=3, before=True))


@dataclass(frozen=True)
class Outcome:
    """One round's figures."""

    answered: int
    sent_twice: int
    out_of_order: int
    left: int
    resumed_s: float
    usage_differs: bool
    problems: tuple[str, ...] = ()


def one_round(world: World, kind: str, how: Round, turns: int, rng: random.Random) -> Outcome:
    """One round, with a fresh store and fresh sessions."""
    tag = f"R{rng.getrandbits(32):08x}"
    folder = world.root / tag
    folder.mkdir()
    go = folder / "go"
    _write_plan(folder / "plan.yaml", world, kind, [f"{tag}-{n}x [[until {go}]]" for n in range(turns)])
    _kill_at_work(world, folder, tag, turns)
    agents = _agents(world)
    killed = rng.sample(agents, min(how.agents, len(agents)))
    for pid in killed:
        os.killpg(pid, signal.SIGKILL)
    # Whose connection is still open is answered, and has cost that.
    until(lambda: sum(one.gone is True for one in world.asked(tag)) == len(killed), "the model has seen them go")
    if how.before:
        go.touch()
        until(lambda: not set(agents) & set(_marked(world)), "all agents have ended")
    began = time.monotonic()
    with (folder / "err").open("w") as err:
        resume = _plait(world, folder, "resume", "-j", str(turns), stderr=err)
    if not how.before:
        # Those that live are taken over, those that died go on: only then does the model answer.
        adopted, again = turns - len(killed), turns + len(killed)

        def at_work() -> bool:
            taken = (folder / "err").read_text().count("is taken over")
            return (taken >= adopted and len(world.asked(tag)) >= again) or resume.poll() is not None

        until(at_work, "all are at work again")
        go.touch()
    resume.communicate(timeout=300)
    shown = _plait(world, folder, "show", "last", "--json").communicate(timeout=60)[0]
    told = (folder / "err").read_text()
    return _judge(world, tag, turns, how, json.loads(shown or "{}"), told, time.monotonic() - began)


def _judge(world: World, tag: str, turns: int, how: Round, result: dict[str, Any], err: str, seconds: float) -> Outcome:
    tasks = {task["task_id"]: task for task in result.get("tasks", [])}
    answered = sum(task["status"] == "completed" and bool(task["text"]) for task in tasks.values())
    asked = world.asked(tag)
    twice = disordered = 0
    for n in range(turns):
        own = [request for request in asked if f"{tag}-{n}x" in "\n".join(request.prompts)]
        twice += sum(request.prompts[-1].startswith(f"{tag}-{n}x") for request in own) != 1
        disordered += any(sum(f"{tag}-{n}x" in prompt for prompt in request.prompts) != 1 for request in own)
    problems = tuple(task["error"] for task in tasks.values() if task.get("error")) or ((err,) if not tasks else ())
    return Outcome(
        answered,
        twice,
        disordered,
        len(_marked(world)),
        seconds,
        _differs(asked, tasks.values()),
        problems,
    )


def _differs(asked: Sequence[Request], tasks: Any) -> bool:
    counted = [request.usage for request in asked if request.usage is not None]
    # Anthropic's API counts what was read from the cache apart, OpenAI's as part of the input.
    apart = asked[0].path.startswith("/v1/messages")
    read = sum(usage["input"] + (usage["cached"] if apart else 0) for usage in counted)
    written = sum(usage["output"] for usage in counted)
    told = list(tasks)
    return (read, written) != (sum(one["input_tokens"] for one in told), sum(one["output_tokens"] for one in told))


def _write_plan(path: Path, world: World, kind: str, prompts: Sequence[str]) -> None:
    command = str(known()[kind].path(world.cache))
    path.write_text(
        yaml.safe_dump(
            {
                "backends": {"agent": {"kind": kind, "command": command, **KINDS[kind]}},
                "concurrency": len(prompts),
                "tasks": [{"id": f"t{n}", "prompt": prompt} for n, prompt in enumerate(prompts)],
            }
        )
    )


def _kill_at_work(world: World, folder: Path, tag: str, turns: int) -> None:
    run = _plait(world, folder, "run", "plan.yaml", "-j", str(turns))
    until(lambda: len(world.asked(tag)) >= turns or run.poll() is not None, "all turns are with the model")
    assert run.poll() is None, run.communicate()
    # An agent asks its model before its session is written down; killed in between, it would have to start over.
    time.sleep(1)
    run.kill()
    run.communicate()


def _plait(world: World, folder: Path, *words: str, stderr: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "plait", *words],
        cwd=folder,
        env=world.environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def _marked(world: World) -> list[int]:
    """All processes of this world that carry the mark of some turn."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if MARK in environment and f"HOME={world.home}".encode() in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def _agents(world: World) -> list[int]:
    """The leaders of the sessions of all turns."""
    found: list[int] = []
    for pid in _marked(world):
        with suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                found.append(pid)
    return found


def campaign(cache: Path, kind: str, rounds: int, turns: int, seed: int) -> list[Outcome]:
    """That many rounds, one after the other, each told on standard output."""
    rng = random.Random(seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as root, running(Path(root) / "log") as stub:
        world = make_world(Path(root) / "world", cache, stub)
        for number in range(rounds):
            how = ROUNDS[number % len(ROUNDS)]
            outcomes.append(one_round(world, kind, how, turns, rng))
            print(f"{kind} round {number} {how}: {outcomes[-1]}", flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--agent", choices=sorted(KINDS), action="append")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    cache = Path(os.environ["PLAIT_CLIS"])
    bad = 0
    for kind in given.agent or sorted(KINDS):
        outcomes = campaign(cache, kind, given.rounds, given.turns, given.seed)
        bad += sum(
            one.answered != given.turns or one.sent_twice + one.out_of_order + one.left > 0 or one.usage_differs
            for one in outcomes
        )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
