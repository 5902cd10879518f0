"""The agent of detached_backend.py: one turn, told on standard input, its outcome on standard output.

Arguments: its world's folder, the session, and whether it goes on. Words in the prompt say what it does:

    [[until NAME]]   works until that file is in the folder
    [[later NAME]]   the same, where the turn goes on
    [[hush NAME]]    says only then that it has the session; [[silent]]: never
    [[stray]]        leaves a process behind that has a session of its own
    [[error KIND]]   fails; [[kept KIND]]: once, in a session that goes on
    [[ask TEXT]]     asks, once

A turn that goes on does what the prompt said that its session holds; one that is told of its mistakes waits for the
file `mend`, also where it was cut and goes on. Each turn is a line of the file `turns`: the witness of what was said.
Who has said which session it has is a line of `told`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

FOLDER, SESSION, GOES_ON = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "yes"


def tell(**event: str) -> None:
    print(json.dumps(event), flush=True)


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.02)


prompt = sys.stdin.read()
line = {"pid": os.getpid(), "session": SESSION, "prompt": prompt, "goes_on": GOES_ON}
log = os.open(FOLDER / "turns", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(log, (json.dumps(line) + "\n").encode())
lines = (FOLDER / "turns").read_text().splitlines(keepends=True)
turns = [json.loads(one) for one in lines if one.endswith("\n")]  # another process may be writing the last one
held = next(one["prompt"] for one in reversed(turns) if one["session"] == SESSION and not one["goes_on"])
word = dict(re.findall(r"\[\[(\w+) ?([^\]]*)\]\]", held))

if "hush" in word:
    wait_for(word["hush"])
if "stray" in word:
    stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (FOLDER / "strays").open("a").write(f"{stray.pid}\n")
if "silent" not in word:
    tell(session=SESSION)
    (FOLDER / "told").open("a").write(f"{os.getpid()}\n")
if held.startswith("These tasks cannot be added"):
    wait_for("mend")
    tell(answer="[]")
    sys.exit()
if "until" in word and not GOES_ON:
    wait_for(word["until"])
if "later" in word and GOES_ON:
    wait_for(word["later"])
if "ask" in word and not GOES_ON:
    tell(question=word["ask"])
elif "kept" in word and not GOES_ON:
    tell(error=word["kept"], goes_on="yes")
elif "error" in word:
    tell(error=word["error"])
else:
    tell(answer=f"{'went on with' if GOES_ON else 're:'} {held.split(' [[')[0]}")
