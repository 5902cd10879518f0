"""Review a document in two steps: python examples/review.py FILE

A failed review is repeated; the summary ends the session, successful or not. After a crash, the same command continues
the interrupted review. OPENAI_BASE_URL and OPENAI_API_KEY select the model's server.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import anyio

from plait import Backend, OpenAIBackend, ParallelRunner, RunResult, SQLiteStore, Step, Store, Workflow

FINDINGS = {
    "type": "object",
    "properties": {"findings": {"type": "array", "items": {"type": "string"}}},
    "required": ["findings"],
}
REVIEW = Workflow(
    [
        Step(
            "execute_review",
            "Review this document. Name at most five weak points, the worst first.\n\n{{ document | truncate(6000) }}",
            on_error="retry",
            output_schema=FINDINGS,
        ),
        Step(
            "finalize",
            "Sum up these findings for the author in three sentences:\n"
            "{% for finding in execute_review.findings %}- {{ finding }}\n{% endfor %}",
        ),
    ],
    name="review",
)


async def review(document: str, run_id: str, backend: Backend, store: Store) -> RunResult:
    """Review `document`, or continue the review stored as `run_id`. Return the result."""
    runner = ParallelRunner(backend, store=store)
    if await store.get_run(run_id) is not None:
        return await runner.resume(run_id)
    return await runner.run(REVIEW.dag({"document": document}), run_id, policy=REVIEW)


async def main(document: str, name: str) -> int:
    async with SQLiteStore("review.db") as store:
        result = await review(document, f"review-{name}", OpenAIBackend(), store)
    for task in result.tasks.values():
        print(f"{task.id}: {task.status.value}")
    print(result.error or result.text["finalize.1"])
    return 0 if result.error is None else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/review.py FILE")
    file = Path(sys.argv[1])
    text = file.read_text(encoding="utf-8")
    # A different path or an edited file starts a new review.
    digest = hashlib.sha256(f"{file.resolve()}\n{text}".encode()).hexdigest()[:12]
    sys.exit(anyio.run(main, text, digest))
