"""The contents of a wheel are judged rightly; `make release-check` builds real ones."""

from __future__ import annotations

import pytest

from tests.docs.release_check import ROOT, ReleaseError, check_contents, example, tracked

WHOLE = {"plait/__init__.py", "plait/py.typed", "plait/runner/serving/page/dom.js", "plait-0.1.0.dist-info/RECORD"}


def test_every_tracked_file_of_the_packages_is_wanted() -> None:
    wanted = tracked()
    assert {"plait/__init__.py", "plait/runner/parallel_runner.py", "plait/runner/serving/page/dom.js"} <= wanted
    assert not {"plait/runner", "plait/backends", "plait/persistence"} & wanted
    assert all((ROOT / "src" / name).is_file() for name in wanted)


def test_a_whole_wheel_passes() -> None:
    check_contents(WHOLE, {"plait/py.typed", "plait/runner/serving/page/dom.js"}, "the wheel")


def test_a_second_package_and_a_missing_file_are_wrong() -> None:
    with pytest.raises(ReleaseError, match="top-level names besides plait: runner"):
        check_contents({*WHOLE, "runner/__init__.py"}, WHOLE, "the wheel")
    with pytest.raises(ReleaseError, match=r"the wheel lacks 1 files of the checkout: plait/py\.typed"):
        check_contents(WHOLE - {"plait/py.typed"}, WHOLE, "the wheel")


def test_the_example_is_the_one_with_the_runner() -> None:
    assert "ParallelRunner(OpenAIBackend()" in example()
