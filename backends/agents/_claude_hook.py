"""The program of the hook; see claude_code.py. Run by path, in a bare interpreter."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def decide(use: dict[str, Any], answer: Any) -> dict[str, Any]:
    """Return the decision on a tool use, given a person's `answer`."""
    if use.get("tool_name") == "AskUserQuestion":
        tool_input: dict[str, Any] = use["tool_input"]
        answers: Any = answer
        if isinstance(answer, str):
            answers = {one["question"]: answer for one in tool_input["questions"]}
        return {"permissionDecision": "allow", "updatedInput": {**tool_input, "answers": answers}}
    if answer == "allow":
        return {"permissionDecision": "allow"}
    reason = str(answer).partition(":")[2].strip() or "a person has said no"
    return {"permissionDecision": "deny", "permissionDecisionReason": reason}


def main() -> None:
    use = json.load(sys.stdin)
    decision: dict[str, Any] = {"permissionDecision": "defer"}
    own_file = f"{sys.argv[1]}.{os.getpid()}"
    try:
        os.rename(sys.argv[1], own_file)  # noqa: PTH104 - an answer is for one use; two hooks may look for it at once
    except FileNotFoundError:
        pass
    else:
        with open(own_file, encoding="utf-8") as file:  # noqa: PTH123
            decision = decide(use, json.load(file))
    json.dump({"hookSpecificOutput": {"hookEventName": "PreToolUse", **decision}}, sys.stdout)


if __name__ == "__main__":
    main()
