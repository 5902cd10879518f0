"""The files of tasks in a run: digested before the run is stored, and read for each attempt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from anyio.to_thread import run_sync

from plait.backends.backend_protocol import Attachment
from plait.errors import BackendError, DAGError, ErrorKind, Problem
from plait.runner.domain.dag import DAG
from plait.runner.domain.task import Task
from plait.runner.domain.task_file import TEXT, TaskFile
from plait.runner.state.file_digests import find_file, read_file, text_of_file


@dataclass(frozen=True, slots=True)
class FileContents:
    """The contents of the files of an attempt."""

    texts: tuple[tuple[str, str], ...] = ()
    """The name and the text of each text file of the task."""
    attachments: tuple[Attachment, ...] = ()
    """The images and the PDFs of the task, and of the tasks whose conversation the task continues."""


NO_CONTENTS = FileContents()


def with_digests(dag: DAG) -> DAG:
    """Return `dag` with a digest for each file of its tasks. Raises DAGError for files that cannot be used."""
    if all(isinstance(file, TaskFile) for task in dag for file in task.files):
        return dag
    problems: list[Problem] = []
    tasks: list[Task] = []
    for place, task in enumerate(dag):
        found: list[TaskFile] = []
        for file in task.files:
            try:
                found.append(file if isinstance(file, TaskFile) else find_file(Path(file)))
            except ValueError as error:
                problems.append(Problem(str(error), task.id, "files", None, place))
        tasks.append(replace(task, files=tuple(found)))
    if problems:
        raise DAGError(problems)
    return DAG(tasks, name=dag.name, inputs=dag.inputs, growth=dag.growth)


def files_of(task: Task) -> list[TaskFile]:
    """Return the files of a task whose files have digests."""
    return [file for file in task.files if isinstance(file, TaskFile)]


def has_files(task: Task, dag: DAG) -> bool:
    """Return whether the task, or a task whose conversation it continues, has files."""
    return any(one.files for one in _conversation(task, dag))


async def read_contents(task: Task, dag: DAG) -> FileContents:
    """Return the contents of the files of an attempt of `task`. Raises BackendError of kind `invalid_request`."""
    own = [file for file in files_of(task) if file.media_type == TEXT]
    seen = {file: None for one in _conversation(task, dag) for file in files_of(one) if file.media_type != TEXT}
    try:
        return await run_sync(_read_all, own, list(seen))
    except ValueError as error:
        raise BackendError(ErrorKind.INVALID_REQUEST, str(error)) from None


def _read_all(texts: list[TaskFile], others: list[TaskFile]) -> FileContents:
    return FileContents(
        tuple((file.name, text_of_file(file.path, read_file(file))) for file in texts),
        tuple(Attachment(file.name, file.media_type, read_file(file)) for file in others),
    )


def _conversation(task: Task, dag: DAG) -> Iterator[Task]:
    """Yield the tasks of the conversation up to `task`, the last one first."""
    yield task
    while task.continues is not None:
        task = dag[task.continues]
        yield task
