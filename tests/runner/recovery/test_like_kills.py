"""A run with `like=` that is killed at any durable boundary, once or twice, goes on without a call too many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plait.failpoints import FAILPOINTS
from tests.support.sizes import size

pytestmark = pytest.mark.slow

_SCRIPT = """
import asyncio, json, os, random, shutil, signal, sys
from plait import DAG, MemoryStore, ParallelRunner, PersonBackend, SQLiteStore, Task
from plait import failpoints
from plait.events import TaskCompleted

class NoDelay(random.Random):
    def random(self):
        return 0.0

HERE = os.getcwd()
LIST = {"type": "array"}

def write(name, text):
    with open(name, "a") as file:
        file.write(json.dumps(text) + "\\n")

def read(name):
    return [json.loads(line) for line in open(name)] if os.path.exists(name) else []

async def say(prompt):
    write("calls", prompt)
    return ["x", "y"] if prompt.startswith("list") else f"<{prompt}>"

async def answer(question):
    write("calls", question.text)
    return "yes"

def dag(d):
    return DAG([
        Task("a", "a", files=[f"{HERE}/notes.txt"]),
        Task("b", "b {{ a }}", ["a"]),
        Task("l", "list", output_schema=LIST),
        Task("m", "m {{ item }}", ["l"], for_each="l"),
        Task("w", "w", ["b"], when="{{ b }} == 'no'"),
        Task("v", "v", ["b"], when="{{ b }} != 'no'"),
        Task("talk", "more", continues="a"),
        Task("sign", "Sign {{ b }}?", ["b"], "person"),
        Task("c", "c", cache=True),
        Task("d", d),
        Task("e", "e {{ d }} {{ m }} {{ v }} {{ talk }} {{ sign }}", ["d", "m", "v", "w", "talk", "sign", "c"]),
        Task("f", "f {{ e | length }}", ["e"]),
    ])

def runner(store):
    backends = {"say": say, "person": PersonBackend()}
    return ParallelRunner(
        backends=backends, default="say", store=store, on_question=answer, concurrency=2, rng=NoDelay()
    )

async def follow(run):
    async with run:
        async for event in run.events():
            if isinstance(event, TaskCompleted):
                write("acknowledged", [event.task_id, event.text])
    return await run.result()

async def go(step):
    async with SQLiteStore("plait.db") as store:
        if step == "first":
            await follow(runner(store).start(dag("d"), "first"))
        elif await store.get_run("second") is None:
            await follow(runner(store).start(dag("D"), "second", like="first", keep_answers=True))
        else:
            await follow(runner(store).start_resume("second"))

async def look():
    async with SQLiteStore("plait.db", mode="read") as store:
        run = await store.get_run("second")
        return {} if run is None else {one.task_id: one.text for one in await store.list_tasks("second")}, run

def forked(step, kill_at=0):
    '''Run the step in a child that is killed at the boundary, counted from 1 or of that name. Return the names of
    those reached.'''
    if os.path.exists("reached"):
        os.remove("reached")
    child = os.fork()
    if child == 0:
        left = [kill_at if isinstance(kill_at, int) else 0]
        def die(name):
            left[0] -= 1
            write("reached", name)
            if left[0] == 0 or name == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        failpoints.on_reach = die
        try:
            asyncio.run(go(step))
            os._exit(0)
        except BaseException as error:
            write("errors", repr(error))
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    return read("reached"), os.WIFSIGNALED(status), os.waitstatus_to_exitcode(status) > 0

def copy(folder):
    for name in os.listdir(HERE):
        if name.startswith("plait.db"):
            shutil.copy(f"{HERE}/{name}", folder)

def trial(number, kills):
    folder = f"{HERE}/{number}"
    os.mkdir(folder)
    copy(folder)
    os.chdir(folder)
    kills_made, names, failed = 0, [], False
    for kill_at in [*kills, 0]:
        reached, killed, wrong = forked("second", kill_at)
        kills_made += killed
        failed |= wrong
        names += reached[-1:] if killed else []
    stored, run = asyncio.run(look())
    calls = read("calls")
    wanted = ["D", "e <D> [\\"<m x>\\", \\"<m y>\\"] <v> <more> yes"]
    found = {
        "kills": kills_made,
        "names": names,
        "lost": [one for one in read("acknowledged") if stored[one[0]] != one[1]],
        "reused": [one for one in calls if one not in wanted],
        "extra": len(calls) - len(wanted),
        "wrong": failed or run.status != "completed",
        "errors": read("errors"),
    }
    os.chdir(HERE)
    shutil.rmtree(folder)
    return found

def main(step):
    with open("notes.txt", "w") as file:
        file.write("notes")
    forked("first")
    whole = trial("whole", [])
    os.mkdir("count"); copy("count"); os.chdir("count")
    names = forked("second")[0]
    os.chdir(HERE)
    boundaries = len(names)
    found = [whole]
    for number in range(1, boundaries + 1, step):
        found.append(trial(f"k{number}", [number, 1 + number * 7 % 17] if number % 3 == 0 else [number]))
    # The same number is another boundary where changes share other transactions, so each is met by its name, too.
    found += [trial(name, [name]) for name in dict.fromkeys(names)]
    # Some are met only by a process that takes the run over.
    os.mkdir("over"); copy("over"); os.chdir("over")
    forked("second", boundaries // 2)
    over = [name for name in dict.fromkeys(forked("second")[0]) if name not in names]
    os.chdir(HERE)
    found += [trial(f"over {name}", [boundaries // 2, name]) for name in over]
    print(json.dumps({"boundaries": boundaries, "trials": found}))

main(int(sys.argv[1]))
"""
_NOT_REACHED = {
    "file.before_link",  # the store is there
    "file.after_link",
    "schema.before_commit",
    "lease.before_renewal",  # the run is shorter than its lease
}


def test_a_run_killed_at_every_boundary_calls_no_reused_task(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(size(8, 1))],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        timeout=600,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wrong = [one for one in found["trials"] if one["wrong"] or one["lost"] or one["reused"]]
    assert wrong == []
    assert [one for one in found["trials"] if one["extra"] > one["kills"]] == []
    reached = {name for one in found["trials"] for name in one["names"]}
    assert reached == set(FAILPOINTS) - _NOT_REACHED
