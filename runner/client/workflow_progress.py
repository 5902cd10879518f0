"""The stored progress of a workflow, readable from any process."""

from __future__ import annotations

from plait.errors import RunNotFound
from plait.persistence.store_protocol import Store
from plait.runner.domain.policy import RunView
from plait.runner.policies.step_workflow import WorkflowProgress, progress_of
from plait.runner.state.codec import decode_dag
from plait.runner.state.run_state import RunState
from plait.statuses import RunStatus


async def load_progress(store: Store, run_id: str) -> WorkflowProgress:
    """Return the progress of a workflow's run: its interactions up to now, including running ones, and its status.

    Reads without a claim, so a live process may continue the run at the same time. Raises RunNotFound, StoreError.
    """
    run = await store.get_run(run_id)
    if run is None:
        raise RunNotFound(f"the store has no run {run_id!r}; list_runs() gives the ids that it has")
    tasks = await store.list_tasks(run_id)
    dag = decode_dag(run, tasks)
    results = RunState(dag, tasks).all_results()
    return progress_of(RunView(dag.tasks, results.__getitem__), RunStatus(run.status))
