"""The files of tasks on the disk: found and digested when a run is made, and read for an attempt.

The digest is part of the stored task. A file that has changed since is refused, so an attempt after a resume gets the
contents of the first attempt, and a stored run from elsewhere cannot make plait send the contents of other files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from anyio.to_thread import run_sync

from plait.backends.backend_protocol import Attachment
from plait.errors import BackendError, DAGError, ErrorKind, Problem
from plait.runner.domain.dag import DAG
from plait.task import MAX_FILE_BYTES, TEXT, Task, TaskFile, media_type


def find_file(path: Path) -> TaskFile:
    """Return the file at `path` with the digest of its contents. Raises ValueError for a file that cannot be used."""
    path = path.expanduser().absolute()
    data = _read(path)
    if media_type(str(path)) == TEXT:
        text_of_file(str(path), data)
    return TaskFile(str(path), hashlib.sha256(data).hexdigest())


def read_file(file: TaskFile) -> bytes:
    """Return the contents of `file`. Raises ValueError if they cannot be read, or are not those of the digest."""
    data = _read(Path(file.path))
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ValueError(f"the file {file.path} has changed since the run was made; put it back, or start a new run")
    return data


def text_of_file(path: str, data: bytes) -> str:
    """Return the contents `data` of the file at `path` as text. Raises ValueError for anything but text in UTF-8."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        kinds = "text in UTF-8, an image (.png, .jpg, .gif, .webp) or a PDF (.pdf)"
        raise ValueError(f"the file {path} is none of {kinds}; convert it")
    return text


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ValueError(f"there is no file {path}; check the path")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the file {path} cannot be read ({error.strerror}); check its permissions") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"the file {path} has more than {MAX_FILE_BYTES >> 20} MiB; make it smaller")
    return data


def with_digests(dag: DAG) -> DAG:
    """Return `dag` with a digest for each file of its tasks. Raises DAGError for files that cannot be used."""
    if all(isinstance(file, TaskFile) for task in dag for file in task.files):
        return dag
    problems: list[Problem] = []
    tasks: list[Task] = []
    for place, task in enumerate(dag):
        files: list[TaskFile] = []
        for file in task.files:
            try:
                files.append(file if isinstance(file, TaskFile) else find_file(Path(file)))
            except ValueError as error:
                problems.append(Problem(str(error), task.id, "files", None, place))
        tasks.append(replace(task, files=tuple(files)))
    if problems:
        raise DAGError(problems)
    return DAG(tasks, name=dag.name, inputs=dag.inputs, growth=dag.growth, rows_file=dag.rows_file)


def files_of(task: Task) -> list[TaskFile]:
    """Return the files of a task whose files have digests."""
    return [file for file in task.files if isinstance(file, TaskFile)]


def sends_files(task: Task, dag: DAG) -> bool:
    """Return whether the task, or a task whose conversation it continues, has files."""
    return any(each.files for each in conversation_of(task, dag))


async def read_contents(task: Task, dag: DAG) -> tuple[list[tuple[str, str]], tuple[Attachment, ...]]:
    """Return the contents of the files of an attempt of `task`: the name and the text of each of its text files; and
    the images and the PDFs, those of the tasks whose conversation it continues included. Raises BackendError of kind
    `invalid_request`.
    """
    own = [file for file in files_of(task) if file.media_type == TEXT]
    seen = {file: None for each in conversation_of(task, dag) for file in files_of(each) if file.media_type != TEXT}

    def read_all() -> tuple[list[tuple[str, str]], tuple[Attachment, ...]]:
        texts = [(file.name, text_of_file(file.path, read_file(file))) for file in own]
        return texts, tuple(Attachment(file.name, file.media_type, read_file(file)) for file in seen)

    try:
        return await run_sync(read_all)
    except ValueError as error:
        raise BackendError(ErrorKind.INVALID_REQUEST, str(error)) from None


def conversation_of(task: Task, dag: DAG) -> Iterator[Task]:
    """Yield the tasks of the conversation up to `task`, the last one first."""
    yield task
    while task.continues is not None:
        task = dag[task.continues]
        yield task


def with_texts(prompt: str, texts: Sequence[tuple[str, str]]) -> str:
    """Return `prompt` behind the `texts` of files: pairs of name and text."""
    return "".join(f'<file name="{name}">\n{text}\n</file>\n\n' for name, text in texts) + prompt


def with_paths(prompt: str, files: Sequence[TaskFile]) -> str:
    """Return `prompt` followed by the paths of `files`, for an agent that opens files itself."""
    lines = "\n".join(f"- {file.path}" for file in files)
    return f"{prompt}\n\nRead these files:\n{lines}"
