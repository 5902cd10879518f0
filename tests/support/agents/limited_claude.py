#!/usr/bin/env python3
"""Stands in for `claude -p --output-format=stream-json` on an account with limits, by a clock of its own.

$HOME/offset holds the seconds to add to the system clock. $HOME/account is what the provider knows: how many answers
are left before the account closes, and how it closes each time: [window, seconds announced, seconds that it stays
closed beyond]. $HOME/log has a line for each call: [time, "begun" | "refused" | "answered", task, deaths so far].
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
import uuid
from pathlib import Path

HOME = Path(os.environ["HOME"])
OPTIONS = {name: value for name, _, value in (part[2:].partition("=") for part in sys.argv[1:] if part[:2] == "--")}
NOW = time.time() + float((HOME / "offset").read_text())


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


def log(what: str, task: str) -> None:
    with (HOME / "log").open("a") as file:
        file.write(json.dumps([NOW, what, task, int((HOME / "deaths").read_text())]) + "\n")


def task_of(prompt: str, session: str) -> str:
    """The task, which the first prompt of a session names."""
    place = HOME / "sessions" / (OPTIONS.get("resume") or session)
    named = re.findall(r"do (t\d+)", prompt)
    task = named[-1] if named else place.read_text()
    (HOME / "sessions" / session).write_text(task)
    return task


def closed_until(task: str) -> tuple[str, float] | None:
    """Which window the account has used up, and when it says that it opens; None for a call that is answered."""
    with (HOME / "account").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        account = json.load(file)
        if account["closed"] is not None and account["closed"][2] <= NOW:
            account["closed"], account["left"] = None, account["next"]
        elif account["closed"] is None and not account["left"] and account["closings"]:
            window, announced, beyond = account["closings"].pop(0)
            account["closed"] = [window, NOW + announced, NOW + announced + beyond]
        elif account["closed"] is not None and account["closed"][1] <= NOW:
            account["closed"][1] = account["closed"][2]  # it has not ended, though its time has come
        shut = account["closed"]
        if shut is None and account["left"]:
            account["left"] -= 1
        log("begun" if shut is None else "refused", task)
        file.seek(0)
        file.truncate()
        json.dump(account, file)
    return None if shut is None else (shut[0], shut[1])


def main() -> None:
    session = OPTIONS.get("session-id") or OPTIONS.get("resume") or str(uuid.uuid4())
    task = task_of(sys.stdin.read(), session)
    told = {"type": "result", "session_id": session, "num_turns": 1, "total_cost_usd": 0.0}
    tell(type="system", subtype="init", session_id=session, claude_code_version="2.1.330")
    shut = closed_until(task)
    if shut is not None:
        info = {"status": "rejected", "resetsAt": int(shut[1]) + 1, "rateLimitType": shut[0], "isUsingOverage": False}
        tell(type="rate_limit_event", rate_limit_info=info, uuid=str(uuid.uuid4()), session_id=session)
        text = f"You've hit your {shut[0]} limit"
        kinds = {"api_error_status": 429, "api_error_type": "rate_limit_error", "api_error": "usage_limit_reached"}
        tell(**told, **kinds, subtype="success", is_error=True, result=text, terminal_reason="api_error")
    else:
        time.sleep(0.02)
        log("answered", task)  # first: with the message, the others may begin
        message = {"id": "msg_1", "role": "assistant", "content": [{"type": "text", "text": f"done {task}"}]}
        tell(type="assistant", message=message, session_id=session, uuid=str(uuid.uuid4()), parent_tool_use_id=None)
        tell(**told, subtype="success", is_error=False, result=f"done {task}", terminal_reason="completed")
    os.utime(sys.stdout.fileno(), (NOW, NOW)) if Path("/dev/stdout").resolve().is_file() else None
    sys.exit(shut is not None)


if __name__ == "__main__":
    main()
