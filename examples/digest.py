"""The function tasks of digest.yaml. Each takes its rendered prompt and returns its result."""

from __future__ import annotations

import json
import re
from typing import Any

ORDER = ("guide", "reference", "design", "report")
TITLES = {"guide": "Guides", "reference": "Reference", "design": "Design", "report": "Reports"}


def prose(prompt: str) -> str:
    """A document's title and paragraphs, without code, tables and lists: what a small model reads best."""
    document = json.loads(prompt)
    text = document["text"]
    text = re.sub(r"```.*?(```|\Z)", "", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = (block.strip() for block in re.split(r"\n\s*\n", text))
    paragraphs = [" ".join(re.sub(r"[`*]", "", block).split()) for block in blocks if re.match(r"[`*\"(]*\w", block)]
    chosen = [paragraph for paragraph in paragraphs if len(paragraph) > 40 and not re.match(r"\d+[.)] ", paragraph)]
    body = "\n".join(chosen) or " ".join(text.split()) or "An empty document."
    return f"{_title(document)}. {body}"


def rank(prompt: str) -> dict[str, Any]:
    """Put the documents in order: by kind, and within a kind by how much their summaries tell."""
    given = json.loads(prompt)
    columns = (given[name] for name in ("documents", "texts", "summaries", "kinds"))
    documents = [_document(*row) for row in zip(*columns, strict=True)]
    documents.sort(key=lambda document: (ORDER.index(document["kind"]), -document["score"], document["name"]))
    return {"documents": documents}


def merge(prompt: str) -> str:
    """The digest as Markdown."""
    given = json.loads(prompt)
    documents = given["documents"]
    lines = [f"# Digest of {len(documents)} documents", *(["", one] if (one := _tidy(given["headline"])) else [])]
    for kind in ORDER:
        entries = [_entry(document) for document in documents if document["kind"] == kind]
        if entries:
            lines += ["", f"## {TITLES[kind]}", "", *entries]
    return "\n".join(lines) + "\n"


def _document(document: dict[str, Any], text: str, summary: str, kind: dict[str, str]) -> dict[str, Any]:
    # A task that was skipped gives the empty text instead of its result.
    summary = _tidy(summary) or _shorten(text)
    return {
        "name": document["name"],
        "title": _title(document),
        "kind": kind["kind"],
        "summary": summary,
        "score": len(set(re.findall(r"\w{4,}", summary.lower()))),
    }


def _tidy(summary: str) -> str:
    """Its first telling sentence. Small models like quotes, echoes of the question, and to say the same again."""
    text = re.sub(r"^rewrite[^:]*:", "", " ".join(summary.split()).strip('"'), flags=re.IGNORECASE)
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    return next((one for one in sentences if len(one.split()) > 3 and not one.endswith(":")), "")


def _shorten(text: str) -> str:
    words = text[:160].rsplit(" ", 1)[0] if len(text) > 160 else text
    return f"(begins) {' '.join(words.split())} ..."


def _title(document: dict[str, Any]) -> str:
    """The first heading, or the file's name."""
    found = re.search(r"^#+\s+(.+)$", document["text"], re.MULTILINE)
    return found[1].strip() if found else document["name"]


def _entry(document: dict[str, Any]) -> str:
    return f"- **{document['title']}** (`{document['name']}`): {document['summary']}"
