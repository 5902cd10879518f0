"""The function tasks of feedback.yaml. Each function receives the rendered prompt and returns the task's result."""

from __future__ import annotations

import json

LONGEST = 48


def check(prompt: str) -> dict[str, str]:
    """Return the name and city of a guest. "?" replaces values missing in the review, because models invent values."""
    given = json.loads(prompt)
    return {field: text if text in given["review"] else "?" for field, text in given["guest"].items()}


def table(prompt: str) -> str:
    """Return a Markdown table with a row for each guest, unhappy guests first."""
    given = json.loads(prompt)
    rows = [
        (feeling["sentiment"], _cell(guest["name"]), _cell(guest["city"]), _cell(row["review"]))
        for row, guest, feeling in zip(given["reviews"], given["guests"], given["feelings"], strict=True)
    ]
    rows.sort(key=lambda row: row[0])
    unhappy = sum(row[0] == "negative" for row in rows)
    lines = _aligned([("feeling", "guest", "city", "review"), *rows])
    return "\n".join([f"{len(rows)} guests, {unhappy} of them unhappy", "", *lines]) + "\n"


def _cell(text: str) -> str:
    words = " ".join(text.replace("|", "/").split())
    return words if len(words) <= LONGEST else words[: LONGEST - 3].rstrip() + "..."


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    head, *others = [f"| {' | '.join(row)} |" for row in padded]
    return [head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *others]
