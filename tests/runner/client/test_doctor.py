"""What `plait doctor` finds, as values."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.persistence.store_health import Verdict
from plait.runner.client.doctor import check_store, file_system, space, worst
from tests.support.stores.database import make

MOUNTS = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
50 27 0:40 / /home/my\040files rw shared:1 - nfs4 server:/export rw,vers=4.2
51 27 0:41 / /mnt/c rw - 9p drvfs rw
52 27 0:42 / /tmp rw - tmpfs tmpfs rw
53 27 0:43 / /tmp/x rw - ext4 /dev/vdb rw
54 27 0:44 / /tmp/x rw - cifs //server/share rw
55 27 0:45 / /f rw - fuse.sshfs host: rw
56 27 0:46 / /g rw - fuse.something thing rw
"""


@pytest.mark.parametrize(
    ("path", "verdict", "kind"),
    [
        ("/home/me/runs.db", Verdict.OK, "ext4"),
        ("/home/my files/runs.db", Verdict.BAD, "nfs4"),
        ("/home/my files too/runs.db", Verdict.OK, "ext4"),
        ("/mnt/c/runs.db", Verdict.BAD, "9p"),
        ("/tmp/runs.db", Verdict.WARNING, "tmpfs"),
        ("/tmp/x/runs.db", Verdict.BAD, "cifs"),
        ("/f/runs.db", Verdict.BAD, "fuse.sshfs"),
        ("/g/runs.db", Verdict.OK, "fuse.something"),
    ],
)
def test_file_systems(path: str, verdict: Verdict, kind: str) -> None:
    found = file_system(Path(path), MOUNTS)
    assert (found.verdict, kind in found.found) == (verdict, True)


def test_where_nothing_tells_it_says_so(tmp_path: Path) -> None:
    assert file_system(tmp_path, None).found == "cannot tell"
    assert space(tmp_path / "nowhere").verdict is Verdict.WARNING


def test_one_bad_finding_is_the_verdict() -> None:
    assert worst([Verdict.OK, Verdict.BAD, Verdict.WARNING]) is Verdict.BAD


async def test_an_interrupted_run_is_found_with_the_command_of_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    await make(path)
    findings = await check_store(path, lambda *words: f"myplait {' '.join(words)}")
    advice = [one.advice for one in findings if one.check == "runs" and one.verdict is Verdict.WARNING]
    assert any("myplait resume " in one for one in advice)
