"""The crash harness: real processes, killed at named failpoints, restarted, and judged by independent evidence.

A parent without threads, event loop or open database forks a child for every start of a run. The child kills itself
with SIGKILL at the given failpoint; the next child resumes. The evidence does not come from the runner: a fake backend
records every execution before working, a listener records every delivered result, and the expected outcome is computed
from the DAG alone.

case ──► trial ──► fork server ──► child (fake backend, ledger) ──► judge ──► tally ──► certificate
"""
