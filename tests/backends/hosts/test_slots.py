"""The slots of a host: locks on files."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from plait.backends.hosts.slots import Slots, slots_taken


def test_machines_with_one_home_folder_have_slots_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    for machine in ("m1", "m2", "m1"):
        monkeypatch.setattr(platform, "node", lambda machine=machine: machine)
        slots = Slots(tmp_path, 1)
        taken.append(slots.take(f"{len(taken)}/1"))
        assert slots_taken(tmp_path) == 1
    assert taken == [True, True, False]
