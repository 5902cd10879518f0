#!/usr/bin/env python3
"""Stands in for `claude -p --output-format=stream-json`: the same arguments, events and session rules, no model.

Its sessions are files in $HOME/sessions. Words in the prompt say what it does: [[say TEXT]], [[until PATH]] (answers
when that file exists), [[error STATUS]], [[limit SECONDS]] (a usage limit up to that Unix time), [[tool]] (uses a tool
first), [[later TEXT]] (a command in the background ends before the first result, so that a second one with this text
follows), [[json VALUE]], [[plain]] (a schema is not heeded), [[die]], [[ask]] (defers a tool until it is answered),
[[deaf]] (does not heed SIGINT), [[immortal]] (does not heed SIGTERM either, but notes it); the models "hangs" and
"fails" do so with any prompt. No answer comes as long as there is a file $HOME/hold. --max-budget-usd is heeded.
What the model would see goes to $HOME/calls.jsonl, one line a request: the witness of what was sent, how often, in
which order. As soon as it has printed that the answer begins, begun.jsonl has a line too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

HOME = Path(os.environ["HOME"])
OPTIONS = dict(part[2:].partition("=")[::2] for part in sys.argv[1:] if part.startswith("--"))
IN, OUT, PRICE = 10, 7, 0.001


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


def note(name: str, line: object) -> None:
    with (HOME / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def new_id() -> str:
    """As of `uuid.uuid4`, whose module takes longer to load than most turns."""
    digits = os.urandom(16).hex()
    return "-".join(digits[begin:end] for begin, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def path_of(session: str) -> Path:
    return HOME / "sessions" / f"{session}.jsonl"


def load(session: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in path_of(session).read_text().splitlines()]


def refuse(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(1)


def check_schema() -> None:
    """It knows the words of draft 7 alone; here, none of those that stand in tests."""
    schema = OPTIONS.get("json-schema", "")
    for key in ("$schema", "prefixItems", "discriminator"):
        if f'"{key}"' in schema:
            refuse(f'Error: --json-schema is not a valid JSON Schema: strict mode: unknown keyword: "{key}"')


def begin() -> tuple[str, list[dict[str, str]]]:
    """The session of this call, and what was said in it."""
    (HOME / "sessions").mkdir(exist_ok=True)
    old, new = OPTIONS.get("resume"), OPTIONS.get("session-id")
    if new and path_of(new).exists():
        refuse(f"Error: Session ID {new} is already in use.")
    if not old:
        return new or new_id(), []
    if not path_of(old).exists():
        refuse(f"No conversation found with session ID: {old}")
    said = load(old)
    if at := OPTIONS.get("resume-session-at"):
        if at not in (ids := [one["uuid"] for one in said]):
            refuse(f"No message found with message.uuid of: {at}")
        said = said[: 1 + ids.index(at)]
    return (new or new_id()) if "fork-session" in OPTIONS else old, said


class Talk:
    def __init__(self, session: str, said: list[dict[str, str]]) -> None:
        self.session = session
        self.said = said
        self.calls = 0
        self.billed = 0

    def add(self, role: str, content: str) -> str:
        self.said.append({"role": role, "content": content, "uuid": new_id()})
        path_of(self.session).write_text("".join(json.dumps(one) + "\n" for one in self.said))
        return self.said[-1]["uuid"]

    def ask_model(self) -> None:
        """The model is asked: here it would cost something."""
        self.calls += 1
        line = {
            "session": self.session,
            "said": [[one["role"], one["content"]] for one in self.said],
            "pid": os.getpid(),
            "budget": OPTIONS.get("max-budget-usd"),
            "cwd": str(Path.cwd()),
            "colour": os.environ.get("COLOUR"),
        }
        note("calls", line)
        usage = {"input_tokens": IN, "output_tokens": 1}
        message = {"type": "message_start", "message": {"id": f"msg_{self.calls}", "usage": usage}}
        tell(type="stream_event", session_id=self.session, event=message, parent_tool_use_id=None)
        note("begun", message)

    def say(self, *blocks: dict[str, object]) -> None:
        shown = "".join(str(block.get("text", f"<tool {block.get('name')}>")) for block in blocks)
        message = {"id": f"msg_{self.calls}", "role": "assistant", "content": blocks}
        uid = self.add("assistant", shown)
        for block in blocks:
            if "text" in block:
                delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": block["text"]}}
                tell(type="stream_event", session_id=self.session, event=delta, parent_tool_use_id=None)
        done = {"type": "message_delta", "usage": {"input_tokens": IN, "output_tokens": OUT}}
        tell(type="stream_event", session_id=self.session, event=done, parent_tool_use_id=None)
        tell(type="assistant", message=message, session_id=self.session, uuid=uid, parent_tool_use_id=None)
        if PRICE * self.calls >= float(OPTIONS.get("max-budget-usd", "inf")):
            errors = ["Reached maximum budget"]
            self.result(subtype="error_max_budget_usd", is_error=True, result=None, errors=errors)
            sys.exit(1)

    def result(self, **more: object) -> None:
        new = self.calls - self.billed
        used = {"inputTokens": IN * new, "outputTokens": OUT * new, "costUSD": PRICE * new}
        self.billed = self.calls
        told = {"subtype": "success", "is_error": False, "result": "", "terminal_reason": "completed", "num_turns": 1}
        usage = {"input_tokens": IN * self.calls, "output_tokens": OUT * self.calls}
        tell(
            type="result",
            session_id=self.session,
            usage=usage,
            model_usage_since_last_result={"fake": used},
            total_cost_usd=PRICE * self.calls,
            **{**told, **more},
        )


def word(prompt: str, name: str) -> str | None:
    found = re.search(rf"\[\[{name}(?: (.*?))?\]\]", prompt)
    return (found[1] or "") if found else None


def use_tool(talk: Talk) -> None:
    talk.ask_model()
    use = {"type": "tool_use", "id": f"toolu_{talk.calls}", "name": "Bash", "input": {"command": "make test"}}
    talk.say(use)
    uid = talk.add("user", "<result done>")
    content = [{"type": "tool_result", "tool_use_id": use["id"], "content": "done"}]
    tell(type="user", message={"content": content}, session_id=talk.session, uuid=uid, parent_tool_use_id=None)


def ask_person(talk: Talk, use: dict[str, object]) -> dict[str, object]:
    """What the hook says about the use of a tool."""
    hook = json.loads(OPTIONS["settings"])["hooks"]["PreToolUse"][0]["hooks"][0]["command"]
    given = {"tool_name": use["name"], "tool_input": use["input"], "tool_use_id": use["id"]}
    import subprocess

    out = subprocess.run(hook, shell=True, input=json.dumps(given), capture_output=True, text=True, check=True).stdout
    return json.loads(out)["hookSpecificOutput"]


def main() -> None:
    check_schema()
    session, said = begin()
    prompt = sys.stdin.read()
    talk = Talk(session, said)
    tell(type="system", subtype="init", session_id=session, claude_code_version="2.1.330")
    use = {"id": "toolu_ask", "name": "Bash", "input": {"command": "rm -r build"}}
    if prompt:
        talk.add("user", prompt)
    else:
        decided = ask_person(talk, use)
        talk.add("user", f"<result {decided['permissionDecision']} {decided.get('permissionDecisionReason', '')}>")
    last = (prompt or "[[say went on]]") + {"hangs": "[[until /dev/null/never]]", "fails": "[[error 500]]"}.get(
        OPTIONS.get("model", ""), ""
    )
    if word(last, "die") is not None:
        os.kill(os.getpid(), 9)
    # Set in any case: a shell's background jobs begin with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN if word(last, "deaf") is not None else signal.default_int_handler)
    if word(last, "immortal") is not None:
        signal.signal(signal.SIGTERM, lambda *_: note("terminated", os.getpid()))
    try:
        answer(talk, last, use)
    except KeyboardInterrupt:
        talk.add("user", "[Request interrupted by user]")
        talk.result(subtype="error_during_execution", is_error=True, terminal_reason="aborted_streaming")


def answer(talk: Talk, last: str, use: dict[str, object]) -> None:
    """The rest of the turn, from the first request to the model."""
    if (status := word(last, "error")) is not None:
        text = f"API Error: {status} no"
        talk.result(is_error=True, api_error_status=int(status), result=text, terminal_reason="api_error")
        sys.exit(1)
    if float(word(last, "limit") or 0) > time.time():
        text = f"Claude AI usage limit reached|{word(last, 'limit')}"
        talk.result(is_error=True, api_error_status=429, result=text, terminal_reason="api_error")
        sys.exit(1)
    if word(last, "tool") is not None:
        use_tool(talk)
    talk.ask_model()
    if word(last, "ask") is not None and ask_person(talk, use)["permissionDecision"] == "defer":
        talk.say({"type": "tool_use", **use})
        talk.result(deferred_tool_use=use, terminal_reason="tool_deferred")
        return
    if (path := word(last, "until")) is not None:
        while not Path(path).exists():
            time.sleep(0.01)
    while (HOME / "hold").exists():
        time.sleep(0.01)
    told = word(last, "json") if "json-schema" in OPTIONS else None
    words = word(last, "say") or told or f"answer {len(talk.said)} to: {last.splitlines()[-1]}"
    if "json-schema" in OPTIONS and told is None and word(last, "plain") is None:
        told = words = json.dumps({"mood": "good"})
    talk.say({"type": "text", "text": words})
    talk.result(result=words, **({"structured_output": json.loads(told)} if told else {}))
    if (later := word(last, "later")) is not None:
        tell(type="system", subtype="init", session_id=talk.session, claude_code_version="2.1.330")
        talk.ask_model()
        talk.say({"type": "text", "text": later})
        talk.result(result=later)


if __name__ == "__main__":
    main()
