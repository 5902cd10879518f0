"""Sessions of the fake agent that speaks ACP, and how it speaks; see fake_acp.py."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

HOME = Path(os.environ["HOME"])
OPTIONS = dict(part[2:].partition("=")[::2] for part in sys.argv[1:] if part.startswith("--"))
_lock = threading.Lock()


def note(name: str, line: Any) -> None:
    with (HOME / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


def tell(**message: Any) -> None:
    with _lock:
        print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


class RefusalError(Exception):
    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "data": data}


class Session:
    def __init__(self, identity: str, said: list[list[str]]) -> None:
        self.identity = identity
        self.said = said
        self.cost = 0.0
        self.settings: dict[str, str] = {}
        self.cancelled = threading.Event()

    @property
    def path(self) -> Path:
        return HOME / "sessions" / f"{self.identity}.json"

    def save(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps([self.said, self.cost]))
        new.replace(self.path)

    @classmethod
    def load(cls, identity: str) -> Session:
        try:
            said, cost = json.loads((HOME / "sessions" / f"{identity}.json").read_text())
        except FileNotFoundError:
            raise RefusalError(-32002, "Resource not found", f"Session not found: {identity}") from None
        session = cls(identity, said)
        session.cost = cost
        return session

    def update(self, what: str, **more: Any) -> None:
        params = {"sessionId": self.identity, "update": {"sessionUpdate": what, **more}}
        tell(method="session/update", params=params)

    def chunk(self, role: str, text: str, message: str = "") -> None:
        more = {"messageId": message} if message else {}
        self.update(f"{role}_message_chunk", content={"type": "text", "text": text}, **more)

    def add(self, role: str, text: str) -> None:
        self.said.append([role, text])
        self.save()

    def replay(self) -> None:
        for role, text in self.said:
            if role == "tool":
                self.update("tool_call", toolCallId="old", title=text, status="completed")
            else:
                self.chunk("agent" if role == "assistant" else role, text)
