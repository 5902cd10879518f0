"""What is shown of a run that grows: tasks that come in while it goes on."""

from __future__ import annotations

from plait import DAG, Task, TaskStatus
from plait.events import NewTask, TaskCompleted, TasksAdded, TaskStarted
from plait.runner.cli.run_progress import Progress, event_line, grow
from plait.runner.state.codec import new_task

AT = "2026-11-21T23:00:00.000Z"


def test_added_tasks_are_counted_and_wait_for_what_they_depend_on() -> None:
    dag = DAG([Task("plan", "p")])
    progress = Progress(dag, lambda: 0.0)
    progress.handle(TaskCompleted(AT, "plan", 1, "x"))
    added = TasksAdded(AT, (NewTask("a", "p"), NewTask("b", "p", ("a",))))
    progress.handle(added)
    progress.handle(TaskStarted(AT, "a", 1, "default"))
    assert (progress.done, len(progress.dag), len(dag)) == (1, 3, 1)
    assert progress.counts[TaskStatus.PENDING] == 1
    assert list(progress.running) == ["a"]
    assert [(one, reason.tasks) for one, reason in progress.waiting_tasks(5, 0.0)] == [("b", ("a",))]
    assert event_line(added) == "2 tasks added: a, b"


def test_what_a_task_was_unfolded_into_is_waited_for() -> None:
    dag = DAG([Task("list", "p"), Task("each", "{{ item }}", for_each="list"), Task("end", "p", depends_on=["each"])])
    parts = tuple(Task(f"each.{i}", "{{ item }}", depends_on=["list"], item=i) for i in (1, 2))
    grow(dag, TasksAdded(AT, tuple(map(new_task, parts)), "each"))
    assert dag.dependencies[dag.position("each")] == (0, 3, 4)
    assert [task.id for task, after in zip(dag.tasks, dag.dependents, strict=True) if not after] == ["end"]
