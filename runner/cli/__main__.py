"""`python -m runner.cli`, for where the script `plait` is not on the path."""

from __future__ import annotations

from runner.cli import main

if __name__ == "__main__":
    main()
