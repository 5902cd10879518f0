"""The files of a task: values, and the rules for their kinds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

MAX_FILE_BYTES = 20 * 2**20
"""The maximum size of a file of a task."""
MAX_FILES = 100
"""The maximum number of files of a task."""
_MEDIA = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".pdf": "application/pdf",
}
TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A file of a task, as it was when the run was made."""

    path: str
    """The absolute path."""
    sha256: str
    """The digest of the contents, in hexadecimal."""

    @property
    def name(self) -> str:
        """The name without the folder."""
        return PurePath(self.path).name

    @property
    def media_type(self) -> str:
        """The type of an image or a PDF, by the suffix; TEXT for all other files."""
        return media_type(self.path)


def media_type(path: str) -> str:
    """Return the type of the image or the PDF at `path`, by the suffix; TEXT for all other files."""
    return _MEDIA.get(PurePath(path).suffix.lower(), TEXT)


def takes_no_such_file(backend: str, name: str, kind: str) -> str:
    """Return the message about an image or a PDF for a `backend` that takes text alone."""
    return f"backend {backend!r} takes text files only, not {name} ({kind}); leave the file out"


def with_texts(prompt: str, texts: Sequence[tuple[str, str]]) -> str:
    """Return `prompt` behind the `texts` of files: pairs of name and text."""
    return "".join(f'<file name="{name}">\n{text}\n</file>\n\n' for name, text in texts) + prompt


def with_paths(prompt: str, files: Sequence[TaskFile]) -> str:
    """Return `prompt` followed by the paths of `files`, for an agent that opens files itself."""
    lines = "\n".join(f"- {file.path}" for file in files)
    return f"{prompt}\n\nRead these files:\n{lines}"
