"""Wrong words on the command line: one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.command import plait_here


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run", "give either a plan file (- for standard input) or --goal TEXT; see `plait run --help`"),
        ("run plan.yaml --x", "no such option --x; see `plait run --help`"),
        ("show a b c", "got unexpected extra argument (c); see `plait show --help`"),
        ("nope", "no such command 'nope'; see `plait --help`"),
        ("exprot", "no such command 'exprot'; did you mean 'export'?; see `plait --help`"),
        (
            "serve --cancel-grace x",
            "invalid value for '--cancel-grace': 'x' is not a number of seconds: --cancel-grace 5; "
            "see `plait serve --help`",
        ),
        (
            "serve --cancel-grace nan",
            "invalid value for '--cancel-grace': 'nan' is not a number of seconds: --cancel-grace 5; "
            "see `plait serve --help`",
        ),
        (
            "serve --cancel-grace -0.5",
            "invalid value for '--cancel-grace': -0.5 is not in the range 0<=x<=86400; see `plait serve --help`",
        ),
        (
            "run plan.yaml --budget x",
            "invalid value for '--budget': 'x' is not an amount in US dollars: --budget 5; see `plait run --help`",
        ),
        (
            "resume --budget nan",
            "invalid value for '--budget': 'nan' is not an amount in US dollars: --budget 5; see `plait resume --help`",
        ),
        ("check --run last --set a=b", "--set is for plans; a run has its inputs; see `plait check --help`"),
        (
            "check --schema --run last",
            "--schema checks nothing; leave PLAN, --run and --set out; see `plait check --help`",
        ),
        (
            "check --schema plan.yaml",
            "--schema checks nothing; leave PLAN, --run and --set out; see `plait check --help`",
        ),
        (
            "serve --port 65536",
            "invalid value for '--port': 65536 is not in the range 0<=x<=65535; see `plait serve --help`",
        ),
    ],
)
def test_one_line_and_exit_code_2(tmp_path: Path, words: str, said: str) -> None:
    done = plait_here(tmp_path, *words.split())
    assert (done.code, done.out, done.err) == (2, "", f"plait: {said}\n")
