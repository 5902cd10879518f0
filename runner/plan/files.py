"""The files of a plan's tasks: paths and globs relative to the plan, with names of inputs."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path

from plait.errors import PromptError
from plait.json_form import JsonValue
from plait.runner.plan.plan_mistakes import in_folder
from plait.runner.prompts.prompt_template import names_used, render
from plait.runner.state.task_files import find_file
from plait.task import TaskFile


class PlanFiles:
    """Finds the files of the tasks of a plan in `folder`. Each file is read once."""

    def __init__(self, folder: Path, inputs: Mapping[str, JsonValue]) -> None:
        self._folder = folder
        self._inputs = inputs
        self._found: dict[Path, TaskFile] = {}

    def find(self, written: str, item: JsonValue) -> list[TaskFile]:
        """Return the files that `written` names for an element `item` of an input. Raises ValueError for a name that
        is no input, and for files that are missing or cannot be used.
        """
        pattern = self._rendered(written, item)
        named = self._folder / pattern
        matches = [named] if named.is_file() else [self._folder / one for one in self._glob(pattern)]
        paths = sorted(path for path in matches if path.is_file())
        if not paths:
            raise ValueError(f"no file matches {in_folder(pattern, self._folder)}; check the path")
        for path in paths:
            if path not in self._found:
                self._found[path] = find_file(path)
        return [self._found[path] for path in paths]

    def _glob(self, pattern: str) -> list[str]:
        if "\0" in pattern:
            raise ValueError("a file name cannot hold U+0000")
        return glob.glob(pattern, root_dir=self._folder, recursive=True)  # noqa: PTH207 - absolute globs too

    def _rendered(self, written: str, item: JsonValue) -> str:
        values = {**self._inputs, "inputs": dict(self._inputs), **({} if item is None else {"item": item})}
        try:
            if unknown := sorted(names_used(written).names - values.keys()):
                raise ValueError(
                    f"{{{{ {unknown[0]} }}}} is no input; files may name inputs, and with for_each over an input "
                    "{{ item }}; results of tasks are not known when the files are read"
                )
            return render(written, values)
        except PromptError as error:
            raise ValueError(str(error)) from None
