"""Several samples of one task, and the vote between them. Pure.

A task `pick` with `repeat: 3` stands for ordinary tasks: the samples `pick.1` to `pick.3`, with a judge `pick.judge`,
and `pick` itself, which depends on them, calls no backend, and has the answer that wins.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue, to_json
from plait.runner.domain.run_result import TaskResult
from plait.statuses import TaskStatus
from plait.task import MAX_REPEAT, Best, Task

_ANSWERS = "\n\n{% for answer in answers %}{{ loop.index }}. {{ answer }}\n{% endfor %}"


def is_decided(task: Task) -> bool:
    """Return whether the samples of a task with a vote are tasks of their own already."""
    return task.vote is None or f"{task.id}.1" in task.depends_on


def with_samples(tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks, each with `repeat` behind its samples and its judge."""
    return [each for task in tasks for each in (_samples(task) if _may_repeat(task) else [task])]


def _may_repeat(task: Task) -> bool:
    """Return whether the samples of the task can be tasks of their own; what is wrong is reported with the graph."""
    is_number = isinstance(task.repeat, int) and 1 < task.repeat <= MAX_REPEAT  # pyright: ignore[reportUnnecessaryIsInstance]
    return is_number and task.for_each is None and not task.adds_tasks


def _samples(task: Task) -> list[Task]:
    # The number in the metadata keeps the answers of samples apart, which are asked for in the same words.
    samples = [
        replace(task, id=f"{task.id}.{number}", repeat=1, vote=None, metadata={**task.metadata, "sample": number})
        for number in range(1, task.repeat + 1)
    ]
    names, judges = [sample.id for sample in samples], list[Task]()
    if isinstance(task.vote, Best):
        numbers: Mapping[str, object] = {"type": "integer", "minimum": 1, "maximum": len(names)}
        judge = Task(
            f"{task.id}.judge",
            task.vote.prompt + _ANSWERS,
            depends_on=names,
            backend=task.vote.backend or task.backend,
            model=None if task.vote.backend else task.model,
            failure_mode=task.failure_mode,
            retry=task.retry,
            timeout=task.timeout,
            output_schema={
                "type": "object",
                "properties": {"best": numbers, "reason": {"type": "string"}},
                "required": ["best", "reason"],
                "additionalProperties": False,
            },
            item=task.item,
            aliases={**task.aliases, "answers": names},
        )
        judges.append(judge)
    decision = replace(
        task,
        depends_on=[*names, *(judge.id for judge in judges)],
        continues=None,
        when=None,
        check=None,
        cache=False,
        files=(),
        cwd=None,
        env={},
        shared=False,
        arguments=(),
        join="all",
        race=False,
        repeat=1,
        vote="best" if judges else task.vote or "all",
    )
    return [*samples, *judges, decision]


def decide_vote(task: Task, results: Mapping[str, TaskResult]) -> tuple[str, JsonValue, str]:
    """Return the text and the data of the answer of the vote, and how it was decided. `results` are those of the
    dependencies, by id. Raises BackendError if there is nothing to decide on.
    """
    samples = [results[name] for name in task.depends_on if name != f"{task.id}.judge"]
    if task.vote == "all":
        values = [sample.value if sample.status is TaskStatus.COMPLETED else "" for sample in samples]
        return to_json(values), values, f"vote: the answers of {len(samples)} samples"
    answered = [sample for sample in samples if sample.status is TaskStatus.COMPLETED]
    if not answered:
        raise BackendError(ErrorKind.UNEXPECTED, f"none of the {len(samples)} samples has an answer to vote on")
    if task.vote == "best":
        verdict = results[f"{task.id}.judge"].data
        number = verdict.get("best") if isinstance(verdict, dict) else None
        if not isinstance(number, int) or not 1 <= number <= len(samples) or samples[number - 1] not in answered:
            raise BackendError(
                ErrorKind.INVALID_OUTPUT, f"the judge chose {number!r}, which is no sample with an answer"
            )
        best = samples[number - 1]
        return best.text, best.data, f"vote: {best.id} is the best for {task.id}.judge"
    return _majority(answered)


def _majority(answered: Sequence[TaskResult]) -> tuple[str, JsonValue, str]:
    votes = Counter(map(_same, answered))
    most = max(votes.values())
    winner = next(sample for sample in answered if votes[_same(sample)] == most)
    how = f"vote: {most} of {len(answered)} answers are that of {winner.id}"
    if tied := sum(count == most for count in votes.values()) - 1:
        how += f"; {tied} other answer{'s' if tied > 1 else ''} had as many, and the first counts"
    return winner.text, winner.data, how


def _same(sample: TaskResult) -> str:
    """Return what two samples with the same answer have in common: data, or text without white space around it."""
    return sample.text.strip() if sample.data is None else json.dumps(sample.data, sort_keys=True)
