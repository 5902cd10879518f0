"""The crash harness: kill real processes at named boundaries, restart the processes, and judge from an own ledger.

A parent without threads, event loop or open database forks a child for every start of a run. The child ends by
SIGKILL at the boundary named by the trial; the next child resumes. The evidence does not come from the runner: a fake
backend records every execution in the ledger before the work, a listener records every reported result, and the
expected outcome is computed from the DAG alone.

case ──► trial ──► fork server ──► child (fake backend, ledger) ──► judge ──► tally ──► certificate
"""
