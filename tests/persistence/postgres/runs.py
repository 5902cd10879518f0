"""A process that runs a DAG in PostgreSQL and counts its attempts in a file: `python -m ...runs DSN FILE [RUN]`.

Without RUN the process prints the id of a new run once tasks are done; with RUN it resumes the run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from plait import DAG, ParallelRunner, PostgresStore, RunResult, Task

TASKS = 60


def dag(tasks: int = TASKS) -> DAG:
    """Return a DAG in which every third task needs the task before."""
    return DAG([Task(id=f"t{n}", prompt=f"{n}", depends_on=[f"t{n - 1}"] if n % 3 else []) for n in range(tasks)])


class Counted:
    """A backend as a function: writes a line for each call, then answers."""

    def __init__(self, file: Path, delay: float) -> None:
        self._file, self._delay = file, delay

    async def __call__(self, prompt: str) -> str:
        await anyio.sleep(self._delay)
        with self._file.open("a") as file:
            file.write(f"{prompt}\n")
        return f"re: {prompt}"


async def main(dsn: str, file: Path, run_id: str | None) -> RunResult:
    async with PostgresStore(dsn) as store:
        runner = ParallelRunner(Counted(file, 0.03), store=store, concurrency=4)
        if run_id is not None:
            return await runner.resume(run_id)
        async with runner.start(dag()) as run:
            print(run.run_id, flush=True)
            return await run.result()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
