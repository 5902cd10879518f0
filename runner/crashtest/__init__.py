"""The crash harness: real processes killed at named boundaries, started again, and judged by a witness of their own.

A parent without threads, event loop or open database forks a child for every start of a run. The child kills itself
with SIGKILL where it was told to; the next child resumes. What is believed does not come from the runner: a stand-in
backend writes down every execution before it works, a listener every result that was told, and the expected outcome is
computed from the DAG alone.

case ──► trial ──► fork server ──► child (stand-in backend, ledger) ──► judge ──► tally ──► certificate
"""
