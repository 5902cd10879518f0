"""The layers of docs/explanation/design.md hold: no import from above or beside, no circle. Both checks can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture.layers import LAYERS, breaches, import_circle, name_of
from tests.architecture.source import Source

ROOT = Path(__file__).parents[2]
SOURCES = [
    Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    for package in ("src/plait", "runner", "backends", "persistence")
    for path in sorted((ROOT / package).rglob("*.py"))
    if package != "src/plait" or path.parent == ROOT / package
]


@pytest.mark.slow
def test_each_module_imports_from_lower_layers_only() -> None:
    assert breaches(SOURCES) == []


def test_no_modules_import_each_other() -> None:
    assert import_circle(SOURCES) == []


def test_each_name_of_the_layers_is_there() -> None:
    for name in [name for units in LAYERS for unit in units for name in unit.split()]:
        path = ROOT / "src" / "plait" / name.removeprefix("plait").replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), f"{name} is gone: mend LAYERS and design.md"


def test_few_files_lie_flat_in_the_runner() -> None:
    assert len(list((ROOT / "runner").glob("*.py"))) <= 5


def repeated_names(paths: Iterable[Path]) -> set[str]:
    """The names that several modules have, or that differ from another by a plural alone."""
    names = Counter(path.stem for path in paths if path.stem not in {"__init__", "__main__"})
    return {name for name, number in names.items() if number > 1 or f"{name}s" in names}


def test_each_module_has_a_name_of_its_own() -> None:
    assert repeated_names(Path(source.path) for source in SOURCES) == set()
    assert repeated_names([Path("a/reader.py"), Path("b/reader.py"), Path("a/key.py"), Path("b/keys.py")]) == {
        "reader",
        "key",
    }


@pytest.mark.parametrize(
    "text",
    [
        "from plait.runner.engine import executor",
        "def f():\n    from plait.runner.engine.executor import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import plait.runner.engine.executor",
        "from ..engine import executor",
        "from plait.runner.policies import x",
    ],
    ids=["above", "lazy", "for types", "relative", "beside"],
)
def test_a_breach_is_found(text: str) -> None:
    others = [Source("runner/engine/executor.py", ""), Source("runner/policies/x.py", "")]
    assert len(breaches([Source("runner/state/x.py", text), *others])) == 1


def test_a_leaf_imports_neither_the_other_leaf_nor_the_runner() -> None:
    below = [Source("runner/prompts/prompt_names.py", ""), Source("backends/backend_protocol.py", "")]
    found = breaches([Source("persistence/tables.py", "import plait.backends.backend_protocol"), *below])
    found += breaches([Source("backends/prices.py", "from plait.runner.prompts import prompt_names"), *below])
    assert len(found) == 2


def test_a_word_imports_nothing_of_ours_but_words() -> None:
    others = [Source("src/plait/json_form.py", ""), Source("backends/backend_protocol.py", "")]
    (found,) = breaches(
        [Source("src/plait/usage.py", "import plait.backends.backend_protocol\nimport plait.json_form"), *others]
    )
    assert found == "src/plait/usage.py:1: usage imports plait.backends.backend_protocol"
    assert breaches([Source("persistence/store_records.py", "from plait import json_form"), *others]) == []


def test_a_module_without_a_layer_is_found() -> None:
    with pytest.raises(LookupError, match=r"plait\.runner\.helpers has no layer"):
        name_of("plait.runner.helpers")


def test_a_circle_is_found_through_lazy_imports_and_imports_for_types() -> None:
    circle = [
        Source("runner/a.py", "import json\nfrom plait.runner import b"),
        Source("runner/b.py", "def f():\n    from .c import x"),
        Source("runner/c.py", "if TYPE_CHECKING:\n    import plait.runner.a"),
    ]
    assert set(import_circle(circle)) == {
        "runner/a.py:2 imports plait.runner.b",
        "runner/b.py:2 imports plait.runner.c",
        "runner/c.py:2 imports plait.runner.a",
    }
    assert import_circle(circle[:2]) == []
