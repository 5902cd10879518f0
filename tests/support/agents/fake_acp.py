#!/usr/bin/env python3
"""Stands in for an agent that speaks ACP: the same messages, session rules and errors, no model.

Its sessions are files in $HOME/sessions. Words in the prompt say what it does: [[say TEXT]], [[until PATH]] (answers
when that file exists), [[error CODE TEXT]], [[stop REASON]], [[tool]] (uses one without asking), [[ask TITLE]] (asks
for permission first, with [[after PATH]] only when that exists), [[noise]] (says what is no message, or answers nothing
that was asked), [[huge BYTES]] (in one message), [[child]] (starts a process of its own that never ends), [[die]],
[[nothing]]. The words --hangs and --fails of its command do so with any prompt; --deaf heeds neither cancellation nor
the end of its input, --immortal no SIGTERM; --lacks=load,resume,fork: it cannot; --login: nothing without
`authenticate`; --name=NAME is what it calls itself, --version=N the protocol's; --slow=SECONDS before each answer but
the prompt's.

What the model would see goes to $HOME/calls.jsonl, one line a request; what comes in to $HOME/heard.jsonl.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

from fake_acp_session import OPTIONS, RefusalError, Session, note, tell

LACKS = OPTIONS.get("lacks", "").split(",")
PRICE = 0.001
MODELS = [{"modelId": name, "name": name.title()} for name in ("small", "large")]
MODES = [{"id": name, "name": name.title()} for name in ("careful", "bold")]
ALLOW = {"optionId": "a1", "name": "Allow", "kind": "allow_once"}
ALWAYS = {"optionId": "a2", "name": "Always allow", "kind": "allow_always"}
REJECT = {"optionId": "r1", "name": "Reject", "kind": "reject_once"}


class Agent:
    def __init__(self) -> None:
        self.session: Session | None = None
        self.is_in = "login" not in OPTIONS
        self.asked: dict[str, Queue[Any]] = {}

    def hear(self, message: dict[str, Any]) -> None:
        note("heard.jsonl", message)
        method, params = message.get("method"), message.get("params", {})
        if method is None:
            self.asked[message["id"]].put(message.get("result"))
        elif method == "session/cancel":
            if self.session is not None and "deaf" not in OPTIONS:
                self.session.cancelled.set()
        elif method == "session/prompt":
            threading.Thread(target=self.answer, args=(message["id"], self.prompt, params), daemon=True).start()
        else:
            self.answer(message["id"], self.serve, (method, params))

    def answer(self, identity: Any, serve: Any, given: Any) -> None:
        try:
            tell(id=identity, result=serve(given))
        except RefusalError as refusal:
            tell(id=identity, error=refusal.error)
        except BaseException:
            import traceback  # costs more than most turns

            traceback.print_exc()
            os._exit(3)

    def serve(self, given: Any) -> Any:
        method, params = given
        time.sleep(float(OPTIONS.get("slow", 0)))
        if method == "initialize":
            can = {name: {} for name in ("resume", "fork") if name not in LACKS}
            return {
                "protocolVersion": int(OPTIONS.get("version", 1)),
                "agentInfo": {"name": OPTIONS.get("name", "fake"), "title": "The fake agent", "version": "1"},
                "agentCapabilities": {"loadSession": "load" not in LACKS, "sessionCapabilities": can},
                "authMethods": [{"id": "key", "name": "A key"}],
            }
        if method == "authenticate":
            if params["methodId"] != "key":
                raise RefusalError(-32602, "no such way")
            self.is_in = True
            return {}
        if method in {"session/new", "session/fork", "session/load", "session/resume"}:
            return self.open(method, params)
        if method in {"session/set_model", "session/set_mode"}:
            return self.set(method, params)
        raise RefusalError(-32601, "Method not found")

    def open(self, method: str, params: dict[str, Any]) -> Any:
        if not self.is_in:
            raise RefusalError(-32000, "Authentication required")
        if method.rpartition("/")[2] in LACKS:
            raise RefusalError(-32601, "Method not found")
        assert params["mcpServers"] == []
        assert Path(params["cwd"]).is_dir()
        new = f"s-{os.urandom(6).hex()}"
        if method == "session/new":
            self.session = Session(new, [])
        elif method == "session/fork":
            self.session = Session(new, Session.load(params["sessionId"]).said)
        else:
            self.session = Session.load(params["sessionId"])
        self.session.save()
        if method == "session/load":
            self.session.replay()
        opened = {
            "models": {"availableModels": MODELS, "currentModelId": "small"},
            "modes": {"availableModes": MODES, "currentModeId": "careful"},
        }
        return opened | ({"sessionId": new} if method in {"session/new", "session/fork"} else {})

    def set(self, method: str, params: dict[str, Any]) -> Any:
        assert self.session is not None
        wanted = params.get("modelId") or params["modeId"]
        if wanted not in {"small", "large", "careful", "bold"}:
            raise RefusalError(-32602, "Invalid params")
        self.session.settings[method] = wanted
        return {}

    def prompt(self, params: dict[str, Any]) -> Any:
        session = self.session
        if session is None or session.identity != params["sessionId"]:
            raise RefusalError(-32602, "Session not found")
        prompt = params["prompt"][0]["text"]
        session.add("user", prompt)
        note("calls.jsonl", {"session": session.identity, "said": session.said, "pid": os.getpid(),
                             "settings": session.settings})  # fmt: skip
        words = prompt + ("[[until /dev/null/never]]" if "hangs" in OPTIONS else "")
        words += "[[error -32603 Internal error]]" if "fails" in OPTIONS else ""
        return Work(self, session, words).result()


class Work:
    """One prompt's."""

    def __init__(self, agent: Agent, session: Session, words: str) -> None:
        self.agent = agent
        self.session = session
        self.words = words

    def word(self, name: str) -> str | None:
        found = re.search(rf"\[\[{name}(?: (.*?))?\]\]", self.words)
        return (found[1] or "") if found else None

    def result(self) -> Any:
        if self.word("die") is not None:
            os.kill(os.getpid(), 9)
        if (error := self.word("error")) is not None:
            code, _, text = error.partition(" ")
            raise RefusalError(int(code), text)
        if self.word("noise") is not None:
            self.noise()
        if self.word("child") is not None:
            import subprocess

            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            note("children.jsonl", child.pid)
        if self.word("tool") is not None:
            self.tool("make test")
        asked = self.word("ask")
        if not self.wait("after"):
            return {"stopReason": "cancelled"}
        if asked is not None and not self.ask(asked):
            return {"stopReason": "cancelled"}
        if not self.wait("until"):
            return {"stopReason": "cancelled"}
        return self.end()

    def noise(self) -> None:
        for line in ("not JSON", "", "[]", '{"jsonrpc": "2.0"', '{"id": true}', "\x00\xff", "9" * 5000):
            print(line, flush=True)
        for identity in (1, 2, 99, "7", None):
            tell(id=identity, result={"stopReason": "refusal", "sessionId": "wrong"})
        tell(method="session/update", params={"sessionId": "another", "update": {
            "sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "not ours"}}})  # fmt: skip
        for params in (None, [], {"sessionId": self.session.identity, "update": 5}):
            tell(method="session/update", params=params)
        self.agent.asked["fs-1"] = refused = Queue()
        tell(id="fs-1", method="fs/read_text_file", params={"path": "/etc/passwd"})
        refused.get()

    def tool(self, title: str) -> None:
        call = f"call_{os.urandom(3).hex()}"
        self.session.update("tool_call", toolCallId=call, title=title, kind="execute", status="pending", rawInput={})
        self.session.update("tool_call_update", toolCallId=call, status="completed")
        self.session.add("tool", title)

    def ask(self, title: str) -> bool:
        call, identity = f"call_{os.urandom(3).hex()}", f"ask-{os.urandom(3).hex()}"
        self.session.chunk("agent", "I have to ask. ")
        raw = {"command": title, "description": f"worded anew: {call}"}
        tool = {"toolCallId": call, "title": title, "kind": "execute", "rawInput": raw}
        answers = self.agent.asked[identity] = Queue()
        params = {"sessionId": self.session.identity, "toolCall": tool, "options": [ALWAYS, ALLOW, REJECT]}
        tell(id=identity, method="session/request_permission", params=params)
        outcome = answers.get()["outcome"]
        note("outcomes.jsonl", outcome)
        if outcome["outcome"] == "cancelled":
            self.session.add("tool", f"{title}: cancelled")
            return "deaf" in OPTIONS
        if outcome["optionId"].startswith("a"):
            self.tool(title)
        return True

    def wait(self, name: str) -> bool:
        path = self.word(name)
        while path is not None and not Path(path).exists():
            if self.session.cancelled.wait(0.01):
                return False
        return not self.session.cancelled.is_set()

    def end(self) -> Any:
        session = self.session
        text = self.word("say") or f"answer {len(session.said)} to: {self.words.strip().splitlines()[-1]}"
        if "JSON Schema" in self.words and self.word("plain") is None:
            text = self.word("json") or json.dumps({"mood": "good"})
        if (size := self.word("huge")) is not None:
            text = "x" * int(size)
        if self.word("nothing") is None:
            message = f"m-{os.urandom(3).hex()}"
            for piece in (text[: len(text) // 2], text[len(text) // 2 :]):
                session.chunk("agent", piece, message)
        session.cost += PRICE
        session.add("assistant", text)
        session.update("usage_update", used=22, size=1000, cost={"amount": session.cost, "currency": "USD"})
        usage = {"inputTokens": 10, "outputTokens": 7, "cachedReadTokens": 5, "totalTokens": 22}
        return {"stopReason": self.word("stop") or "end_turn", "usage": usage}


def main() -> None:
    if "immortal" in OPTIONS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    agent = Agent()
    note("starts.jsonl", os.getpid())
    for line in sys.stdin:
        agent.hear(json.loads(line))
    while "deaf" in OPTIONS:
        time.sleep(1)


if __name__ == "__main__":
    main()
