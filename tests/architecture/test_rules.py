"""The rules of docs/explanation/design.md, read from the source with `ast`. Each rule is shown to be able to fail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.architecture.rules import (
    HOMES,
    PACKAGES,
    PURE,
    STATE_WRITERS,
    Rule,
    heavy_libraries_load_lazily,
    libraries_have_one_home,
    nothing_is_executed_or_unpickled,
    only_sqlite_opens_the_database,
    pure_packages_stay_pure,
    run_state_has_one_writer,
    sql_is_written_out,
    statuses_are_no_strings,
    work_belongs_to_task_groups,
)
from tests.architecture.source import Source

ROOT = Path(__file__).parent.parent.parent
SOURCES = [
    Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
]

# Every rule with files that break it, one finding each.
RULES: dict[Rule, Sequence[tuple[str, str]]] = {
    pure_packages_stay_pure: [
        ("runner/domain/dag.py", "import anyio.lowlevel"),
        ("runner/prompts/x.py", "def f():\n    import time"),
        ("src/plait/task.py", "from plait.runner.engine.checkpointer import Checkpointer"),
    ],
    libraries_have_one_home: [
        ("runner/x.py", "import aiosqlite"),
        ("persistence/postgres/store.py", "import sqlite3"),
        ("backends/x.py", "def f():\n    from importlib import import_module\n    import_module('aiohttp.web')"),
    ],
    heavy_libraries_load_lazily: [
        ("backends/models/http_client.py", "try:\n    import aiohttp\nexcept ImportError:\n    pass"),
        ("backends/models/http_client.py", "import importlib\nhttp = importlib.import_module('aiohttp')"),
        ("runner/domain/dag.py", "import networkx as nx"),
    ],
    work_belongs_to_task_groups: [
        ("runner/x.py", "loop.create_task(f())"),
        ("backends/x.py", "from asyncio import gather"),
        ("persistence/x.py", "asyncio.ensure_future(f())"),
    ],
    statuses_are_no_strings: [
        ("runner/x.py", "done = status == 'completed'"),
        ("runner/cli/x.py", "done = status in {'failed', TaskStatus.SKIPPED}"),
        ("runner/x.py", "match status:\n    case 'running':\n        pass"),
        ("runner/x.py", "ended = event.kind == 'task_completed'"),
        ("runner/cli/x.py", "added = event.kind in {RunCreated.kind, 'tasks_added'}"),
        ("runner/x.py", "match event.kind:\n    case 'session_opened':\n        pass"),
    ],
    nothing_is_executed_or_unpickled: [
        ("runner/x.py", "import pickle"),
        ("backends/x.py", "subprocess.run(line, shell=True)"),
        ("runner/x.py", "eval(text)"),
        ("runner/plan/x.py", "yaml.load(text, Loader=SafeLoader)"),
    ],
    sql_is_written_out: [
        ("persistence/x.py", "def f(table):\n    q = f'SELECT * FROM {table}'"),
        ("persistence/x.py", "q = 'DELETE FROM runs WHERE run_id = %s' % run_id"),
        ("persistence/x.py", "q = 'PRAGMA user_version = ' + version"),
        ("persistence/x.py", "q = 'UPDATE {} SET a = 1'.format(table)"),
        ("persistence/x.py", "connection.execute(f'{statement} LIMIT 1')"),
        ("persistence/x.py", "connection.executescript(script)"),
    ],
    only_sqlite_opens_the_database: [
        ("persistence/x.py", "open(path)"),
        ("persistence/x.py", "head = path.read_bytes()"),
        ("persistence/x.py", "os.open(path, os.O_RDWR)"),
    ],
    run_state_has_one_writer: [
        ("runner/engine/x.py", "def f(self):\n    self._state.statuses[position] = TaskStatus.RUNNING"),
        ("runner/engine/x.py", "def f(run):\n    run.state.attempts[position] += 1"),
        ("runner/engine/x.py", "def f(state):\n    state.usage, state._usage = 1, 2"),
        ("runner/engine/x.py", "def f(state):\n    del state.results[position]"),
        ("runner/recovery/x.py", "async def f(state):\n    state.parts[position].append(part)"),
        ("runner/recovery/x.py", "def f(state):\n    state.continuations.pop(position, None)"),
        ("runner/recovery/x.py", "def f(it: RunState):\n    it._answers.update(answers)"),
        ("runner/x.py", "def f():\n    fresh = RunState(dag)\n    fresh._started |= {1}"),
        ("runner/x.py", "def f(run):\n    its = run.state\n    its._attempts += [0]"),
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
def test_the_rule_holds(rule: Rule) -> None:
    found = _report(rule, SOURCES)
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_can_fail(rule: Rule) -> None:
    for path, text in RULES[rule]:
        assert len(_report(rule, [Source(path, text)])) == 1, text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_lets_the_neighbours_pass(rule: Rule) -> None:
    innocent = [
        Source("runner/x.py", "from plait.backends.backend_protocol import Reply\nimport time\nkind = mode == 'skip'"),
        Source(
            "runner/y.py",
            "def f(state):\n    state.start(0)\n    mine = dict(state.results)\n    mine[0] = state.results[0]",
        ),
        Source("backends/models/http_client.py", "def f():\n    import aiohttp"),
        Source("runner/domain/dag.py", "if TYPE_CHECKING:\n    import networkx as nx\nimport re"),
        Source("persistence/x.py", "import sqlite3\nfd = os.open(p, os.O_CREAT | os.O_EXCL)\nos.close(fd)"),
        Source("persistence/y.py", "text = files('p').joinpath('x.sql').read_text()\ne = f'run {r} is gone'"),
    ]
    assert _report(rule, innocent) == []


@pytest.mark.parametrize("pattern", [*PURE, *HOMES.values(), *STATE_WRITERS])
def test_the_places_that_rules_name_are_there(pattern: str) -> None:
    assert any(source.lies_in(pattern) for source in SOURCES), f"{pattern} is gone: mend the list and design.md"
