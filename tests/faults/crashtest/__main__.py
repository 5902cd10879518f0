"""`python -m tests.faults.crashtest`."""

from tests.faults.crashtest.command import main

main()
