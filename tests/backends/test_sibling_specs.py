"""A file named by `call` imports the modules beside it, and two plans with modules of the same name keep their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plait.backends import ConversationRequest
from plait.backends.backend_specs import FunctionSpec, build
from plait.errors import BackendUnavailable


def make(folder: Path, word: str) -> Path:
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "inner.py").write_text(f"WORD = {word!r}\n")
    (folder / "helper.py").write_text("from parts.inner import WORD\nseen = []\n")
    for name in ("first", "second"):
        code = "import helper\ndef call(prompt):\n    helper.seen.append(prompt)\n"
        (folder / f"{name}.py").write_text(f"{code}    return f'{{helper.WORD}} {{len(helper.seen)}}'\n")
    return folder


async def answer(folder: Path, call: str) -> str:
    async with build(FunctionSpec(kind="function", call=call), folder=folder).open(ConversationRequest()) as talk:
        return (await talk.send("hello")).text


async def test_files_import_the_modules_of_their_own_folder_and_share_them(tmp_path: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    a, b = make(tmp_path / "a", "one"), make(tmp_path / "b", "two")
    assert await answer(a, "first.py:call") == "one 1"
    assert await answer(b, "first.py:call") == "two 1"
    assert await answer(a, "second.py:call") == "one 2"
    assert sys.path == path
    new = set(sys.modules) - modules
    assert not new & {"helper", "parts", "parts.inner"}


async def test_a_module_of_the_same_name_from_elsewhere_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, word in (("other", "other"), ("a", "one")):
        (make(tmp_path / name, word) / "parts" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    import helper  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

    try:
        assert await answer(tmp_path / "a", "first.py:call") == "one 1"
        assert sys.modules["helper"] is helper
    finally:
        for name in ("helper", "parts", "parts.inner"):
            sys.modules.pop(name, None)


def test_a_file_that_cannot_be_loaded_leaves_the_path_as_it_was(tmp_path: Path) -> None:
    path = list(sys.path)
    (tmp_path / "bad.py").write_text("import no_such_sibling\n")
    with pytest.raises(BackendUnavailable, match="no_such_sibling"):
        build(FunctionSpec(kind="function", call="bad.py:call"), folder=tmp_path)
    assert sys.path == path


async def test_a_package_installed_inside_the_folder_is_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "installed_here.py").write_text("")
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "tool.py").write_text("import installed_here\ndef call(prompt):\n    return prompt\n")
    try:
        assert await answer(tmp_path, "tool.py:call") == "hello"
        assert "installed_here" in sys.modules
    finally:
        sys.modules.pop("installed_here", None)
