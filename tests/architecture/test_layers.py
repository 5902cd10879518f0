"""The layers of docs/explanation/design.md hold: no import from above or beside, no circle; pure packages are pure, and
the state of a run has one writer. Each check can fail. All in one file, so that one process parses the packages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture.layers import LAYERS, breaches, import_circle, name_of
from tests.architecture.rules import (
    PACKAGES,
    PURE,
    STATE_WRITERS,
    Rule,
    pure_packages_stay_pure,
    run_state_has_one_writer,
)
from tests.architecture.source import Source

ROOT = Path(__file__).parents[2]
SOURCES = [
    Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if package != "src/plait" or path.parent == ROOT / package
]


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


# Every rule with files that break it, one finding each.
RULES: dict[Rule, list[tuple[str, str]]] = {
    pure_packages_stay_pure: [
        ("runner/domain/dag.py", "import anyio.lowlevel"),
        ("runner/prompts/x.py", "def f():\n    import time"),
        ("src/plait/task.py", "from plait.runner.engine.checkpointer import Checkpointer"),
    ],
    run_state_has_one_writer: [
        ("runner/engine/x.py", "def f(self):\n    self._state.statuses[position] = TaskStatus.RUNNING"),
        ("runner/engine/x.py", "def f(run):\n    run.state.attempts[position] += 1"),
        ("runner/engine/x.py", "def f(state):\n    state.usage, state._usage = 1, 2"),
        ("runner/engine/x.py", "def f(state):\n    del state.results[position]"),
        ("runner/recovery/x.py", "async def f(state):\n    state.parts[position].append(part)"),
        ("runner/recovery/x.py", "def f(state):\n    state.continuations.pop(position, None)"),
        ("runner/recovery/x.py", "def f(it: RunState):\n    it.answers.update(answers)"),
        ("runner/x.py", "def f():\n    fresh = RunState(dag)\n    fresh._started |= {1}"),
        ("runner/x.py", "def f(run):\n    its = run.state\n    its.attempts += [0]"),
        ("runner/x.py", "def f(state):\n    dag, known = state.dag, state.statuses\n    known[0] = TaskStatus.FAILED"),
        ("runner/x.py", "def f(state):\n    known = state.attempts\n    known += [0]"),
        ("runner/x.py", "def f(state):\n    dag = state.dag\n    dag.join(position, parts)"),
        ("runner/x.py", "def f(state):\n    for state._usage in usages:\n        pass"),
        ("runner/x.py", "def f(state):\n    setattr(state, 'keeps_all', True)"),
    ],
}


def _report(rule: Rule, sources: Iterable[Source]) -> list[str]:
    return [f"{source.path}:{line}: {what}" for source in sources for line, what in rule(source)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds_and_can_fail(rule: Rule) -> None:
    found = _report(rule, SOURCES)
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)
    for path, text in RULES[rule]:
        assert len(_report(rule, [Source(path, text)])) == 1, text


def test_reading_a_state_and_calling_its_verbs_is_no_write() -> None:
    text = "def f(state):\n    state.start(0)\n    mine = dict(state.results)\n    mine[0] = state.results[0]"
    assert _report(run_state_has_one_writer, [Source("runner/y.py", text)]) == []


def test_the_places_that_rules_name_are_there() -> None:
    for pattern in (*PURE, *STATE_WRITERS):
        assert any(source.lies_in(pattern) for source in SOURCES), f"{pattern} is gone: mend the list and design.md"
