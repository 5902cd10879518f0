"""The rule by which a resume fails a task whose process dies each time the task runs. Pure.

A resume finds the tasks that were under way when the process died, not the cause. A machine may kill healthy processes,
even every second; a task may kill its process each time, by a fault in native code or by all of the memory. The rule
finds the second without harm to the first:

- The first SUSPECTED_AFTER deaths during a task prove nothing, because other tasks run at the same time. Nothing
  changes for the task meanwhile, so a wide run stays wide.
- From then on the task is a suspect. A suspect runs alone, after everything else that can run.
- A death counts against a suspect only if the suspect was the only task under way, and its process had lived for
  WATCH_S seconds before the suspect began. A machine that kills a process every few seconds does not let processes
  live that long. `Retry.max_crashes` such deaths fail the task.
- Only every second owner of the run waits for WATCH_S. The others start suspects at once, so that a task shorter than
  the time between two kills completes although the kills go on.

A task that kills its process each time therefore ends after at most SUSPECTED_AFTER + 2 * max_crashes deaths. Other
rules were dropped: a plain number of deaths alone fails a healthy task that takes as long as the time between two
kills (with kills after a random second and a task of two, 7 of 8 attempts die), and a number large enough for such
tasks lets a task that does kill its process be paid for dozens of times.
"""

from __future__ import annotations

SUSPECTED_AFTER = 3
"""The number of process deaths during a task after which the task is a suspect."""
WATCH_S = 15.0
"""The seconds for which a process lives before a death during a suspect counts."""


def is_suspect(crashes: int) -> bool:
    """Return whether a task with this number of crashes runs alone."""
    return crashes >= SUSPECTED_AFTER


def watches(epoch: int) -> bool:
    """Return whether the owner of the run with this epoch waits for WATCH_S before suspects start."""
    return epoch % 2 == 0


def counts(crashes: int, *, observed: bool) -> bool:
    """Return whether a death of the process counts for a task under way with `crashes` earlier deaths. `observed`: no
    other task was under way, and the process had waited for WATCH_S.
    """
    return observed or not is_suspect(crashes)


def exceeds_max_crashes(crashes: int, max_crashes: int) -> bool:
    """Return whether the task has to fail."""
    return crashes >= SUSPECTED_AFTER + max_crashes
