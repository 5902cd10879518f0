"""`python -m plait` is the command `plait`, for where the script is not on the path."""

from plait.runner.cli import main

if __name__ == "__main__":
    main()
